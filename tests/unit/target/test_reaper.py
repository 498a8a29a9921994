"""The reaper keeps exit statuses, leaves no zombie of a restored tree, and takes nobody else's child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from subreaper import subreaper

from woodfrog.target.identity import Identity
from woodfrog.target.reaper import ExitStatus, Reaper


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with subreaper(), Reaper() as found:
        yield found


def fork_waiting() -> tuple[int, int]:
    """A child in a session of its own that ends with the code it is sent; (pid, descriptor to send it on)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.setsid()
        os._exit(int.from_bytes(os.read(read, 1), "little"))
    os.close(read)
    return pid, write


def test_exit_codes_and_signals_are_kept(reaper: Reaper) -> None:
    first, write = fork_waiting()
    (identity,) = reaper.adopt([first])
    assert reaper.status(identity) is None
    assert reaper.wait(identity, timeout_s=0.01) is None
    os.write(write, b"\x07")
    os.close(write)
    assert reaper.wait(identity, timeout_s=30) == ExitStatus(7, 0)
    second, write = fork_waiting()
    (identity,) = reaper.adopt([second])
    os.kill(second, signal.SIGKILL)
    assert reaper.wait(identity, timeout_s=30) == ExitStatus(0, signal.SIGKILL)
    os.close(write)


def test_a_process_that_has_ended_before_it_is_adopted_is_reaped(reaper: Reaper) -> None:
    pid, write = fork_waiting()
    os.write(write, b"\x03")
    os.close(write)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (identity,) = reaper.adopt([pid])
    assert reaper.wait(identity, timeout_s=30) == ExitStatus(3, 0)
    assert not Path(f"/proc/{pid}").exists()
    assert reaper.adopt([pid]) == []


def test_other_children_keep_their_status_for_whoever_started_them(reaper: Reaper) -> None:
    adopted, write = fork_waiting()
    (identity,) = reaper.adopt([adopted])
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"], start_new_session=True)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    os.write(write, b"\0")
    os.close(write)
    assert reaper.wait(identity, timeout_s=30) == ExitStatus(0, 0)
    assert other.wait() == 5


def test_a_grandchild_that_nobody_adopted_is_reaped_when_its_parent_has_ended(reaper: Reaper) -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(write, child.to_bytes(4, "little"))
        signal.pause()
    child = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.close(write)
    (identity,) = reaper.adopt([parent])
    stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    os.kill(parent, signal.SIGKILL)
    assert reaper.wait(identity, timeout_s=30) == ExitStatus(0, signal.SIGKILL)
    orphan = Identity(child, int(stat[19]))
    os.kill(child, signal.SIGKILL)
    assert reaper.wait(orphan, timeout_s=30) == ExitStatus(0, signal.SIGKILL)
    assert not Path(f"/proc/{child}").exists()


def test_who_ended_before_a_parent_that_does_not_wait_is_reaped_after_it_whatever_its_session(reaper: Reaper) -> None:
    """As torchrun's ranks are: each leads a session, and launcher and ranks are killed at once."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, os.getpid().to_bytes(4, "little"))
        signal.pause()
    child = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.close(write)
    launcher, rank = reaper.adopt([parent, child])
    os.kill(child, signal.SIGKILL)
    assert reaper.wait(rank, timeout_s=30) == ExitStatus(-1, 0), "only its parent gets to know"
    assert reaper.is_watched(rank)
    assert not reaper.wait_reaped([rank], timeout_s=0.01)
    os.kill(parent, signal.SIGKILL)
    assert reaper.wait_reaped([rank, launcher], timeout_s=30)
    assert not Path(f"/proc/{child}").exists()
    assert reaper.status(rank) == ExitStatus(0, signal.SIGKILL)
    assert reaper.status(launcher) == ExitStatus(0, signal.SIGKILL)


def test_closing_ends_every_wait(reaper: Reaper) -> None:
    import threading

    pid, write = fork_waiting()
    (identity,) = reaper.adopt([pid])
    results: list[object] = []
    waiter = threading.Thread(target=lambda: results.append(reaper.wait(identity)))
    waiter.start()
    reaper.close()
    waiter.join(timeout=30)
    assert results == [None]
    os.close(write)
    os.waitpid(pid, 0)
