"""Work beside a target that runs on has a lower priority, and so have the threads that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from woodfrog.errors import UsageError
from woodfrog.operations import background
from woodfrog.operations.background import (
    Elsewhere,
    background_rate,
    background_threads,
    in_background,
    require_settings,
)
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


def test_a_user_says_how_much_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert background_rate() == 0
    monkeypatch.setenv("WOODFROG_BACKGROUND_THREADS", "1")
    monkeypatch.setenv("WOODFROG_BACKGROUND_RATE", "1.5G")
    assert (background_threads(), background_rate()) == (1, 3 << 29)
    monkeypatch.setenv("WOODFROG_BACKGROUND_THREADS", "100000")
    assert background_threads() == len(PROCESSORS), "more would only wait for each other"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("WOODFROG_BACKGROUND_THREADS", "0"),
        ("WOODFROG_BACKGROUND_THREADS", "-2"),
        ("WOODFROG_BACKGROUND_THREADS", "half"),
        ("WOODFROG_BACKGROUND_RATE", "0"),
        ("WOODFROG_BACKGROUND_RATE", "fast"),
    ],
)
def test_a_daemon_with_a_setting_that_says_nothing_does_not_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=text):
        require_settings()


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


def chosen(elsewhere: Elsewhere, busy: set[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(elsewhere, "_busy", lambda: set(busy))
    monkeypatch.setattr(elsewhere, "_others", set)
    return sorted(elsewhere.processors())


def on_machine(processors: int, monkeypatch: pytest.MonkeyPatch, told: int = 0) -> None:
    """One with so many processors, whose cores have processors i and i + `told`; 0: it does not tell."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setattr(
        background, "_siblings", lambda number: {number % told, number % told + told} if told else {number}
    )


def test_its_cores_are_far_from_busy_threads_and_have_no_processor_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(32, monkeypatch)
    elsewhere = Elsewhere([])
    assert chosen(elsewhere, {3}, monkeypatch) == list(range(24, 32))
    assert chosen(Elsewhere([]), {31}, monkeypatch) == list(range(8))
    assert chosen(Elsewhere([]), {0, 31}, monkeypatch) == list(range(12, 20))
    assert chosen(Elsewhere([], threads=16), {8}, monkeypatch) == list(range(16, 32))
    assert chosen(Elsewhere([], threads=3), {9, 14}, monkeypatch) == list(range(28, 32))  # whole cores


def test_it_stays_where_it_is_until_a_busy_thread_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(32, monkeypatch)
    elsewhere = Elsewhere([])
    elsewhere._chosen = set(range(16, 24))
    assert chosen(elsewhere, {2}, monkeypatch) == list(range(16, 24))
    assert chosen(elsewhere, {2, 17}, monkeypatch) == list(range(24, 32))


def test_where_busy_threads_are_everywhere_it_may_run_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(32, monkeypatch)
    assert chosen(Elsewhere([]), set(range(0, 32, 6)), monkeypatch) == list(range(32))
    on_machine(2, monkeypatch)
    assert chosen(Elsewhere([]), {1}, monkeypatch) == [0, 1]
    on_machine(1, monkeypatch)
    assert chosen(Elsewhere([]), {0}, monkeypatch) == [0]


def test_others_are_left_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(32, monkeypatch)
    ran = dict.fromkeys(range(32), (10.0, 100.0))
    monkeypatch.setattr(procfs, "processors_ran", lambda: ran)
    elsewhere = Elsewhere([])
    monkeypatch.setattr(elsewhere, "_busy", lambda: {3})
    ran = ran | dict.fromkeys((28, 29), (10.3, 100.5)) | {11: (10.2, 100.5), 12: (10.0, 100.0)}
    assert sorted(elsewhere.processors()) == list(range(12, 20))
    elsewhere._chosen = elsewhere.processors()
    ran = ran | {14: (11.0, 101.0)}  # its own threads, perhaps
    assert sorted(elsewhere.processors()) == list(range(12, 20))


def test_it_takes_whole_cores_of_a_machine_that_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(16, monkeypatch, told=8)
    assert background.cores(range(16)) == [{number, number + 8} for number in range(8)]
    assert chosen(Elsewhere([]), {9}, monkeypatch) == [6, 7, 14, 15]
    assert background.cores([1, 2, 9]) == [{1, 9}, {2}]


def test_a_thread_that_runs_is_seen_where_it_is(busy: tuple[int, int]) -> None:
    pid, processor = busy
    elsewhere = Elsewhere([pid])
    wait_for_ticks(pid)
    assert elsewhere._busy() == {processor}


def test_the_threads_that_it_starts_are_where_it_is_and_the_caller_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere([])
    processor = max(PROCESSORS)
    monkeypatch.setattr(elsewhere, "processors", lambda: {processor})

    def of_a_child() -> set[int]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(os.sched_getaffinity, 0).result()

    assert in_background(of_a_child, elsewhere) == {processor}
    assert os.sched_getaffinity(0) == PROCESSORS


def test_processors_that_are_not_this_process_any_more_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere([])
    monkeypatch.setattr(elsewhere, "processors", lambda: {1000})
    assert in_background(lambda: os.sched_getaffinity(0), elsewhere) == PROCESSORS


def test_a_process_that_has_ended_is_no_obstacle() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        elsewhere = Elsewhere([process.pid])
    assert elsewhere.processors() == PROCESSORS


def test_every_processor_of_this_machine_is_on_one_core() -> None:
    found = background.cores(PROCESSORS)
    assert set.union(*found) == PROCESSORS
    assert sum(len(core) for core in found) == len(PROCESSORS)


@pytest.mark.parametrize(
    ("content", "numbers"), [("0-1,4", [0, 1, 4]), ("3", [3]), ("0,16", [0, 16]), ("", []), (None, [])]
)
def test_lists_of_the_kernel(tmp_path: Path, content: str | None, numbers: list[int]) -> None:
    path = tmp_path / "list"
    if content is not None:
        path.write_text(content + "\n")
    assert procfs.listed(str(path)) == numbers
