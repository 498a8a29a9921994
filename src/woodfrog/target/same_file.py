"""Which descriptors are one open file, in this process and in others: kcmp(2).

Two descriptors of GPU memory look alike in every other way (one device file, or memfds that were opened again), so
neither names nor inode numbers may ever be compared instead. Looks only, and owns no descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cmp_to_key
from pathlib import Path

from woodfrog.errors import RefusedError

_KCMP_FILE = 0  # linux/kcmp.h
_NUMBERS = {"x86_64": 312, "aarch64": 272}  # of the system call, asm/unistd.h
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class Holder:
    """A descriptor in another process that is the same open file as `ours`."""

    ours: int
    pid: int
    descriptor: int


def groups(descriptors: Sequence[int]) -> list[list[int]]:
    """Positions of descriptors of this process, those of one open file together, in the order of their first one.

    RefusedError where the kernel does not tell (built without kcmp, or forbidden by a container's profile).
    """
    me = os.getpid()
    order = _in_order(descriptors)
    found: list[list[int]] = []
    for at, position in enumerate(order):
        if at and compare(me, descriptors[order[at - 1]], me, descriptors[position]) == 0:
            found[-1].append(position)
        else:
            found.append([position])
    return sorted(sorted(group) for group in found)


def holders(descriptors: Sequence[int], pids: Iterable[int]) -> Iterator[Holder]:
    """Who of `pids` has one of `descriptors` (of this process, distinct files) open. What this user may not look into
    is left out, as are descriptors on their way through a socket."""
    me = os.getpid()
    ordered = [descriptors[position] for position in _in_order(descriptors)]
    kinds = {_link(me, descriptor) for descriptor in ordered}
    for pid in pids:
        for descriptor, link in _descriptors(pid):
            if link not in kinds:
                continue
            try:
                mine = _find(ordered, pid, descriptor)
            except OSError as failure:
                if failure.errno in (errno.ESRCH, errno.EBADF):
                    continue  # it ended, or closed that descriptor, in this moment
                raise
            if mine is not None:
                yield Holder(mine, pid, descriptor)


def compare(pid: int, descriptor: int, other_pid: int, other_descriptor: int) -> int:
    """0: one open file; else -1 or 1, by an order of the kernel's that holds until the machine is started again."""
    number = _NUMBERS.get(platform.machine())
    result = -1
    if number is None:
        code = errno.ENOSYS
    else:
        result = _libc().syscall(
            ctypes.c_long(number),
            ctypes.c_long(pid),
            ctypes.c_long(other_pid),
            ctypes.c_long(_KCMP_FILE),
            ctypes.c_ulong(descriptor),
            ctypes.c_ulong(other_descriptor),
        )
        code = ctypes.get_errno()
    if result < 0 and code in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        raise RefusedError(
            f"which processes share GPU memory cannot be told: kcmp fails with {errno.errorcode[code]} "
            f"(process {other_pid})",
            advice="the system call must be allowed (Docker: --cap-add SYS_PTRACE), and the processes be one user's",
        )
    if result < 0:
        raise OSError(code, os.strerror(code))
    return (0, -1, 1)[result]


def _in_order(descriptors: Sequence[int]) -> list[int]:
    me = os.getpid()

    def by_file(one: int, other: int) -> int:
        return compare(me, descriptors[one], me, descriptors[other])

    return sorted(range(len(descriptors)), key=cmp_to_key(by_file))


def _find(ordered: Sequence[int], pid: int, descriptor: int) -> int | None:
    """Which of ours, in the kernel's order, is that one of another process."""
    me = os.getpid()
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        side = compare(me, ordered[middle], pid, descriptor)
        if side == 0:
            return ordered[middle]
        if side < 0:
            low = middle + 1
        else:
            high = middle
    return None


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except (*_GONE, PermissionError):
        return
    for entry in entries:
        if link := _link(pid, int(entry.name)):
            yield int(entry.name), link


def _link(pid: int, descriptor: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
    except (*_GONE, PermissionError):
        return ""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
