"""What a thread of another process may use: processors (its affinity, its control groups' quota) and new threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def processors_of(tid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Processors that thread `tid` may keep busy; a quota may be a part of one. 0.0 if the thread is not there."""
    try:
        allowed = len(os.sched_getaffinity(tid))
    except OSError:
        return 0.0
    return min([float(allowed), *map(_quota, _groups(tid, "cpu", proc, cgroups))])


def threads_left(tid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """How many threads its control groups allow beside those that they have; infinity without a limit."""
    return min([math.inf, *(_left(group) for group in _groups(tid, "pids", proc, cgroups))])


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
