"""Threads of woodfrog-enter help a driver that is not ours with its copies, and nothing of them stays behind."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from copier import DEADLINE_S, ROUND_BYTES, Copier, is_at_work, wait_until

from woodfrog.driver.entering import Copies, Entered

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="woodfrog-enter enters x86-64 processes only")

libc = ctypes.CDLL(None, use_errno=True)
HELPERS = 3
# In the order in which they are come to (native/enter/copies.cpp). The code: mapped, written, made executable. Coming:
# control cleared in children, all of it set up, stacks mapped, one thread made, all made, the driver's reference led to
# them, all run. Going: told to end, ended, stacks unmapped.
CODING = ["copy_mapped", "copy_written", "copy_is_code"]
COMING = [
    "copy_wiped",
    "copy_set_up",
    "copy_stacks",
    "copy_first_thread",
    "copy_threads",
    "copy_led",
    "copy_running",
]
GOING = ["copy_go_home", "copy_home", "copy_unmapped"]
# Of each system call that a thread makes for us (chain.cpp); the first of them is the mapping.
CALLING = ["frame_written", "call_set", "signals_held", "call_entered", "call_made", "signals_back"]


def visit(target: Copier, helpers: int = HELPERS, step: str = "checkpoint") -> Entered:
    threads = [target.thread]
    return Entered(target.pid, threads, populate_threads=0, copy_threads=helpers, step=step)


def shared(visitor: Entered) -> Copies:
    (copies,) = visitor.visit.copies
    return copies


def test_the_drivers_copies_are_shared_and_nothing_stays(copier: Callable[..., Copier]) -> None:
    target = copier()
    for _ in range(3):
        with visit(target) as visitor:
            wait_until(lambda: target.helpers() == HELPERS, "threads that help")
            assert target.has_code()
            target.check()
        copies = shared(visitor)
        assert copies.reason == ""
        assert copies.threads == HELPERS
        # Helpers without a processor are left out after some copies.
        assert copies.copied_bytes == ROUND_BYTES or copies.slow_copies >= 4
        assert copies.copies >= 4
        assert visitor.visit.reason == ""
        target.check_clean()


def test_its_threads_take_no_signals(copier: Callable[..., Copier]) -> None:
    target = copier()
    with visit(target):
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        tasks = Path(f"/proc/{target.pid}/task").iterdir()
        helpers = [task for task in tasks if (task / "comm").read_text() == "woodfrog-copy\n"]
        blocked = [
            int(line.split()[1], 16)
            for task in helpers
            for line in (task / "status").read_text().splitlines()
            if line.startswith("SigBlk:")
        ]
    unblockable = 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1
    assert blocked == [(1 << 64) - 1 & ~unblockable] * HELPERS
    target.check_clean()


def test_only_the_drivers_threads_copies_are_shared(copier: Callable[..., Copier]) -> None:
    target = copier()
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        assert target.ask("o") == "right"
    assert shared(visitor) == Copies("checkpoint", threads=HELPERS)
    target.check_clean()


def test_overlapping_memory_is_copied_as_the_c_library_does(copier: Callable[..., Copier]) -> None:
    target = copier()
    assert target.ask("v") == "right"
    with visit(target):
        assert target.ask("v") == "right"
    target.check_clean()


def test_a_reference_that_is_resolved_already_is_as_good(copier: Callable[..., Copier]) -> None:
    target = copier()
    target.check()
    with visit(target) as visitor:
        target.check()
    assert shared(visitor).copies >= 4
    target.check_clean()


@pytest.mark.parametrize("point", CALLING + CODING + COMING + GOING)
def test_killed_anywhere_the_process_goes_on_and_the_next_visit_cleans_up(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    target = copier()
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    with visit(target) as visitor:
        assert visitor._process is not None
        if point not in GOING:
            assert visitor._process.wait(10) == -signal.SIGKILL, "the point was not come to"
        target.check()
    assert visitor._process.returncode == -signal.SIGKILL, "the point was not come to"
    assert shared(visitor).reason == "woodfrog-enter was killed"
    assert target.tracers() == {"0"}
    target.check()
    monkeypatch.delenv("WOODFROG_ENTER_FAULT")
    with visit(target) as second:
        target.check()
    assert shared(second).reason == ""
    assert shared(second).copies >= 4
    target.check_clean()


@pytest.mark.parametrize("point", CALLING + CODING + COMING + GOING)
def test_a_target_that_is_killed_anywhere_is_told(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    target = copier()
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    monkeypatch.setenv("WOODFROG_ENTER_FAULT_VICTIM", str(target.pid))
    with visit(target) as visitor:
        if point not in GOING:
            target.process.wait(DEADLINE_S)
    target.process.wait(DEADLINE_S)
    assert visitor._process is not None
    assert visitor._process.returncode == 0
    assert "ended meanwhile" in visitor.visit.reason
    assert len(visitor.visit.copies) == 1


@pytest.mark.parametrize("point", ["copy_mapped", "copy_threads", "copy_running"])
def test_a_visit_that_is_not_to_copy_cleans_up_as_well(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    target = copier()
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    with visit(target) as visitor:
        assert visitor._process is not None
        visitor._process.wait(10)
    assert target.has_code()
    monkeypatch.delenv("WOODFROG_ENTER_FAULT")
    with visit(target, helpers=0) as second:
        wait_until(lambda: not target.is_at_work(), "end of what was left")
    assert second.visit.copies == []
    target.check_clean()


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_it_may_end_in_the_middle_of_copies(copier: Callable[..., Copier], way: signal.Signals) -> None:
    target = copier()
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        target.order("b")
        assert visitor._process is not None
        for _ in range(4):
            target.ask("o")  # about so long
        visitor._process.send_signal(way)
        visitor._process.wait(DEADLINE_S)
        target.ask("o")
        target.order("e")
        assert target.line() == "right"
    if way == signal.SIGKILL:
        assert target.has_code()
        with visit(target):
            wait_until(lambda: target.helpers() == HELPERS, "threads that help")
    target.check_clean()


def test_random_kills_with_copies_under_way(copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty visits that are killed somewhere, beside copies of both threads, each followed by one that cleans up."""
    choose = random.Random(4711)
    target = copier()
    for _ in range(20):
        point = choose.choice(CALLING + CODING + COMING + GOING)
        orders = choose.choice(["", "o", "c", "oc"])
        monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
        with visit(target) as visitor:
            for order in orders:
                target.order(order)
            if choose.random() < 0.3:
                assert visitor._process is not None
                visitor._process.kill()
            assert [target.line() for _ in orders] == ["right"] * len(orders)
        monkeypatch.delenv("WOODFROG_ENTER_FAULT")
        with visit(target) as second:
            wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        assert shared(second).reason == ""
        target.check_clean()


