"""A quiesce brings every thread to a stop at the driver, or gives up in time and leaves the target as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from interposer_agents import DEADLINE_S, Listener, Target

from woodfrog.errors import TimeoutExceededError

MIB = 1 << 20


def test_no_call_reaches_the_driver_while_threads_launch_in_loops(target: Target, listener: Listener) -> None:
    target.ask("loop 6")
    with listener.accept() as link:
        for operation in range(10):
            link.quiesce(operation, DEADLINE_S)
            launches = link.survey().launches
            calls = int(target.ask("calls"))
            # Nothing that could be waited for shows that nothing happens: this is as long as hundreds of calls take.
            assert target.silent(0.05)
            assert link.survey().launches == launches
            assert int(target.ask("calls")) <= calls + 6 * 12  # counted after the call that was inside
            link.resume()
    assert int(target.ask("end_loop").split()[1]) > 0


def test_memory_is_handed_over_twenty_times_under_running_threads(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 4 {3 * MIB}")
    target.ask("loop 4")
    with listener.accept() as link:
        for operation in range(20):
            link.quiesce(operation, DEADLINE_S)
            with link.export_memory() as exported:
                link.release_memory()
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
        assert target.ask("check") == "ok"
    assert target.ask("end_loop").startswith("calls ")


def test_an_endless_kernel_makes_a_timeout_and_the_target_runs_on(target: Target, listener: Listener) -> None:
    target.ask("alloc 1 4096")
    target.ask("spin")
    with listener.accept() as link:
        with pytest.raises(TimeoutExceededError, match="device 0 is still running"):
            link.quiesce(1, 0.3)
        assert link.state == "running"
        assert target.ask("stop_spin") == "stopped"
        link.quiesce(2, DEADLINE_S)
        link.resume()
        assert target.ask("check") == "ok"


def test_a_host_function_that_waits_makes_a_timeout_and_one_that_calls_the_driver_is_let_through(
    target: Target, listener: Listener
) -> None:
    target.ask("block")
    with listener.accept() as link:
        with pytest.raises(TimeoutExceededError, match="still running"):
            link.quiesce(1, 0.3)
        assert target.ask("unblock") == "unblocked"
        for _ in range(20):  # queued behind a kernel, so that they run while the gate is closed
            target.ask("spin_then_call")
            link.quiesce(2, DEADLINE_S)
            link.resume()


def test_a_thread_that_waits_in_the_driver_is_named_when_it_keeps_the_gate(target: Target, listener: Listener) -> None:
    target.ask("spin")
    target.ask("synchronize_in_thread")
    with listener.accept() as link:
        with pytest.raises(
            TimeoutExceededError, match=r"cuStreamSynchronize is still running in thread \d+ \(waiter\)"
        ):
            link.quiesce(1, 0.3)
        assert target.ask("stop_spin") == "stopped"
        link.quiesce(2, DEADLINE_S)
        link.resume()
    assert target.ask("end_loop").startswith("calls ")


def test_a_running_capture_is_let_finish_and_a_new_one_waits(target: Target, listener: Listener) -> None:
    target.ask("capture")
    with listener.accept() as link:
        assert "capture_active" in link.survey().obstacles
        with pytest.raises(TimeoutExceededError, match="capture"):
            link.quiesce(1, 0.2)
        assert target.ask("end") == "captured"  # calls pass: it could end although a quiesce had been asked for
        link.quiesce(2, DEADLINE_S)
        target.send("capture")
        assert target.silent(0.2)
        link.resume()
        assert target.answer() == "capturing"
        assert target.ask("end") == "captured"


def test_memory_freed_in_a_capture_stays_until_the_capture_has_ended(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 1 {40 * MIB}")
    with listener.accept() as link:
        owned = link.survey().owned_bytes
        target.ask("capture")
        assert target.ask("free_in_capture") == "freed"
        assert link.survey().owned_bytes == owned
        assert target.ask("end") == "captured"
        assert link.survey().owned_bytes == owned - 40 * MIB


def test_memory_allocated_in_a_relaxed_capture_is_handed_over_too(target: Target, listener: Listener) -> None:
    target.ask("capture")
    target.ask(f"alloc 1 {3 * MIB}")
    target.ask("end")
    with listener.accept() as link:
        survey = link.survey()
        assert survey.driver_owned_bytes == 0
        assert survey.owned_bytes >= 4 * MIB


def test_a_context_that_was_reset_is_no_hindrance_and_its_memory_is_gone(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 3 {3 * MIB}")
    target.ask("reset")
    with listener.accept() as link:
        assert link.survey().owned_bytes == 0
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            assert exported.handles == []
        link.resume()
        assert target.ask(f"alloc 2 {3 * MIB}") == "allocated 2"
        assert target.ask("check") == "ok"
        assert link.survey().owned_bytes == 2 * 4 * MIB


def test_a_forked_child_is_not_held_and_holds_nothing_of_ours(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 2 {2 * MIB}")
    with listener.accept() as link:
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            link.release_memory()
            link.return_memory(exported.handles, list(exported.fds))
        link.resume()
        assert target.ask("fork") == "child 0"  # it made a driver call, which returned
        assert target.ask("fork_descriptors") == "child 0"  # none of ours was open in it
        link.quiesce(2, DEADLINE_S)
        target.send("fork")  # the child's call must not wait at the parent's closed gate
        assert target.answer() == "child 0"
        link.resume()
        assert target.ask("check") == "ok"


def test_an_executed_child_inherits_no_descriptor_of_ours(target: Target, listener: Listener) -> None:
    with listener.accept():
        # The listing's own descriptor aside, a child of a bare process has 0, 1 and 2.
        assert target.ask("exec test $(ls /proc/self/fd | awk '$1 > 100' | wc -l) -eq 0") == "exec 0"


def test_allocations_are_the_drivers_when_the_user_says_so(target_program: Path, listener: Listener) -> None:
    with Target(target_program, listener.directory, WOODFROG_DRIVER_ALLOC="1") as target, listener.accept() as link:
        target.ask(f"alloc 2 {3 * MIB}")
        survey = link.survey()
        assert survey.owned_bytes == 0
        assert survey.driver_owned_bytes >= 6 * MIB
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            assert exported.handles == []
            link.release_memory()
            link.return_memory([], [])
        link.resume()
        assert target.ask("check") == "ok"
