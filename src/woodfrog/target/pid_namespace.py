"""Targets that run in a PID namespace of their own: whose they are, what they are called, and their numbers inside.

A process restored with `--new-pid-namespace` has the number of its image inside, and one of ours outside. Everything
that woodfrog does with a process goes by the outer one; the inner one is what CRIU's images and manifests have. Process
1 of such a namespace is woodfrog-init (native/init), whose command line says which instance it is and its name: so a
daemon that starts finds what its predecessor left. Looks only, and believes no number that the kernel did not give.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from woodfrog.target import procfs
from woodfrog.target.identity import Identity

PROGRAM = "woodfrog-init"
_MAX_DEPTH = 64  # of a tree of processes; the kernel's own bound on nested namespaces is 32


@dataclass(frozen=True)
class Init:
    """Process 1 of a target's namespace. `instance` is the random number of the restore that made it."""

    identity: Identity
    instance: str
    name: str

    @property
    def pid(self) -> int:
        return self.identity.pid


def init_of(pid: int) -> Init | None:
    """The woodfrog-init below which `pid` runs; None when it has none, or has ended."""
    for _ in range(_MAX_DEPTH):
        stat = procfs.stat(pid)
        if stat is None:
            return None
        if (found := _as_init(pid, stat)) is not None:
            return found
        pid = stat.parent_pid
        if pid < 1:
            return None
    return None


def init_above(root_pid: int) -> Init | None:
    """The woodfrog-init whose tree's root this process is: it ends when that does."""
    stat = procfs.stat(root_pid)
    return as_init(stat.parent_pid) if stat is not None else None


def as_init(pid: int) -> Init | None:
    """The process as a woodfrog-init; None when it is none."""
    stat = procfs.stat(pid)
    return _as_init(pid, stat) if stat is not None else None


def find(instance: str) -> Init | None:
    """The living woodfrog-init of that instance."""
    for pid in procfs.pids():
        if (found := as_init(pid)) is not None and found.instance == instance:
            return found
    return None


def name_of(pid: int) -> str:
    """What an instance was called when it was restored; empty for a process that is in no such namespace. It goes
    before WOODFROG_NAME, which all instances of an image have in common."""
    found = init_of(pid)
    return found.name if found is not None else ""


def inner_number(pid: int) -> int:
    """The number of the process in its own PID namespace; its ordinary one when it has ended."""
    numbers = _numbers(pid)
    return numbers[-1] if numbers else pid


def inner_root(pid: int) -> int | None:
    """The number that the root of a tree has in its instance's namespace; None when it is in none."""
    return inner_number(pid) if init_of(pid) is not None else None


def outer_numbers(init: Init) -> dict[int, int]:
    """Numbers inside → numbers outside, of all processes below that process 1."""
    found: dict[int, int] = {}
    waiting = procfs.children(init.pid)
    while waiting:
        pid = waiting.pop()
        found[inner_number(pid)] = pid
        waiting += procfs.children(pid)
    return found


def from_caller(pid: int, caller_pid: int) -> int:
    """What a process calls `pid`, as we call it: a caller in an instance's namespace gives numbers of that. A number
    that nobody has there stays as it is."""
    init = init_of(caller_pid)
    return outer_numbers(init).get(pid, pid) if init is not None else pid


def _as_init(pid: int, stat: procfs.Stat) -> Init | None:
    words = procfs.command_line(pid)
    if len(words) < 4 or Path(words[0]).name != PROGRAM or words[1] != "new":
        return None
    numbers = _numbers(pid)
    if len(numbers) < 2 or numbers[-1] != 1 or stat.state in "ZX" or not _may_be_ours(pid):
        return None
    return Init(Identity(pid, stat.start_ticks), words[2], words[3][:63])


def _may_be_ours(pid: int) -> bool:
    """Whether it is root's or our own: only those make instances, and anybody can give a process that command line."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid in (0, os.geteuid())
    except (FileNotFoundError, ProcessLookupError):
        return False


def _numbers(pid: int) -> list[int]:
    status = procfs.status(pid)
    return [int(number) for number in status.get("NSpid", "").split()] if status else []
