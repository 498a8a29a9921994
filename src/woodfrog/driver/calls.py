"""The driver's system calls as woodfrog-enter saw them: what each was, and where the time of a step went.

A call's time is from its entry to its exit as the tracer saw them, so a few microseconds of each are the tracer's own
(`Visit.stopped_s` is what they cost together). Must never guess what a call did beyond its arguments.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of Linux, by machine (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h): what drivers call.
_NAMES: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 7: "poll", 8: "lseek", 9: "mmap",
        10: "mprotect", 11: "munmap", 12: "brk", 13: "rt_sigaction", 14: "rt_sigprocmask", 16: "ioctl", 17: "pread64",
        18: "pwrite64", 21: "access", 22: "pipe", 24: "sched_yield", 25: "mremap", 28: "madvise", 32: "dup",
        35: "nanosleep", 39: "getpid", 41: "socket", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
        46: "sendmsg", 47: "recvmsg", 48: "shutdown", 54: "setsockopt", 55: "getsockopt", 56: "clone", 72: "fcntl",
        77: "ftruncate", 89: "readlink", 91: "fchmod", 96: "gettimeofday", 107: "geteuid", 157: "prctl", 186: "gettid",
        202: "futex", 203: "sched_setaffinity", 204: "sched_getaffinity", 217: "getdents64", 219: "restart_syscall",
        230: "clock_nanosleep", 232: "epoll_wait", 233: "epoll_ctl", 237: "mbind", 257: "openat", 262: "newfstatat",
        267: "readlinkat", 270: "pselect6", 271: "ppoll", 273: "set_robust_list", 281: "epoll_pwait", 288: "accept4",
        290: "eventfd2", 293: "pipe2", 318: "getrandom", 319: "memfd_create", 334: "rseq", 435: "clone3",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 56: "openat", 57: "close", 62: "lseek", 63: "read", 64: "write",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 98: "futex",
        101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
        212: "recvmsg", 215: "munmap", 216: "mremap", 220: "clone", 222: "mmap", 226: "mprotect", 233: "madvise",
        242: "accept4", 435: "clone3",
    },
}  # fmt: skip
# A thread in one of these does nothing; so does one that reads from a pipe or a socket.
_WAITS = frozenset(
    (
        "poll", "ppoll", "pselect6", "epoll_wait", "epoll_pwait", "futex", "nanosleep", "clock_nanosleep", "accept",
        "accept4", "recvfrom", "recvmsg", "restart_syscall",
    )
)  # fmt: skip
_READS = frozenset(("read", "recvfrom", "recvmsg"))
_QUIET_FILES = ("pipe:", "socket:", "anon_inode:")
MAP_POPULATE = 0x8000  # asm-generic/mman.h


@dataclass(frozen=True)
class SystemCall:
    """One call: CLOCK_MONOTONIC seconds, the thread, and the file of its first argument where that is a descriptor."""

    begun_s: float
    took_s: float
    thread: int
    name: str
    arguments: tuple[int, ...]
    result: int
    path: str

    @property
    def kind(self) -> str:
        """What a call does, as far as it tells: for ioctl also device and command, for mmap whether populated."""
        if self.name == "ioctl":
            # Bits 0-7 of a request are its number, 8-15 its type (asm-generic/ioctl.h).
            return f"ioctl {self.path or '?'} 0x{self.arguments[1] & 0xFFFF:x}"
        if self.name == "mmap" and self.arguments[3] & MAP_POPULATE:
            return "mmap populated"
        return f"{self.name} {self.path}".strip() if self.path.startswith("/dev/") else self.name

    @property
    def waits(self) -> bool:
        """Whether the thread did nothing in it."""
        return self.name in _WAITS or (self.name in _READS and self.path.startswith(_QUIET_FILES))


@dataclass(frozen=True)
class Kind:
    """Calls of one kind within some time: how many, and the seconds they took, of all threads together."""

    kind: str
    count: int
    seconds: float
    waits: bool


def read_calls(events: Iterable[Mapping[str, Any]]) -> list[SystemCall]:
    """The calls among woodfrog-enter's events, by the time they began."""
    events = list(events)
    files = {one["index"]: one["path"] for one in events if one["event"] == "path"}
    names = _NAMES.get(platform.machine(), {})
    calls = [
        SystemCall(
            one["time_s"],
            one["took_s"],
            one["thread"],
            names.get(one["number"], f"system call {one['number']}"),
            tuple(one["arguments"]),
            one["result"],
            files.get(one["path"], ""),
        )
        for one in events
        if one["event"] == "call"
    ]
    return sorted(calls, key=lambda call: call.begun_s)


def within(calls: Iterable[SystemCall], begin_s: float, end_s: float) -> list[SystemCall]:
    """Those that began in that time."""
    return [call for call in calls if begin_s <= call.begun_s < end_s]


def by_kind(calls: Sequence[SystemCall]) -> list[Kind]:
    """Their time by kind, the longest first."""
    counts: dict[tuple[str, bool], int] = defaultdict(int)
    seconds: dict[tuple[str, bool], float] = defaultdict(float)
    for call in calls:
        counts[call.kind, call.waits] += 1
        seconds[call.kind, call.waits] += call.took_s
    kinds = [Kind(kind, count, seconds[kind, waits], waits) for (kind, waits), count in counts.items()]
    return sorted(kinds, key=lambda one: -one.seconds)
