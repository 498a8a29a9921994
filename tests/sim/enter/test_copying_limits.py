"""A process that may have few more threads, or none, gets few of woodfrog-enter's, or none; told, and unharmed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from copier import Copier, wait_until
from pids_group import limit, pids_group

from woodfrog.driver import entering
from woodfrog.driver.entering import Copies, Entered, restore_entered
from woodfrog.driver.limits import ThreadsLeft, threads_left

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="woodfrog-enter enters x86-64 processes only")

HELPERS = 3


@pytest.fixture
def group() -> Iterator[Path]:
    with pids_group("enter") as made:
        if made is None:
            pytest.skip("no control group with a limit of threads can be made here")
        yield made


def check(target: Copier, more: int) -> None:
    """Two steps that are helped by so many threads as it may have more."""
    for _ in range(2):
        with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=HELPERS) as visitor:
            if more:
                wait_until(lambda: target.helpers() == more, "threads that help")
            target.check()
        (copies,) = visitor.visit.copies
        assert copies.threads == more
        assert (copies.copies > 0) == (more > 0)
        wanted = f"only {more} of {HELPERS} threads" if more else "no threads"
        assert f"it gets {wanted} that copy: Resource temporarily unavailable (RLIMIT_NPROC" in copies.reason
        assert visitor.visit.reason == ""
        assert more or not target.has_code()
        target.check_clean()


@pytest.mark.parametrize(("order", "more"), [("q", 0), ("Q", 1)])
def test_a_users_limit_of_processes(copier: Callable[..., Copier], order: str, more: int) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root for a process of another user's; the limit is not for root")
    target = copier()
    assert target.ask(order) == "right"
    assert threads_left(target.thread) == ThreadsLeft(more, "RLIMIT_NPROC")
    check(target, more)


@pytest.mark.parametrize("more", [0, 1])
def test_a_control_groups_limit(copier: Callable[..., Copier], group: Path, more: int) -> None:
    target = copier()
    limit(group, target.pid, more)
    assert threads_left(target.thread) == ThreadsLeft(more, "its control group's pids.max")
    check(target, more)
    target.close()


@pytest.mark.parametrize(("left", "helpers"), [(entering.SPARE_THREADS + 1, 1), (entering.SPARE_THREADS, 0), (0, 0)])
def test_fewer_are_asked_for_where_the_process_would_have_few_left(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, left: int, helpers: int
) -> None:
    target = copier()
    monkeypatch.delenv("WOODFROG_ENTER_COPIES", raising=False)
    monkeypatch.setattr(entering, "processors_of", lambda tid: 8.0)
    monkeypatch.setattr(entering, "threads_left", lambda tid: ThreadsLeft(left, "RLIMIT_NPROC"))
    monkeypatch.setattr(entering, "driver_threads", lambda pid: [target.thread])
    told = (
        f"it may start {left} threads more (RLIMIT_NPROC), of which 64 are left to it: {helpers} of ours instead of 4"
    )
    with Entered(target.pid, [target.thread]) as checkpoint:
        assert target.ask("w") == "right"
    restore = restore_entered(target.pid)
    assert restore is not None
    with restore:
        assert target.ask("r") == "right"
    for visitor, step in ((checkpoint, "checkpoint"), (restore, "restore")):
        (copies,) = visitor.visit.copies
        if helpers:
            assert (copies.threads, copies.reason) == (helpers, told)
            assert copies.copies > 0
        else:
            assert copies == Copies(step, reason=told)
    assert (restore._process is None) == (helpers == 0)  # nobody was stopped only to be told that
    target.check_clean()
