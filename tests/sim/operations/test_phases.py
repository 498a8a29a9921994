"""Promises of the phase runner, without any GPU."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace

import pytest

from woodfrog.errors import NoSpaceError, TimeoutExceededError, WoodfrogError
from woodfrog.operations.phases import Beside, CancelledOperationError, Phase, Runner


class Recorder:
    def __init__(self) -> None:
        self.done: list[str] = []

    def phase(self, name: str, failure: Exception | None = None, **settings: object) -> Phase:
        def do() -> None:
            self.done.append(f"do {name}")
            if failure is not None:
                raise failure

        return Phase(name, do, lambda: self.done.append(f"undo {name}"), **settings)  # type: ignore[arg-type]


def test_a_failure_undoes_begun_phases_last_first_and_is_raised() -> None:
    recorder = Recorder()
    failure = WoodfrogError("no")
    with pytest.raises(WoodfrogError) as raised:
        Runner("op").run([recorder.phase("a"), recorder.phase("b", failure), recorder.phase("c")])
    assert raised.value is failure
    assert failure.phase == "b"
    assert recorder.done == ["do a", "do b", "undo b", "undo a"]


def test_nothing_is_undone_after_the_commit_point() -> None:
    recorder = Recorder()
    runner = Runner("op")
    with pytest.raises(WoodfrogError):
        runner.run([recorder.phase("a"), recorder.phase("b", commits=True), recorder.phase("c", WoodfrogError("no"))])
    assert recorder.done == ["do a", "do b", "do c"]
    assert runner.committed


def test_an_undo_that_fails_does_not_stop_the_others() -> None:
    undone: list[str] = []

    def refuse() -> None:
        raise OSError(errno.EIO, "broken")

    runner = Runner("op")
    steps = [
        Phase("a", lambda: None, lambda: undone.append("a")),
        Phase("b", lambda: None, refuse),
        Phase("c", lambda: (_ for _ in ()).throw(WoodfrogError("no"))),
    ]
    with pytest.raises(WoodfrogError, match="no"):
        runner.run(steps)
    assert undone == ["a"]
    assert [failure.phase for failure in runner.undo_failures] == ["op.b.undo"]


def test_background_and_foreground_run_at_the_same_time() -> None:
    met = threading.Barrier(2, timeout=10)
    Runner("op").run(
        [Beside([Phase("back", lambda: met.wait() and None)], [Phase("front", lambda: met.wait() and None)])]
    )


@pytest.mark.parametrize("failing", ["front", "back"])
def test_a_failure_beside_joins_and_undoes_both_sides(failing: str) -> None:
    recorder = Recorder()
    failure = WoodfrogError("no")
    step = Beside(
        [recorder.phase("back", failure if failing == "back" else None)],
        [recorder.phase("front", failure if failing == "front" else None)],
    )
    with pytest.raises(WoodfrogError, match="no"):
        Runner("op").run([recorder.phase("first"), step, recorder.phase("last")])
    assert "do last" not in recorder.done
    assert recorder.done[-1] == "undo first"
    begun = {entry.split()[1] for entry in recorder.done if entry.startswith("do")}
    assert {entry.split()[1] for entry in recorder.done if entry.startswith("undo")} == begun


class FakeProgress:
    bytes_done = 3
    bytes_total = 7

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_a_phase_that_exceeds_its_limit_has_its_copies_cancelled_and_is_told_as_a_time_out() -> None:
    runner = Runner("op")
    progress = FakeProgress()

    def copy() -> None:
        with runner.counting("copy", progress):
            assert progress.cancelled.wait(30)
            raise RuntimeError("cancelled")

    with pytest.raises(TimeoutExceededError, match="copy took longer"):
        runner.run([Phase("copy", copy, limit_s=0.05)])


def test_a_failing_foreground_cancels_the_background_copy() -> None:
    runner = Runner("op")
    progress = FakeProgress()
    copying = threading.Event()

    def copy() -> None:
        with runner.counting("copy", progress):
            copying.set()
            assert progress.cancelled.wait(30)

    def fail() -> None:
        assert copying.wait(30)
        raise WoodfrogError("no")

    with pytest.raises(WoodfrogError, match="no"):
        runner.run([Beside([Phase("copy", copy)], [Phase("fail", fail)])])
    assert progress.cancelled.is_set()


def test_cancel_undoes_before_the_commit_point_and_is_refused_after() -> None:
    recorder = Recorder()
    runner = Runner("op")
    steps = [
        recorder.phase("a"),
        Phase("ask", lambda: runner.cancel("test") and None),
        recorder.phase("b"),
    ]
    with pytest.raises(CancelledOperationError):
        runner.run(steps)
    assert recorder.done == ["do a", "undo a"]
    committed = Runner("op")
    committed.run([Phase("commit", lambda: None, commits=True)])
    assert committed.cancel("too late") is False


def test_a_full_disk_is_told_as_such_whatever_raised_it() -> None:
    class TransferLike(RuntimeError):
        code = -errno.ENOSPC

    for failure in (OSError(errno.ENOSPC, "full"), TransferLike("pwrite")):
        with pytest.raises(NoSpaceError):
            Runner("op").run([Recorder().phase("write", failure)])


def test_events_tell_begin_end_and_progress_with_bytes() -> None:
    events: list[dict[str, object]] = []
    runner = Runner("op", events.append)
    progress = FakeProgress()

    def copy() -> None:
        with runner.counting("copy", progress):
            pass

    runner.run([Phase("copy", copy)])
    assert [event["event"] for event in events] == ["begin", "progress", "end"]
    assert events[1]["bytes_total"] == 7
    assert events[2]["ok"] is True
    assert runner.times["copy"] >= 0


def test_a_phase_begins_after_the_background_phase_it_names_and_not_after_all_of_them() -> None:
    ran_on = threading.Event()
    captured: list[bool] = []
    first = Phase("capture", lambda: captured.append(True))
    second = Phase("drain", lambda: _wait(ran_on))

    def return_() -> None:
        assert captured
        ran_on.set()

    foreground = [Phase("return", return_, after=["capture"])]
    runner = Runner("op")
    runner.run([Beside([first, second], foreground)])
    assert "return" in runner.waits


def test_a_phase_waits_for_one_after_the_other_until_it_is_ready() -> None:
    made: list[str] = []
    ran_on = threading.Event()
    first = Phase("snapshot", lambda: made.append("snapshot"))
    second = Phase("capture", lambda: _wait(ran_on))
    back = Phase("return", ran_on.set, after=["snapshot", "capture"], ready=lambda: bool(made))
    Runner("op").run([Beside([first, second], [back])])  # `capture` ends only once `return` has run

    order: list[str] = []
    phases = [Phase(name, lambda name=name: order.append(name)) for name in ("snapshot", "capture")]  # type: ignore[misc]
    back = Phase("return", lambda: order.append("return"), after=["snapshot", "capture"], ready=lambda: False)
    Runner("op").run([Beside(phases, [back])])
    assert order == ["snapshot", "capture", "return"]


def test_a_background_phase_waits_for_one_of_another_background() -> None:
    order: list[str] = []
    both = threading.Event()
    larger = [Phase("import", lambda: order.append("import")), Phase("drain", lambda: _wait(both))]
    smaller = [Phase("allocate", lambda: order.append("allocate"), after=["import"]), Phase("refill", both.set)]
    runner = Runner("op")
    runner.run([Beside(larger, [], [smaller])])  # `drain` ends only once `refill` has run
    assert order == ["import", "allocate"]
    assert "allocate" in runner.waits


def test_a_background_phase_does_not_begin_when_the_one_that_it_waits_for_fails() -> None:
    recorder = Recorder()
    larger = [recorder.phase("import", WoodfrogError("no")), recorder.phase("drain")]
    smaller = [replace(recorder.phase("allocate"), after=["import"]), recorder.phase("refill")]
    with pytest.raises(WoodfrogError, match="no"):
        Runner("op").run([Beside(larger, [], [smaller])])
    assert recorder.done == ["do import", "undo import"]


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def test_a_phase_does_not_begin_when_the_one_that_it_waits_for_fails() -> None:
    recorder = Recorder()
    background = [recorder.phase("capture", WoodfrogError("no")), recorder.phase("drain")]
    with pytest.raises(WoodfrogError, match="no"):
        Runner("op").run([Beside(background, [recorder.phase("return", after=["capture"])])])
    assert recorder.done == ["do capture", "undo capture"]
