"""The GPUs of this machine, from the driver; what uses them, from NVML where it is there.

NVML knows nothing of the simulated GPU, and may be missing in containers: everything it adds is optional and None (or
empty) without it. Must never create a context.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from woodfrog.driver import library

_COMPUTE_CAPABILITY_MAJOR = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"
_COMPUTE_CAPABILITY_MINOR = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `ordinal` is this process's numbering (CUDA_VISIBLE_DEVICES changes it), `uuid` never changes."""

    ordinal: int
    uuid: bytes  # 16 bytes
    name: str
    total_bytes: int
    compute_capability: tuple[int, int]

    @property
    def uuid_text(self) -> str:
        """As nvidia-smi prints it."""
        return format_uuid(self.uuid)


@dataclass(frozen=True)
class GpuUse:
    """A process that NVML sees on a GPU; `used_bytes` None: not told (other containers, some driver branches)."""

    pid: int
    used_bytes: int | None


def list_gpus() -> list[Gpu]:
    """All GPUs that this process can see; NoDriverError without a driver."""
    return [_gpu(ordinal) for ordinal in range(int(library.call("cuDeviceGetCount")))]


def physical_uuids() -> list[bytes]:
    """All GPUs of this machine (or container), whatever CUDA_VISIBLE_DEVICES says, as NVML orders them; empty without
    NVML."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
        texts = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [bytes.fromhex(text.removeprefix("GPU-").replace("-", "")) for text in texts]


def format_uuid(uuid: bytes) -> str:
    """'GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx'."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@functools.cache
def driver_branch() -> tuple[int, ...] | None:
    """The driver's own version, e.g. (580, 159, 4); None when NVML is not there (the simulated GPU has none).
    Asked once: no driver is exchanged while this process has it loaded, and each question initialises NVML."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        text = _text(nvml.nvmlSystemGetDriverVersion())
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def cuda_version() -> tuple[int, int]:
    """The newest CUDA that the driver supports, e.g. (13, 0); NoDriverError without a driver."""
    number = int(library.call("cuDriverGetVersion"))
    return number // 1000, number % 1000 // 10


def free_bytes(uuid: bytes) -> int | None:
    """Free memory of a GPU without a context on it; None without NVML."""
    with _nvml() as nvml:
        if nvml is None or (device := _device(nvml, uuid)) is None:
            return None
        return int(nvml.nvmlDeviceGetMemoryInfo(device).free)


def users(uuid: bytes) -> list[GpuUse]:
    """Processes with a compute context on a GPU. NVML forgets one about a second after it has let go."""
    with _nvml() as nvml:
        if nvml is None or (device := _device(nvml, uuid)) is None:
            return []
        return [GpuUse(int(one.pid), one.usedGpuMemory) for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)]


def mig_enabled(uuid: bytes) -> bool | None:
    """Whether a GPU is split into MIG instances, which the driver cannot checkpoint; None when unknown."""
    with _nvml() as nvml:
        if nvml is None or (device := _device(nvml, uuid)) is None:
            return None
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(device)
        except nvml.NVMLError:
            return False  # the GPU does not know MIG
        return bool(current)


def _gpu(ordinal: int) -> Gpu:
    attributes = library.bindings().CUdevice_attribute
    device = library.call("cuDeviceGet", ordinal)
    uuid = library.call(
        "cuDeviceGetUuid_v2" if hasattr(library.bindings(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", device
    )
    return Gpu(
        ordinal=ordinal,
        uuid=bytes(uuid.bytes)[:16],
        name=_text(library.call("cuDeviceGetName", 256, device)),
        total_bytes=int(library.call("cuDeviceTotalMem", device)),
        compute_capability=(
            int(library.call("cuDeviceGetAttribute", getattr(attributes, _COMPUTE_CAPABILITY_MAJOR), device)),
            int(library.call("cuDeviceGetAttribute", getattr(attributes, _COMPUTE_CAPABILITY_MINOR), device)),
        ),
    )


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The NVML bindings, initialised, or None. NVML counts its users, so nested use is fine."""
    try:
        import pynvml  # only where something is asked of it
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _device(nvml: Any, uuid: bytes) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(format_uuid(uuid))
    except nvml.NVMLError:
        return None  # not a GPU that NVML knows: simulated, or hidden from this container


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return raw.split(b"\0", 1)[0].decode(errors="replace").strip()
