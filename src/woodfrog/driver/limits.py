"""What a thread of another process may use: processors (its affinity, its control groups' quota) and new threads (its
control groups' limit, its user's)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
PLENTY = 1000  # threads that may be started beside all of the machine's: nobody counts then whose they are


def processors_of(tid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Processors that thread `tid` may keep busy; a quota may be a part of one. 0.0 if the thread is not there."""
    try:
        allowed = len(os.sched_getaffinity(tid))
    except OSError:
        return 0.0
    return min([float(allowed), *map(_quota, _groups(tid, "cpu", proc, cgroups))])


@dataclass(frozen=True)
class ThreadsLeft:
    """How many threads may be started; infinity without a limit. `limit`: its name, for people."""

    count: float
    limit: str = ""


def threads_left(tid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> ThreadsLeft:
    """What its control groups and its user allow beside the threads that these have.

    As far as it can be seen from here: of a user whose processes are in PID namespaces above ours more may be running.
    """
    group = min([math.inf, *(_left(group) for group in _groups(tid, "pids", proc, cgroups))])
    user = _users_left(tid, proc)
    found = ThreadsLeft(user, "RLIMIT_NPROC") if user < group else ThreadsLeft(group, "its control group's pids.max")
    return found if found.count != math.inf else ThreadsLeft(math.inf)


def _users_left(tid: int, proc: Path) -> float:
    """RLIMIT_NPROC, which counts the threads of all processes of the same real user. It is not for root; who is exempt
    by a capability is taken for one who is not."""
    (user,) = _fields(proc / str(tid) / "status", "Uid:")[:1] or [0.0]
    (limit,) = _fields(proc / str(tid) / "limits", "Max processes")[:1] or [math.inf]
    if user == 0 or limit == math.inf:
        return math.inf
    if limit - (everybody := _all_threads(proc)) >= PLENTY:
        return limit - everybody  # so that not all processes are looked at
    found = 0.0
    for entry in proc.iterdir():
        if entry.name.isdigit() and _fields(entry / "status", "Uid:")[:1] == [user]:
            found += sum(_fields(entry / "status", "Threads:")[:1])
    return limit - found


def _all_threads(proc: Path) -> float:
    """Of the machine: the "2/1234" of /proc/loadavg; infinity if it is not told."""
    try:
        return float((proc / "loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return math.inf


def _fields(file: Path, name: str) -> list[float]:
    """The numbers behind a name that begins a line; "unlimited" is infinity. Nothing if there are none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(name):
            words = line.removeprefix(name).split()
            return [
                math.inf if word == "unlimited" else float(word)
                for word in words
                if word == "unlimited" or word.isdigit()
            ]
    return []


def _groups(tid: int, controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The control groups (version 2, and 1) that limit a thread: those it is in and all above, as seen from here."""
    try:
        lines = (proc / str(tid) / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _quota(group: Path) -> float:
    """Processors' worth of time."""
    found = _read(group / "cpu.max")
    found = found or _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
    if len(found) != 2 or found[0] <= 0 or found[1] <= 0:  # -1: no limit
        return math.inf
    return found[0] / found[1]


def _left(group: Path) -> float:
    limit, current = _read(group / "pids.max"), _read(group / "pids.current")
    return limit[0] - current[0] if limit and current else math.inf


def _read(file: Path) -> list[float]:
    """Numbers; "max" is infinity. Nothing where there is no such limit, or none that we may see."""
    try:
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
