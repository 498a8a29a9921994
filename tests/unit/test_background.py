"""Work beside a target that runs on has a lower priority, and so have the threads that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from woodfrog.operations import background
from woodfrog.operations.background import Elsewhere, background_threads, in_background
from woodfrog.target import procfs

PROCESSORS = os.sched_getaffinity(0)
# Its first thread sleeps, the other one runs on the processor that is given.
BUSY = """
import os, sys, threading
def run():
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print("runs", flush=True)
    while True:
        pass
threading.Thread(target=run, daemon=True).start()
sys.stdin.read()
"""


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


@pytest.fixture
def busy() -> Iterator[tuple[int, int]]:
    """A process with a thread that runs, and its processor."""
    processor = max(PROCESSORS)
    argv = [sys.executable, "-c", BUSY, str(processor)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        yield process.pid, processor
        process.kill()


def wait_for_ticks(pid: int) -> None:
    """Until one of its threads has run for some ticks of the clock that its times are in."""

    def ran_s() -> float:
        return max(one.run_s for one in procfs.scheduled(pid).values())

    before_s, end_s = ran_s(), time.monotonic() + 30
    while ran_s() < before_s + 0.05:
        assert time.monotonic() < end_s, "it does not run"
        time.sleep(0.01)


def test_it_stays_away_from_a_thread_that_runs(busy: tuple[int, int]) -> None:
    pid, processor = busy
    elsewhere = Elsewhere([pid])
    assert elsewhere.processors() == PROCESSORS  # nothing has run since
    wait_for_ticks(pid)
    left = PROCESSORS - background.siblings(processor)
    allowed = in_background(lambda: os.sched_getaffinity(0), elsewhere)
    assert allowed == (left if len(left) >= background_threads() else PROCESSORS)
    assert os.sched_getaffinity(0) == PROCESSORS


def test_it_stays_away_from_the_siblings_too_unless_too_few_are_left(
    busy: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Elsewhere([busy[0]])
    wait_for_ticks(busy[0])
    monkeypatch.setattr(background, "siblings", lambda processor: set(PROCESSORS))
    assert elsewhere.processors() == PROCESSORS
    elsewhere = Elsewhere([busy[0]])
    elsewhere._all = {1000, 1001, 1002, busy[1]}
    wait_for_ticks(busy[0])
    monkeypatch.setattr(background, "siblings", lambda processor: {processor, 1001})
    assert elsewhere.processors() == {1000, 1002}


def test_processors_that_are_not_this_process_any_more_are_no_failure(busy: tuple[int, int]) -> None:
    elsewhere = Elsewhere([busy[0]])
    elsewhere._all = {1000}
    assert in_background(lambda: os.sched_getaffinity(0), elsewhere) == PROCESSORS


def test_a_process_that_has_ended_is_no_obstacle() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        elsewhere = Elsewhere([process.pid])
    assert elsewhere.processors() == PROCESSORS


def test_the_cores_that_a_machine_tells_of_hold_their_own_processors() -> None:
    for processor in PROCESSORS:
        assert processor in background.siblings(processor)
    assert background.siblings(1 << 20) == {1 << 20}  # no such file


@pytest.mark.parametrize(
    ("content", "numbers"), [("0-1,4", [0, 1, 4]), ("3", [3]), ("0,16", [0, 16]), ("", []), (None, [])]
)
def test_lists_of_the_kernel(tmp_path: Path, content: str | None, numbers: list[int]) -> None:
    path = tmp_path / "list"
    if content is not None:
        path.write_text(content + "\n")
    assert procfs.listed(str(path)) == numbers
