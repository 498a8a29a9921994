"""GPU memory by the driver API alone (cuda-bindings), for targets that also run on the simulated GPU."""

from __future__ import annotations

import ctypes
from typing import Any


def checked(result: tuple[Any, ...]) -> Any:
    """The value that a driver call returned; SystemExit if it failed."""
    error, *values = result
    if int(error) != 0:
        raise SystemExit(f"the driver said {error!r}")
    return values[0] if values else None


class Gpu:
    """One GPU's primary context, current in the calling thread whenever something is asked of it."""

    def __init__(self, number: int) -> None:
        """`number`, modulo how many there are."""
        from cuda.bindings import driver

        self._driver = driver
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(number % checked(driver.cuDeviceGetCount())))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(device))
        self._enter()

    def alloc(self, size_bytes: int) -> int:
        self._enter()
        return int(checked(self._driver.cuMemAlloc(size_bytes)))

    def write(self, address: int, data: bytes) -> None:
        self._enter()
        checked(self._driver.cuMemcpyHtoD(address, data, len(data)))

    def read(self, address: int, size_bytes: int) -> bytes:
        self._enter()
        found = (ctypes.c_ubyte * size_bytes)()
        checked(self._driver.cuMemcpyDtoH(ctypes.addressof(found), address, size_bytes))
        return bytes(found)

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Within the GPU; done when this returns."""
        self._enter()
        checked(self._driver.cuMemcpyDtoD(to, source, size_bytes))
        checked(self._driver.cuCtxSynchronize())

    def give(self, address: int) -> bytes:
        """The legacy IPC handle of an allocation."""
        self._enter()
        return bytes(checked(self._driver.cuIpcGetMemHandle(address)).reserved)

    def take(self, handle: bytes) -> int:
        """Where another process's allocation on this GPU is mapped here."""
        self._enter()
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        lazy = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(checked(self._driver.cuIpcOpenMemHandle(wanted, int(lazy))))

    def _enter(self) -> None:
        checked(self._driver.cuCtxSetCurrent(self._context))
