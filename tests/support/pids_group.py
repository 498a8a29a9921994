"""A control group that limits how many threads the processes in it have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOUNTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@contextlib.contextmanager
def pids_group(name: str) -> Iterator[Path | None]:
    """A new one, below the first hierarchy that can be written and has the controller; None where there is none."""
    for mount in MOUNTS:
        group = mount / f"woodfrog-{name}-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "pids.max").exists():
            break
        group.rmdir()
    else:
        yield None
        return
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def limit(group: Path, pid: int, more: int) -> None:
    """The process, with all its threads, in the group, which may have so many threads more."""
    (group / "cgroup.procs").write_text(str(pid))
    current = int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(current + more))
