"""What the driver can do alone, measured in the same run as woodfrog: the copy ceilings and its own checkpoint.

The ceilings are pinned ``cuMemcpy`` in both directions, into host memory of the kind an arena is made of (huge pages,
populated by several threads, registered once); the checkpoint is ``cuCheckpointProcess*`` on the pid of a target.
Copies move bytes between raw addresses: no GPU byte enters a Python object. Everything is done from the one process
that imports this module, because a new process would pay for its own initialisation of CUDA each time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness import GIB

POPULATE_THREADS = min(16, os.cpu_count() or 1)
COPY_BYTES = 64 << 20  # of one cuMemcpy: large enough that its start costs nothing


class DriverError(Exception):
    """A driver call failed; the text names the call and the driver's error."""


def _call(name: str, *arguments: Any) -> Any:
    """Calls the driver function ``name``; returns its one result, or None where it has none."""
    from cuda.bindings import driver

    error, *results = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name} gave {error.name} ({int(error)})")
    return results[0] if results else None


@contextmanager
def context() -> Iterator[None]:
    """A CUDA context on GPU 0, current for the calling thread until the block is left."""
    from cuda.bindings import driver

    _call("cuInit", 0)
    device = _call("cuDeviceGet", 0)
    primary = _call("cuDevicePrimaryCtxRetain", device)
    _call("cuCtxPushCurrent", primary)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


def free_gpu_bytes() -> int:
    """Free memory of the current context's GPU."""
    from cuda.bindings import driver

    error, free_bytes, _ = driver.cuMemGetInfo()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"cuMemGetInfo gave {error.name} ({int(error)})")
    return int(free_bytes)


@contextmanager
def populated_memory(size_bytes: int) -> Iterator[int]:
    """Anonymous host memory, in huge pages where the kernel gives them, touched by several threads; its address."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without transparent huge pages gives small ones, as it would to any program.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    share = -(-size_bytes // POPULATE_THREADS // mmap.PAGESIZE) * mmap.PAGESIZE
    parts = [(begin, min(share, size_bytes - begin)) for begin in range(0, size_bytes, share)]
    try:
        with concurrent.futures.ThreadPoolExecutor(POPULATE_THREADS) as pool:
            # ctypes gives up the interpreter's lock during memset.
            list(pool.map(lambda part: ctypes.memset(address + part[0], 1, part[1]), parts))
        yield address
    finally:
        del view
        memory.close()


def warm_host_memory(size_bytes: int) -> float:
    """Touches and frees host memory; returns the seconds it took.

    A virtual machine may get its memory from its host only when it first touches it. Whoever is measured first would
    pay for that, so it is paid before.
    """
    begin_s = time.perf_counter()
    with populated_memory(size_bytes):
        pass
    return time.perf_counter() - begin_s


@dataclass(frozen=True)
class Ceiling:
    """The best rates that pinned copies reached, in bytes per second."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    streams: int
    size_bytes: int

    def members(self) -> dict[str, float]:
        """For a row or a summary, in GB/s (10^9 bytes)."""
        return {
            "ceiling_d2h_gb_per_s": self.d2h_bytes_per_s / 1e9,
            "ceiling_h2d_gb_per_s": self.h2d_bytes_per_s / 1e9,
        }


