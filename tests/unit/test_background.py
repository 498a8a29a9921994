"""Work beside a target that runs on has a lower priority, and so have the threads that it starts."""

from __future__ import annotations

import os
import threading

import pytest

from woodfrog.operations.background import background_threads, in_background


def priorities() -> tuple[int, int]:
    """Of the calling thread and of one that it starts."""
    of_child: list[int] = []
    child = threading.Thread(target=lambda: of_child.append(os.getpriority(os.PRIO_PROCESS, 0)))
    child.start()
    child.join()
    return os.getpriority(os.PRIO_PROCESS, 0), of_child[0]


def test_it_and_its_threads_let_others_go_first_and_the_caller_stays_as_it_was() -> None:
    before = priorities()
    assert in_background(priorities) == (max(before[0], 5), max(before[1], 5))
    assert priorities() == before


def test_what_it_raises_comes_back() -> None:
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)


def test_it_gets_some_processor() -> None:
    assert 1 <= background_threads() <= len(os.sched_getaffinity(0))