def test_visits_in_the_middle_of_copies(copier: Callable[..., Copier]) -> None:
    """They come and go while the driver copies without end."""
    target = copier()
    target.order("b")
    for _ in range(5):
        with visit(target) as visitor:
            wait_until(lambda: target.helpers() == HELPERS, "threads that help")
            target.ask("o")
        assert shared(visitor).reason == ""
        assert not target.is_at_work()
    target.order("e")
    assert target.line() == "right"
    target.check_clean()


def test_visits_end_in_the_middle_of_other_threads_copies(copier: Callable[..., Copier]) -> None:
    """Those go through the code as well, and it is not unmapped under them."""
    target = copier()
    for _ in range(20):
        with visit(target, helpers=1) as visitor:
            wait_until(lambda: target.helpers() == 1, "thread that helps")
            target.order("o")
        assert shared(visitor).reason == ""
        assert not target.is_at_work()
        assert target.line() == "right"
    target.check_clean()


def test_visits_of_a_process_that_is_interrupted_all_the_time(copier: Callable[..., Copier]) -> None:
    """By signals, on whatever thread, in the code as elsewhere; and which starts programs meanwhile."""
    target = copier()
    assert target.ask("i") == "right"
    target.order("b")
    for _ in range(10):
        with visit(target) as visitor:
            wait_until(lambda: target.helpers() == HELPERS, "threads that help")
            assert target.ask("o") == "right"
            assert target.ask("z") == "right"
        assert shared(visitor).reason == ""
        assert not target.is_at_work()
    target.order("e")
    assert target.line() == "right"
    target.check_clean()


