"""The numbers of a target that was stopped just now are free once its parent has looked; a restore waits for that."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from woodfrog.operations import restore
from woodfrog.operations.restore import await_reaping
from woodfrog.target import procfs


@pytest.fixture
def zombie() -> Iterator[int]:
    """A child of ours that has ended; whether it was waited for is the test's business."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    if procfs.stat(pid) is not None:
        os.waitpid(pid, 0)


class Silent:
    """The poll of a kernel that does not tell of it (before 6.9)."""

    def register(self, fd: int, events: int) -> None:
        pass

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        threading.Event().wait(timeout_ms / 1000)
        return []


@pytest.mark.parametrize("tells", [True, False])
def test_it_goes_on_as_soon_as_somebody_has_waited_for_it(
    zombie: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tells:
        monkeypatch.setattr(select, "poll", Silent)
    monkeypatch.setattr(restore, "REAP_TIMEOUT_S", 60.0)
    begun = time.monotonic()
    reaper = threading.Timer(0.1, os.waitpid, (zombie, 0))
    reaper.start()
    await_reaping([zombie, os.getpid()])
    reaper.join()
    assert procfs.stat(zombie) is None
    assert time.monotonic() - begun < 30


def test_one_that_nobody_waits_for_is_given_a_bounded_time(zombie: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "REAP_TIMEOUT_S", 0.2)
    begun = time.monotonic()
    await_reaping([zombie])
    assert time.monotonic() - begun >= 0.2
    assert procfs.stat(zombie) is not None


def test_process_1_is_given_more(zombie: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = procfs.stat
    monkeypatch.setattr(restore, "REAP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(restore, "INIT_REAP_TIMEOUT_S", 0.3)

    def of_init(pid: int) -> procfs.Stat | None:
        found = stat(pid)
        return None if found is None else procfs.Stat(**{**vars(found), "parent_pid": 1})

    monkeypatch.setattr(procfs, "stat", of_init)
    begun = time.monotonic()
    await_reaping([zombie])
    assert time.monotonic() - begun >= 0.3
