"""Ctrl-C during a request is seen between two messages, once, and never lost."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import interruptible  # noqa: F401

from woodfrog.daemon import interrupt


def interrupt_ourselves() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_raised_by_the_wait_and_not_before() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, interrupt.deferred() as interruption:
        interrupt_ourselves()
        reached = True  # Python's own handler would have raised here
        with pytest.raises(KeyboardInterrupt):
            interruption.wait(ours)
        theirs.send(b"x")
        interruption.wait(ours)  # the next message is not interrupted again
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_comes_while_waiting_ends_the_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, interrupt.deferred() as interruption:
        sender = threading.Thread(target=interrupt_ourselves)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            interruption.wait(ours)
        sender.join()


def test_an_interrupt_that_nobody_waited_for_is_raised_at_the_end() -> None:
    finished = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117 - the end of the inner block is what raises
        with interrupt.deferred():
            interrupt_ourselves()
            finished = True
    assert finished


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupt.deferred():
            interrupt_ourselves()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_that_gets_no_signals_only_waits_for_the_connection() -> None:
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def request() -> None:
        with interrupt.deferred() as interruption:
            interruption.wait(ours)
            done.set()

    with ours, theirs:
        thread = threading.Thread(target=request)
        thread.start()
        theirs.send(b"x")
        thread.join()
    assert done.is_set()
