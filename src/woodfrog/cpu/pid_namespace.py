"""CRIU inside a PID namespace: the command lines of woodfrog-init (native/init) around it.

Decides on numbers and arguments only; starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodfrog.errors import RefusedError

INIT_PID_FILE = "init.pid"  # which woodfrog-init writes into its working directory
_CAP_SYS_ADMIN = 21  # linux/capability.h
# CRIU and its helpers need few numbers of their own; each run of free ones that is taken has room for many.
_ROOM = 512
_FIRST = 300  # the kernel's RESERVED_PIDS: where numbers begin again after the largest


@dataclass(frozen=True)
class NewNamespace:
    """A namespace to restore into. `instance` and `name` are shown by its process 1 for as long as it lives."""

    instance: str
    name: str
    binds: tuple[tuple[str, str], ...] = ()  # paths here → paths that show them to the restored processes

    def seen_from_here(self, path: str) -> str:
        """The path by which this process finds what restored processes find at `path`."""
        for here, there in reversed(self.binds):
            if path == there or path.startswith(there.rstrip("/") + "/"):
                return here + path[len(there.rstrip("/")) :]
        return path

    def around(self, arguments: Sequence[str], *, root_pid: int, taken: Iterable[int]) -> list[str]:
        """`arguments` run in the new namespace. `root_pid` is the number of the tree's root there, `taken` all numbers
        of the tree, which CRIU itself must not have."""
        from woodfrog._native import paths

        binds = [word for here, there in self.binds for word in ("--bind", here, there)]
        last = str(last_number(set(taken)))
        return [str(paths.init()), "new", self.instance, self.name, str(root_pid), last, *binds, "--", *arguments]


def enter(pid: int, arguments: Sequence[str]) -> list[str]:
    """`arguments` run in the namespaces of process `pid`."""
    from woodfrog._native import paths

    return [str(paths.init()), "enter", str(pid), "--", *arguments]


def last_number(taken: set[int]) -> int:
    """A number above which there is room that no number in `taken` is in. RefusedError when there is none."""
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    candidate = _FIRST
    for number in sorted(taken):
        if number > candidate + _ROOM:
            break
        candidate = max(candidate, number)
    if candidate + _ROOM >= largest:
        raise RefusedError("the image's processes and threads leave no numbers free", advice="raise kernel.pid_max")
    return candidate


def require_privilege(what: str) -> None:
    """RefusedError when this process may not make and enter namespaces, which `what` needs."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if not effective >> _CAP_SYS_ADMIN & 1:
        raise RefusedError(
            f"{what} needs CAP_SYS_ADMIN, which this daemon does not have",
            advice="run the daemon as root (in a container: with --cap-add SYS_ADMIN)",
        )
