"""The GPUs as the daemon sees them: native Devices by UUID, brought up in the background when the daemon starts.

The first driver call of a process takes one to three seconds on a real machine, and so does each device's first
context; nobody's first operation shall wait for that.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from woodfrog.daemon import numa
from woodfrog.driver import devices as driver_devices
from woodfrog.errors import NotFoundError, WoodfrogError

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device

log = logging.getLogger(__name__)

WARM_UP_CHUNK_BYTES = 64 << 10  # a store's default


class Devices:
    """All GPUs that the daemon sees, by UUID (32 hex digits). Thread-safe; methods wait for `start` to finish."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._devices: dict[str, Device] = {}
        self._nodes: dict[str, int] = {}
        self._failure: str = ""

    def start(self) -> None:
        """Bring the driver and the devices up, on a thread of their own."""
        threading.Thread(target=self._bring_up, name="devices", daemon=True).start()

    def _bring_up(self) -> None:
        try:
            from woodfrog._native import transfer

            devices = [transfer.Device(ordinal) for ordinal in range(transfer.device_count())]
            for device in devices:
                device.free_bytes()  # makes its context
            self._nodes = {bytes(device.uuid).hex(): numa.node_of(device.ordinal) for device in devices}
            self._devices = {bytes(device.uuid).hex(): device for device in devices}
            driver_devices.list_gpus()  # loads cuda-bindings, half a second that no operation should pay
            log.info("%d device(s): %s", len(devices), ", ".join(device.name for device in devices))
        except (RuntimeError, ImportError, OSError, WoodfrogError) as failure:
            self._failure = str(failure)
            log.warning("no GPU can be used: %s", failure)
        finally:
            self._ready.set()
        for device in self._devices.values():
            _warm_up(device)

    @property
    def failure(self) -> str:
        """Why there is no device, or an empty string."""
        self._ready.wait()
        return self._failure

    def all(self) -> dict[str, Device]:
        self._ready.wait()
        return dict(self._devices)

    def by_uuid(self, uuid: str) -> Device:
        """The device with this UUID; NotFoundError names the ones that are there."""
        devices = self.all()
        if uuid in devices:
            return devices[uuid]
        if self._failure:
            raise WoodfrogError(f"the daemon cannot use the GPU: {self._failure}", advice="run `woodfrog doctor`")
        raise NotFoundError(f"no GPU {uuid} here; there are: {', '.join(devices) or 'none'}")

    def by_ordinal(self, ordinal: int) -> str:
        """The UUID of the daemon's device number `ordinal`."""
        for uuid, device in self.all().items():
            if device.ordinal == ordinal:
                return uuid
        raise NotFoundError(f"there is no GPU number {ordinal}; there are {len(self.all())}")

    def node_of(self, uuid: str) -> int:
        """The NUMA node of this device; -1 when it has none of its own."""
        self._ready.wait()
        return self._nodes.get(uuid, numa.UNBOUND)

    def nodes(self) -> list[int]:
        """The NUMA node of each device."""
        self._ready.wait()
        return list(self._nodes.values())

    @property
    def total_bytes(self) -> int:
        return sum(device.total_bytes for device in self.all().values())


def _warm_up(device: Device) -> None:
    """Load the kernels that hash and gather: the first target to be checkpointed shall not wait for that."""
    from woodfrog._native import transfer

    try:
        if device.hashes != "gpu":
            return
        memory = device.create_memory(device.granularity_bytes)
        try:
            transfer.hash_device([(memory, 0, memory.size_bytes)], chunk_bytes=WARM_UP_CHUNK_BYTES)
        finally:
            memory.release()
    except RuntimeError as failure:  # a full GPU: it costs the first checkpoint some time
        log.info("the kernels of GPU %d are loaded when they are needed: %s", device.ordinal, failure)
