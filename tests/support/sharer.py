"""The sharer target (tests/sim/targets/sharer.cpp): a tree of processes that share GPU memory as they are told."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from orders import Ordered
from product import Stepper


class Sharer(Ordered):
    """One running tree; `pids[k]` is worker k."""

    def __init__(self, process: Stepper, orders: Path, workers: int) -> None:
        super().__init__(process, orders)
        self.pids = [int(self.order(worker, "pid")) for worker in range(workers)]

    def share(self, name: str, owner: int, *importers: int, mib: int = 2, where: str = "") -> None:
        """`owner` makes memory (`where`: "host", or of the GPU), all others import and map it; each knows it by
        `name`."""
        self.order(owner, "make", name, mib, where)
        self.order(owner, "map", name, mib, where)
        for importer in importers:
            self.pass_on(name, owner, importer, mib=mib, where=where)

    def pass_on(self, name: str, owner: int, importer: int, *, mib: int = 2, where: str = "") -> None:
        """One more process imports and maps it; in the owner itself by another name."""
        as_name = name if importer != owner else f"{name}'"
        self.order(owner, "send", name, importer)
        self.order(importer, "take", as_name, owner)
        self.order(importer, "map", as_name, mib, where)

    def require_shared(self, name: str, *workers: int, value: int) -> None:
        """What each of them writes, all of them see."""
        for turn, writer in enumerate(workers):
            assert self.order(writer, "write", name, value + turn) == "ok"
            for reader in workers:
                assert self.order(reader, "check", name, value + turn) == "ok"

    def end(self) -> None:
        """It ends by itself, every process with success."""
        self.order("end")
        if self.process.process is not None:
            assert self.process.process.wait(60) == 0


VALUES = {0: 11, 1: 22, 2: 33}


def fill(job: Sharer) -> None:
    """Memory of its own for each worker."""
    for worker in range(len(job.pids)):
        job.order(worker, "make", "own", 4)
        job.order(worker, "map", "own", 4)
        assert job.order(worker, "write", "own", VALUES[worker]) == "ok"


def check(job: Sharer, *workers: int) -> None:
    """All of these (left out: of all workers) have what `fill` gave them."""
    for worker in workers or range(len(job.pids)):
        assert job.order(worker, "check", "own", VALUES[worker]) == "ok"


def kill(pid: int) -> None:
    """Its end is over when this returns; its parent need not have noticed."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)
