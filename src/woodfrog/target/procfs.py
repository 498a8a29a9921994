"""Reads /proc: one function a file, each returning what was there, or None when the process is gone.

Everything that says something about another process is untrusted text: parsed by position, never evaluated. Must hold
no opinion about what is good or bad; that is preconditions.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PF_KTHREAD = 0x00200000  # linux/sched.h


@dataclass(frozen=True)
class Stat:
    """Of /proc/<pid>/stat, see proc_pid_stat(5)."""

    pid: int
    name: str
    state: str  # R S D T t Z X I …
    parent_pid: int
    group_id: int
    session_id: int
    terminal: int  # device number of the controlling terminal; 0: none
    start_ticks: int  # clock ticks after boot
    kernel_thread: bool  # by the kernel's own mark: in a container, process 2 and its children are ordinary ones


@dataclass(frozen=True)
class Scheduled:
    """Of a thread: how long it has run, to a clock tick, and on which processor last."""

    run_s: float
    processor: int


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/<pid>/maps that maps a file."""

    path: str
    shared: bool
    deleted: bool


def text(pid: int, name: str) -> str | None:
    """Any file under /proc/<pid>; PermissionError is the caller's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except _GONE:
        return None


def stat(pid: int) -> Stat | None:
    content = text(pid, "stat")
    if not content:
        return None
    # The name is in parentheses and may itself hold some: it ends at the last one.
    opening, closing = content.index("("), content.rindex(")")
    fields = content[closing + 2 :].split()
    return Stat(
        pid=int(content[:opening]),
        name=content[opening + 1 : closing],
        state=fields[0],
        parent_pid=int(fields[1]),
        group_id=int(fields[2]),
        session_id=int(fields[3]),
        terminal=int(fields[4]),
        start_ticks=int(fields[19]),
        kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
    )


def status(pid: int, thread: int | None = None) -> dict[str, str] | None:
    """/proc/<pid>/status as a dict, or that of one of its threads."""
    content = text(pid, "status" if thread is None else f"task/{thread}/status")
    if content is None:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in content.splitlines())}


def pids() -> list[int]:
    """All processes that this user can see."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def threads(pid: int) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()))
    except _GONE:
        return ()


def thread_name(pid: int, thread: int) -> str | None:
    content = text(pid, f"task/{thread}/comm")
    return None if content is None else content.rstrip("\n")


def scheduled(pid: int) -> dict[int, Scheduled]:
    """Of each of its threads."""
    found = {}
    for thread in threads(pid):
        content = text(pid, f"task/{thread}/stat")
        if content:
            fields = content[content.rindex(")") + 2 :].split()
            run_ticks = int(fields[11]) + int(fields[12])  # utime, stime
            found[thread] = Scheduled(run_ticks / _TICKS_PER_S, int(fields[36]))
    return found


def processors_ran() -> dict[int, tuple[float, float]]:
    """Of each processor of the machine: how long it has not been idle, and how long it has been there; seconds."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ran = user + nice + system + irq + softirq + steal
            found[int(name.removeprefix("cpu"))] = (ran / _TICKS_PER_S, (ran + idle + iowait) / _TICKS_PER_S)
    return found


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid` (any of its threads), sorted. Exact only while none is started or ends."""
    found: set[int] = set()
    for thread in threads(pid):
        content = text(pid, f"task/{thread}/children")
        if content is None and not Path("/proc/self/task", str(os.getpid()), "children").exists():
            # A kernel without CONFIG_PROC_CHILDREN: look at everybody.
            stats = (stat(other) for other in pids())
            return sorted(one.pid for one in stats if one is not None and one.parent_pid == pid)
        found.update(int(child) for child in (content or "").split())
    return sorted(found)


def command_line(pid: int) -> tuple[str, ...]:
    """Empty for kernel threads and zombies."""
    content = text(pid, "cmdline") or ""
    return tuple(content.rstrip("\0").split("\0")) if content else ()


def namespaces(pid: int) -> dict[str, str]:
    """Kind of namespace → its identity, e.g. pid → 'pid:[4026531836]'. Empty when this user may not look."""
    found: dict[str, str] = {}
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        try:
            found[kind] = str(Path(f"/proc/{pid}/ns/{kind}").readlink())
        except (*_GONE, PermissionError):
            continue
    return found


def descriptors(pid: int) -> dict[int, str]:
    """Open file descriptors and what they point to, as readlink shows it. PermissionError is the caller's."""
    found: dict[int, str] = {}
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except _GONE:
        return found
    for entry in entries:
        try:
            found[int(entry.name)] = str(entry.readlink())
        except _GONE:  # closed since
            continue
    return found


# "7f…-7f… rw-s 00000000 00:01 2062    /dev/zero (deleted)"
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+\s+(/.*)$")


def mapped_files(pid: int) -> list[Mapping]:
    """Files mapped by the process, each path once per way of sharing. PermissionError is the caller's."""
    found: dict[Mapping, None] = {}
    for line in (text(pid, "maps") or "").splitlines():
        if match := _MAPPING.match(line):
            path = match[2]
            deleted = path.endswith(" (deleted)")
            found[Mapping(path.removesuffix(" (deleted)"), match[1][3] == "s", deleted)] = None
    return list(found)


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory that is in RAM now: about what a dump of the CPU side writes."""
    fields = status(pid) or {}
    return sum(int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def listed(path: str) -> list[int]:
    """The numbers of a list as the kernel writes them in files of /sys, such as "0-1,4". None without the file."""
    try:
        content = Path(path).read_text().strip()
    except OSError:
        return []
    numbers: list[int] = []
    for part in filter(None, content.split(",")):
        low, _, high = part.partition("-")
        numbers.extend(range(int(low), int(high or low) + 1))
    return numbers