@contextmanager
def _both_memories(device_bytes: int, host_bytes: int) -> Iterator[tuple[int, int]]:
    """GPU memory that was written once, and pinned host memory; in a context of their own."""
    with context(), populated_memory(host_bytes) as host:
        _call("cuMemHostRegister", host, host_bytes, 0)
        try:
            device = int(_call("cuMemAlloc", device_bytes))
            try:
                _call("cuMemsetD32", device, 0x5EED5EED, device_bytes // 4)
                _call("cuCtxSynchronize")
                yield device, host
            finally:
                _call("cuMemFree", device)
        finally:
            _call("cuMemHostUnregister", host)


def copy_ceiling(size_bytes: int, *, ring_bytes: int = 2 * GIB, repetitions: int = 3) -> Ceiling:
    """Copies ``size_bytes`` each way through a pinned ring, on one and on two streams, and keeps the best of each.

    Needs ``size_bytes`` of free GPU memory and ``ring_bytes`` of host memory. Raises DriverError.
    """
    ring_bytes = min(ring_bytes, size_bytes)
    best: dict[str, float] = {"cuMemcpyDtoHAsync": 0.0, "cuMemcpyHtoDAsync": 0.0}
    best_streams = 1
    with _both_memories(size_bytes, ring_bytes) as (device, host):
        streams = [_call("cuStreamCreate", 1) for _ in range(2)]  # 1: CU_STREAM_NON_BLOCKING
        for count in (1, 2):
            for call in best:
                for _ in range(repetitions):
                    rate = size_bytes / _copy_s(call, device, host, size_bytes, ring_bytes, streams[:count])
                    if rate > best[call]:
                        best[call] = rate
                        best_streams = count
        for stream in streams:
            _call("cuStreamDestroy", stream)
    return Ceiling(best["cuMemcpyDtoHAsync"], best["cuMemcpyHtoDAsync"], best_streams, size_bytes)


def _copy_s(call: str, device: int, host: int, size_bytes: int, ring_bytes: int, streams: list[Any]) -> float:
    to_host = call == "cuMemcpyDtoHAsync"
    begin_s = time.perf_counter()
    for number, offset in enumerate(range(0, size_bytes, COPY_BYTES)):
        place = offset % ring_bytes
        size = min(COPY_BYTES, size_bytes - offset, ring_bytes - place)
        stream = streams[number % len(streams)]
        if to_host:
            _call(call, host + place, device + offset, size, stream)
        else:
            _call(call, device + offset, host + place, size, stream)
    for stream in streams:
        _call("cuStreamSynchronize", stream)
    return time.perf_counter() - begin_s


def both_ways_s(to_host_bytes: int, to_device_bytes: int, *, ring_bytes: int = 2 * GIB, repetitions: int = 3) -> float:
    """Seconds of pinned copies in both directions at once, from the first one's start to the last one's end: the best
    of the repetitions. Each direction has two streams and a ring of its own.

    Needs twice ``ring_bytes`` of free GPU memory and of host memory. Raises DriverError.
    """
    ring_bytes = min(ring_bytes, max(to_host_bytes, to_device_bytes))
    with _both_memories(2 * ring_bytes, 2 * ring_bytes) as (device, host):
        streams = [_call("cuStreamCreate", 1) for _ in range(4)]  # 1: CU_STREAM_NON_BLOCKING
        ways = (
            ("cuMemcpyDtoHAsync", host, device, to_host_bytes),
            ("cuMemcpyHtoDAsync", device + ring_bytes, host + ring_bytes, to_device_bytes),
        )
        seconds = [_both_ways_once_s(ways, ring_bytes, streams) for _ in range(repetitions)]
        for stream in streams:
            _call("cuStreamDestroy", stream)
    return min(seconds)


def _both_ways_once_s(ways: Any, ring_bytes: int, streams: list[Any]) -> float:
    begin_s = time.perf_counter()
    for number, offset in enumerate(range(0, max(way[3] for way in ways), COPY_BYTES)):
        place = offset % ring_bytes
        for direction, (call, to, source, size_bytes) in enumerate(ways):  # in turn, so that both begin at once
            size = min(COPY_BYTES, size_bytes - offset, ring_bytes - place)
            if size > 0:
                _call(call, to + place, source + place, size, streams[2 * direction + number % 2])
    for stream in streams:
        _call("cuStreamSynchronize", stream)
    return time.perf_counter() - begin_s


@dataclass(frozen=True)
class DriverCycle:
    """Seconds of each call of one lock, checkpoint, restore, unlock of a target by the driver alone."""

    lock_s: float
    checkpoint_s: float
    restore_s: float
    unlock_s: float

    @property
    def total_s(self) -> float:
        """From the beginning of the lock to the end of the unlock."""
        return self.lock_s + self.checkpoint_s + self.restore_s + self.unlock_s


def driver_cycle(pid: int, *, lock_timeout_s: float = 10.0) -> DriverCycle:
    """Takes the process through the driver's own checkpoint and restore; it runs on afterwards.

    Raises DriverError; the target then runs if the lock failed, else it is left as the driver left it.
    """
    return DriverCycle(*driver_out(pid, lock_timeout_s=lock_timeout_s), *driver_in(pid))


def driver_out(pid: int, *, lock_timeout_s: float = 10.0) -> tuple[float, float]:
    """Locks the process and takes it off the GPU; the seconds of each. Raises DriverError."""
    return driver_lock(pid, lock_timeout_s=lock_timeout_s), driver_checkpoint(pid)


def driver_lock(pid: int, *, lock_timeout_s: float = 10.0) -> float:
    """Locks the process; seconds. Raises DriverError."""
    from cuda.bindings import driver

    _call("cuInit", 0)
    arguments = driver.CUcheckpointLockArgs()
    arguments.timeoutMs = int(lock_timeout_s * 1000)
    return _timed("cuCheckpointProcessLock", pid, arguments)


def driver_checkpoint(pid: int) -> float:
    """Takes a locked process off the GPU; seconds. Raises DriverError."""
    return _timed("cuCheckpointProcessCheckpoint", pid, None)


def driver_in(pid: int) -> tuple[float, float]:
    """Brings a process that `driver_out` took off the GPU back; the seconds of each. Raises DriverError."""
    return _timed("cuCheckpointProcessRestore", pid, None), _timed("cuCheckpointProcessUnlock", pid, None)


def _timed(name: str, *arguments: Any) -> float:
    begin_s = time.perf_counter()
    _call(name, *arguments)
    return time.perf_counter() - begin_s
