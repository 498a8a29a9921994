"""Pipes of a target whose other end is in a process outside of it.

CRIU saves such a pipe without a word, and after a restore the other end is nobody's: a reader sees the end of its
input, a writer is killed by SIGPIPE at its next write. So they have to be found before. Looks only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from woodfrog.target import procfs
from woodfrog.target.process import FileKind, ProcessInfo


@dataclass(frozen=True)
class OutsidePipe:
    """`writes`: the target is the writer, and `other_pid` the reader; else the other way round."""

    pid: int
    descriptor: int
    writes: bool
    other_pid: int


def outside_pipes(processes: Iterable[ProcessInfo]) -> list[OutsidePipe]:
    """One entry for each pipe that leads out of the tree; processes that this user may not look into are not seen."""
    inside = list(processes)
    first: dict[tuple[str, bool], tuple[int, int]] = {}  # (pipe, is writer) → (pid, descriptor)
    for process in inside:
        for descriptor in process.of_kind(FileKind.PIPE):
            for writes in _directions(process.pid, descriptor.number):
                first.setdefault((descriptor.path, writes), (process.pid, descriptor.number))
    one_sided = {key: where for key, where in first.items() if (key[0], not key[1]) not in first}
    if not one_sided:
        return []
    others = _outside_ends({path for path, _ in one_sided}, {process.pid for process in inside})
    return [
        OutsidePipe(pid, descriptor, writes, others[path, not writes])
        for (path, writes), (pid, descriptor) in one_sided.items()
        if (path, not writes) in others
    ]


def _outside_ends(paths: set[str], inside: set[int]) -> dict[tuple[str, bool], int]:
    found: dict[tuple[str, bool], int] = {}
    for pid in procfs.pids():
        if pid in inside:
            continue
        try:
            descriptors = procfs.descriptors(pid)
        except PermissionError:
            continue  # another user's: it cannot be seen, and CRIU could not either
        for number, path in descriptors.items():
            if path in paths:
                for writes in _directions(pid, number):
                    found.setdefault((path, writes), pid)
    return found


def _directions(pid: int, descriptor: int) -> tuple[bool, ...]:
    """Whether the descriptor writes, reads (False), or both."""
    for line in (procfs.text(pid, f"fdinfo/{descriptor}") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            mode = int(value, 8) & os.O_ACCMODE
            return {os.O_RDONLY: (False,), os.O_WRONLY: (True,)}.get(mode, (False, True))
    return ()