@pytest.mark.parametrize("point", CALLING)
def test_a_thread_that_comes_back_from_a_handler_keeps_its_registers(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """It stands behind a system call then (rt_sigreturn), but in the midst of its own code, as no other call finds it:
    a visitor that is killed there must not have begun anything with it."""
    target = copier()
    assert target.ask("i") == "right"
    target.order("u")
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    for _ in range(3):
        with visit(target):
            assert target.ask("z") == "right"  # meanwhile some handlers return
    target.order("e")
    assert target.line() == "right"


def test_a_child_that_is_forked_meanwhile_copies_alone(copier: Callable[..., Copier]) -> None:
    target = copier()
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        target.order("b")
        answers = [target.ask("f").split() for _ in range(3)]
        target.order("e")
        assert target.line() == "right"
    assert [(words[0], words[2]) for words in answers] == [("child", "right")] * 3
    assert shared(visitor).copies >= 4
    target.check_clean()
    # The code is in the children still; a visit takes it out there as well.
    for child in (int(words[1]) for words in answers):
        assert is_at_work(child)
        with Entered(child, [child], populate_threads=0, copy_threads=0) as cleaning:
            pass
        assert [(one["reason"], one["cleaned"]) for one in cleaning.named("copies")] == [("", True)]
        assert not is_at_work(child)
        assert len(list(Path(f"/proc/{child}/task").iterdir())) == 1


@pytest.mark.parametrize("order", ["s", "k", "y"])
def test_a_filter_that_forbids_what_would_be_called_is_never_asked(copier: Callable[..., Copier], order: str) -> None:
    """One that gives an error; one that ends the process for a call that the driver's thread would make for us; one
    for a call that the code makes, and only when a helper has no processor."""
    target = copier()
    assert target.ask(order) == "right"
    with visit(target) as visitor:
        target.check()
    assert "filter does not let through" in shared(visitor).reason
    assert shared(visitor).copies == 0
    assert not target.has_code()
    target.check_clean()


def test_a_filter_that_comes_when_all_is_there_is_obeyed(copier: Callable[..., Copier]) -> None:
    """Threads that were made before end under it; what it forbids is not done, and stays undone."""
    target = copier()
    with visit(target) as first:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        assert target.ask("k") == "right"
        target.check()
    assert shared(first).reason == ""
    target.check_clean()
    with visit(target) as second:
        target.check()
    assert "filter does not let through" in shared(second).reason
    target.check_clean()


def test_a_filter_that_lets_all_through_is_understood(copier: Callable[..., Copier]) -> None:
    target = copier()
    assert target.ask("a") == "right"
    with visit(target) as visitor:
        target.check()
    assert shared(visitor).reason == ""
    assert shared(visitor).copies >= 4
    target.check_clean()


def test_a_filter_that_cannot_be_read_counts_as_one_that_forbids(copier: Callable[..., Copier]) -> None:
    target = copier()
    assert target.ask("a") == "right"
    visitor = visit(target)
    visitor._command[:0] = ["setpriv", "--bounding-set=-sys_admin"]
    with visitor:
        target.check()
    assert "takes CAP_SYS_ADMIN" in shared(visitor).reason
    assert not target.has_code()
    target.check_clean()


@pytest.mark.parametrize(("order", "reason"), [("x", "may not have code added"), ("n", "gets no memory")])
def test_what_the_process_may_not_have_is_not_left_half_done(
    copier: Callable[..., Copier], order: str, reason: str
) -> None:
    target = copier()
    assert target.ask(order) == "right"
    with visit(target) as visitor:
        wait_until(lambda: visitor.named("attached") != [], "attaching")
    assert reason in shared(visitor).reason
    assert not target.has_code()
    assert target.helpers() == 0


def test_a_process_with_many_threads(copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch) -> None:
    target = copier()
    assert target.ask("t") == "right"
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", "copy_running")
    with visit(target) as killed:
        assert killed._process is not None
        killed._process.wait(10)
    monkeypatch.delenv("WOODFROG_ENTER_FAULT")
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        target.check()
    assert shared(visitor).reason == ""
    assert shared(visitor).threads == HELPERS
    target.check_clean()


@pytest.mark.parametrize("order", ["m", "M"])
def test_a_process_that_becomes_another_program(copier: Callable[..., Copier], order: str) -> None:
    """What was in the old one is gone with it; the new one is let go and never written to."""
    target = copier()
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        target.order(order)
        wait_until(lambda: Path(f"/proc/{target.pid}/comm").read_text() == "cat\n", "other program")
    assert visitor._process is not None
    assert visitor._process.returncode == 0
    assert target.tracers() == {"0"}
    assert not target.has_code()
    assert target.process.poll() is None


def test_a_reference_that_is_read_only_is_left_alone(copier: Callable[..., Copier]) -> None:
    target = copier(read_only=True)
    with visit(target) as visitor:
        target.check()
    assert "read-only" in shared(visitor).reason
    target.check_clean()


def test_a_process_without_a_driver_is_left_alone(mapper: Callable[..., object]) -> None:
    target = mapper(80)
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2) as visitor:  # type: ignore[attr-defined]
        target.check()  # type: ignore[attr-defined]
    assert "no libcuda" in shared(visitor).reason
    target.check_free()  # type: ignore[attr-defined]


