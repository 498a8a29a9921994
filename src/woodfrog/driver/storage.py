"""Custom storage (CUDA 13.4, driver 615): the driver maps a target's GPU memory here, and we copy it.

    with begin_checkpoint(pid) as lent:      # target locked → checkpointing
        … copy lent.pieces out …             # transfer.Device.view_memory, drain
    # target checkpointed; its GPU memory is free

and the same with `begin_restore`, where what is copied in is what the target finds. Looked up at run time, and declared
here as NVIDIA documents it for CUDA 13.4, since cuda-bindings 13.0 does not know these types. Never leave
a block before every copy has ended: the driver takes them for done then.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from woodfrog.driver import features, library
from woodfrog.driver.process import GpuPair
from woodfrog.errors import RefusedError

FEATURE = "custom_storage"


class _DeviceData(ctypes.Structure):
    """CUcheckpointCustomStoragePerDeviceData."""

    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p))


class _Info(ctypes.Structure):
    """CUcheckpointCustomStorageInfo: the driver's, until the operation is complete."""

    _fields_ = (("handle", ctypes.c_void_p), ("devices", ctypes.POINTER(_DeviceData)), ("count", ctypes.c_uint))


class _CheckpointArguments(ctypes.Structure):
    """CUcheckpointCheckpointArgs, 64 bytes."""

    _fields_ = (("info", ctypes.POINTER(ctypes.POINTER(_Info))), ("reserved", ctypes.c_char * 56))


class _Pair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", ctypes.c_char * 16), ("new", ctypes.c_char * 16))


class _RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs, 64 bytes."""

    _fields_ = (
        ("pairs", ctypes.POINTER(_Pair)),
        ("pair_count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("info", ctypes.POINTER(ctypes.POINTER(_Info))),
        ("reserved", ctypes.c_char * 40),
    )


assert ctypes.sizeof(_CheckpointArguments) == ctypes.sizeof(_RestoreArguments) == 64


@dataclass(frozen=True)
class Piece:
    """GPU memory of the target on one GPU, one range: where it is mapped here, by this process's device ordinal."""

    ordinal: int
    address: int
    size_bytes: int


class Lent:
    """What the driver has mapped here for one operation; leaving the block completes it, also after an exception.

    After an exception the contents are what was copied by then: a checkpoint that failed so has lost the rest, since
    the driver knows no way back.
    """

    def __init__(self, pid: int, info: Any) -> None:
        self.pid = pid
        self._handle = info.contents.handle
        found = (info.contents.devices[index] for index in range(info.contents.count))
        self.pieces = [Piece(_ordinal_of(one.stream), int(one.address), int(one.size)) for one in found]

    def __enter__(self) -> Lent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        library.call_raw("cuCheckpointOperationComplete", ctypes.c_void_p(self._handle), pid=self.pid)


def available() -> bool:
    """Whether this machine's driver has it."""
    return features.has(FEATURE)


def begin_checkpoint(pid: int) -> Lent:
    """Map the GPU memory of a locked target. RefusedError before driver 615, DriverError when it fails."""
    _require()
    info = ctypes.POINTER(_Info)()
    arguments = _CheckpointArguments(info=ctypes.pointer(info))
    library.call_raw("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), ctypes.byref(arguments), pid=pid)
    return Lent(pid, info)


def begin_restore(pid: int, gpu_pairs: Sequence[GpuPair] = ()) -> Lent:
    """Map new, clear GPU memory for a target that was checkpointed into custom storage; it is to be filled."""
    _require()
    pairs = (_Pair * max(1, len(gpu_pairs)))()
    for entry, pair in zip(pairs, gpu_pairs, strict=False):
        ctypes.memmove(ctypes.byref(entry), pair.old_uuid + pair.new_uuid, 32)
    info = ctypes.POINTER(_Info)()
    arguments = _RestoreArguments(pair_count=len(gpu_pairs), info=ctypes.pointer(info))
    if gpu_pairs:
        arguments.pairs = ctypes.cast(pairs, ctypes.POINTER(_Pair))
    library.call_raw("cuCheckpointProcessRestore", ctypes.c_int(pid), ctypes.byref(arguments), pid=pid)
    return Lent(pid, info)


def _require() -> None:
    if not available():
        raise RefusedError(
            "This machine's driver has no custom storage: it copies a target's GPU memory itself.",
            advice="driver 615 (CUDA 13.4) or newer has it",
        )


def _ordinal_of(stream: int | None) -> int:
    """The device of a stream of the driver's."""
    context = ctypes.c_void_p()
    library.call_raw("cuStreamGetCtx", ctypes.c_void_p(stream), ctypes.byref(context))
    device = ctypes.c_int()
    library.call_raw("cuCtxPushCurrent_v2", context)
    try:
        library.call_raw("cuCtxGetDevice", ctypes.byref(device))
    finally:
        library.call_raw("cuCtxPopCurrent_v2", ctypes.byref(context))
    return device.value
