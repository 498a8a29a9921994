"""A process that makes checkpoint calls about others, as the node daemon does: commands on stdin, answers on stdout.

`ACTION PID [ARGUMENT …]` → the CUresult as a number, for `state` followed by the state.
"""

from __future__ import annotations

import ctypes
import sys

LIBRARY = ctypes.CDLL("libcuda.so.1")


class LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class Pair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_char * 16), ("new", ctypes.c_char * 16)]


class RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 44),
        ("reserved1", ctypes.c_uint64),
    ]


def pairs_of(arguments: list[str]) -> RestoreArgs:
    """`OLDHEX=NEWHEX` for each device."""
    pairs = (Pair * len(arguments))()
    for pair, argument in zip(pairs, arguments, strict=True):
        old, new = (bytes.fromhex(part) for part in argument.split("="))
        ctypes.memmove(ctypes.addressof(pair), old + new, 32)
    return RestoreArgs(pairs, len(arguments), b"", 0)


def perform(action: str, pid: int, arguments: list[str]) -> str:
    if action == "state":
        state = ctypes.c_int(-1)
        result = LIBRARY.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        return f"{result} {state.value}"
    if action == "thread":
        thread = ctypes.c_int(-1)
        result = LIBRARY.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(thread))
        return f"{result} {thread.value}"
    if action == "lock":
        lock = LockArgs(timeout_ms=int(arguments[0]) if arguments else 0)
        return str(LIBRARY.cuCheckpointProcessLock(pid, ctypes.byref(lock)))
    if action == "checkpoint":
        return str(LIBRARY.cuCheckpointProcessCheckpoint(pid, None))
    if action == "restore":
        restore = pairs_of(arguments)
        return str(LIBRARY.cuCheckpointProcessRestore(pid, ctypes.byref(restore) if arguments else None))
    if action == "unlock":
        return str(LIBRARY.cuCheckpointProcessUnlock(pid, None))
    raise ValueError(action)


for line in sys.stdin:
    words = line.split()
    print(perform(words[0], int(words[1]), words[2:]), flush=True)