def test_a_process_that_somebody_else_traces_is_left_alone(copier: Callable[..., Copier]) -> None:
    """Its first thread is attached to, and let go when the other one cannot be."""
    target = copier()
    with (
        Entered(target.pid, [target.thread], populate_threads=0, record=True, copy_threads=0),
        Entered(target.pid, [target.pid, target.thread], populate_threads=0, copy_threads=2) as second,
    ):
        target.check()
    assert "traces it already" in shared(second).reason
    target.check_clean()


def test_without_the_drivers_thread_nothing_is_shared(copier: Callable[..., Copier]) -> None:
    target = copier()
    with Entered(target.pid, populate_threads=0, copy_threads=2) as visitor:
        target.check()
    assert "does not name" in shared(visitor).reason
    target.check_clean()


def test_a_target_that_is_killed_meanwhile_is_told(copier: Callable[..., Copier]) -> None:
    target = copier()
    with visit(target) as visitor:
        target.order("b")
        target.process.kill()
        target.process.wait(DEADLINE_S)
    assert "ended meanwhile" in visitor.visit.reason


def test_a_process_that_is_stopped_meanwhile_stays_stopped(copier: Callable[..., Copier]) -> None:
    target = copier()
    states = lambda: {  # noqa: E731
        status.read_text().split("State:\t")[1][0] for status in Path(f"/proc/{target.pid}/task").glob("*/status")
    }
    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        os.kill(target.pid, signal.SIGSTOP)
        wait_until(lambda: states() <= {"T", "t"}, "stop")
    assert shared(visitor).reason == ""
    wait_until(lambda: states() == {"T"}, "stop of all")
    os.kill(target.pid, signal.SIGCONT)
    target.check_clean()


def test_a_stop_that_one_of_its_threads_takes_stops_the_process(copier: Callable[..., Copier]) -> None:
    """SIGSTOP cannot be kept from them, and is the whole process's whoever takes it."""
    target = copier()
    tasks = Path(f"/proc/{target.pid}/task")

    def states() -> set[str]:
        return {(task / "status").read_text().split("State:\t")[1][0] for task in tasks.iterdir()}

    with visit(target) as visitor:
        wait_until(lambda: target.helpers() == HELPERS, "threads that help")
        helper = next(task for task in tasks.iterdir() if (task / "comm").read_text() == "woodfrog-copy\n")
        assert libc.tgkill(target.pid, int(helper.name), signal.SIGSTOP) == 0
        wait_until(lambda: states() <= {"T", "t"}, "stop")
    assert shared(visitor).reason == ""
    wait_until(lambda: states() == {"T"}, "stop of all")
    os.kill(target.pid, signal.SIGCONT)
    target.check_clean()
