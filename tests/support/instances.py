"""Targets in PID namespaces: what must be left of them once they have ended, which is nothing."""

from __future__ import annotations

import contextlib
import select

from product import DEADLINE_S, Product

from woodfrog.errors import NotFoundError
from woodfrog.target import pid_namespace, procfs
from woodfrog.target.identity import ProcessHandle


def inits(product: Product) -> list[int]:
    """Processes 1 of the namespaces that this product's daemons have made."""
    daemon = product.daemon_pid()
    stat = procfs.stat(daemon)
    assert stat is not None
    parents = (daemon, stat.parent_pid)  # those of a killed daemon are the keeper's
    below = [pid for parent in parents for pid in procfs.children(parent)]
    return [pid for pid in below if pid_namespace.as_init(pid) is not None]


def wait_until_ended(pid: int) -> None:
    with contextlib.suppress(NotFoundError), ProcessHandle(pid) as handle:
        assert handle.wait(DEADLINE_S), f"process {pid} has not ended"


def nothing_is_left(product: Product) -> None:
    """No process, namespace, zombie, folder or GPU memory. Namespaces whose targets have ended may be ending still."""
    assert product.call("ps") == []
    for pid in inits(product):
        wait_until_ended(pid)
    assert inits(product) == []
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    assert [*product.runtime.glob("restore-*"), *product.runtime.glob("checkpoint-*")] == []
    for pid in procfs.children(product.daemon_pid()):
        stat = procfs.stat(pid)
        if stat is not None and stat.state == "Z":
            wait_until_reaped(pid)


def wait_until_reaped(pid: int) -> None:
    """A zombie is there until its parent has looked."""
    with contextlib.suppress(NotFoundError), ProcessHandle(pid) as handle:
        poll = select.poll()
        poll.register(handle.pidfd, 0)  # POLLHUP: reaped
        assert poll.poll(DEADLINE_S * 1000), f"nobody reaps process {pid}"
