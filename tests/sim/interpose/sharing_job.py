"""A tree of processes that share GPU memory, taken through a handover by the product's own code for one target each.

What an operation does with the memory meanwhile (copying it, or making new memory that holds the same) is done here on
the simulated GPU's memfds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from interposer_agents import DEADLINE_S, WAKE_SIGNAL, Listener
from sharer import Sharer

from woodfrog.operations.context import Context
from woodfrog.operations.data import close_all, plan_owners
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.notes import Notes
from woodfrog.operations.sharing import settle
from woodfrog.target import procfs
from woodfrog.target.link import AgentLink


class Keeper:
    """A keeper that keeps nothing: what it does with descriptors is tested elsewhere."""

    def append(self, key: str, fds: Sequence[int]) -> int:
        return 0

    def replace(self, key: str, index: int, fd: int) -> None: ...

    def drop(self, key: str) -> None: ...


class Agents:
    """Connections by process; a sleeping agent is woken."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._links: dict[int, AgentLink] = {}

    def link(self, pid: int) -> AgentLink | None:
        return self._links.get(pid)

    def ensure(self, pid: int, timeout_s: float) -> AgentLink:
        if pid not in self._links:
            self._wake(pid)
        while pid not in self._links:
            link = self._listener.accept()
            self._links[link.pid] = link
        return self._links[pid]

    def detach(self, pid: int) -> None:
        self._links.pop(pid).detach()

    def _wake(self, pid: int) -> None:
        for thread in procfs.threads(pid):
            if procfs.thread_name(pid, thread) == "woodfrog-agent":
                _tgkill(pid, thread)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class Job:
    """All workers of a sharer, as the processes of one target."""

    def __init__(self, sharer: Sharer, listener: Listener) -> None:
        self.sharer = sharer
        self.agents = Agents(listener)
        for pid in sharer.pids:  # they have connected at their start
            while self.agents.link(pid) is None:
                link = listener.accept()
                self.agents._links[link.pid] = link
        self.targets: list[FrozenTarget] = []

    def target(self, pid: int, tree: Sequence[int]) -> FrozenTarget:
        stat = procfs.stat(pid)
        assert stat is not None
        context = cast(Context, SimpleNamespace(agents=self.agents, keeper=Keeper()))
        notes = Notes(
            operation="test",
            operation_id=1,
            name="sharer",
            pid=pid,
            start_ticks=stat.start_ticks,
            root_pid=self.sharer.process.pid,
            managed=True,
            tree=list(tree),
        )
        return FrozenTarget(context, notes)

    def quiesce(self, *workers: int) -> None:
        """Export of these workers (all, when none is named), and what `settle` says of them."""
        pids = [self.sharer.pids[worker] for worker in workers] or self.sharer.pids
        self.targets = [self.target(pid, pids) for pid in pids]
        for target in self.targets:
            target.quiesce(DEADLINE_S)
        for target in self.targets:
            target.export()

    def freeze(self) -> None:
        self.quiesce()
        settle(self.targets)
        for target in self.targets:
            target.release()

    def renew(self) -> None:
        """All memory replaced by new memory with the same contents, one for what is one."""
        handles = [handle for target in self.targets for handle in target.notes.handles]
        fds = [fd for target in self.targets for fd in target.fds]
        owners = plan_owners(handles)
        fresh = {index: _copy(fds[index]) for index in set(owners)}
        for fd, owner in zip(fds, owners, strict=True):
            os.dup2(fresh[owner], fd, inheritable=False)
        close_all(list(fresh.values()))

    def thaw(self) -> None:
        """Back in every process."""
        for target in self.targets:
            target.return_and_resume()
        self.let_go()

    def let_go(self) -> None:
        for target in self.targets:
            if target.link().state in ("quiesced", "exported"):
                target.link().resume()
            target.close()
        self.targets = []

    def memories(self) -> list[list[int]]:
        """For each target, the number of the memory of each handle that is shared."""
        return [[handle.memory for handle in target.notes.handles if handle.memory] for target in self.targets]


def _copy(fd: int) -> int:
    """A new memfd of the simulated GPU with the contents of another."""
    name = str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
    fresh = os.memfd_create(name, os.MFD_CLOEXEC)
    size = os.fstat(fd).st_size
    os.ftruncate(fresh, size)
    done = 0
    while done < size:
        done += os.pwrite(fresh, os.pread(fd, min(size - done, 1 << 24), done), done)
    return fresh


def _tgkill(pid: int, thread: int) -> None:
    import ctypes

    libc: Any = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(pid, thread, int(WAKE_SIGNAL)) == 0
