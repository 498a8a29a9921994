"""Levels of a suspend, and one target that takes another's place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held import Holds
from product import DEADLINE_S, Product, Stepper

from woodfrog.errors import (
    NoDaemonError,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    TargetLostError,
    UsageError,
    WoodfrogError,
)
from woodfrog.operations.fault_points import fault_points

MIB = 1 << 20


def state_of(product: Product, target: Stepper) -> str:
    return next(str(row["state"]) for row in product.call("ps") if row["pid"] == target.pid)


def switch(product: Product, leaving: Stepper, coming: Stepper, **params: Any) -> Any:
    return product.call("switch", **{"out": leaving.pid, "in": coming.pid}, **params)


@pytest.mark.parametrize("level", ["warm", "cold"])
def test_a_suspended_target_gives_its_memory_back_and_goes_on_right(product: Product, level: str) -> None:
    target = product.run("--idle-kib", "8192")
    for _ in range(2):
        result = product.call("suspend", target=target.pid, level=level)
        assert (result["level"], result["state"]) == (level, "suspended")
        assert ("control" in result["phases"]) is (level == "cold")
        assert product.gpu_free_bytes() >= product.gpu_total_bytes() - 4 * MIB
        steps = target.steps()
        with pytest.raises(RefusedError, match="suspended"):
            product.checkpoint(target)
        assert target.steps() == steps
        product.call("resume", target=target.pid)
        target.wait_steps()
    target.check_runs_right()


def test_a_warm_target_outlives_the_daemon(product: Product) -> None:
    target = product.run("--idle-kib", "8192")
    product.call("suspend", target=target.pid, level="warm")
    product.kill_daemon()
    assert state_of(product, target) == "suspended"
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_levels_that_make_no_sense_are_refused(product: Product) -> None:
    target, other = product.run(), product.run(managed=False)
    with pytest.raises(UsageError, match="level"):
        product.call("suspend", target=target.pid, level="lukewarm")
    with pytest.raises(RefusedError, match="driver keeps"):
        product.call("suspend", target=other.pid, level="warm")
    target.check_runs_right()
    other.check_runs_right()


@pytest.mark.parametrize("level", ["warm", "cold"])
def test_two_targets_take_each_others_place_with_both_copies_at_once(product: Product, level: str) -> None:
    first, second = product.run("--idle-kib", "8192"), product.run("--idle-kib", "4096")
    product.call("suspend", target=second.pid)
    for leaving, coming in ((first, second), (second, first), (first, second)):
        result = switch(product, leaving, coming, level=level)
        assert result["overlapped"] is True
        assert (result["out_"]["pid"], result["in_"]["pid"]) == (leaving.pid, coming.pid)
        assert (state_of(product, leaving), state_of(product, coming)) == ("suspended", "running")
        coming.wait_steps()
    product.call("resume", target=first.pid)
    first.check_runs_right()
    second.check_runs_right()


def test_without_room_for_both_one_leaves_before_the_other_comes(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MEMORY": "64MiB"}, daemon_arguments=["--arena", "128M"])
    first = product.run("--idle-kib", str(36 << 10))
    product.call("suspend", target=first.pid)
    second = product.run("--idle-kib", str(36 << 10))
    assert switch(product, second, first)["overlapped"] is False
    first.wait_steps()
    assert switch(product, first, second, level="warm")["overlapped"] is False
    second.wait_steps()
    second.finish()
    product.call("resume", target=first.pid)
    first.check_runs_right()


def test_one_that_could_never_come_is_refused_before_the_other_is_touched(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MEMORY": "96MiB"}, daemon_arguments=["--arena", "192M"])
    large = product.run("--idle-kib", str(60 << 10))
    product.call("suspend", target=large.pid)
    stays = product.run("--idle-kib", str(40 << 10))
    leaves = product.run("--idle-kib", "4096")
    with pytest.raises(NoSpaceError) as refused:
        switch(product, leaves, large)
    assert (refused.value.target_state, refused.value.details["in_state"]) == ("running", "suspended")
    leaves.check_runs_right()
    stays.check_runs_right()


def test_switches_that_make_no_sense_are_refused(product: Product) -> None:
    first, second = product.run(), product.run()
    with pytest.raises(RefusedError, match="has to be suspended"):
        switch(product, first, second)
    with pytest.raises(UsageError, match="own place"):
        switch(product, first, first)
    product.call("suspend", target=second.pid)
    with pytest.raises(RefusedError):
        switch(product, second, first)
    first.check_runs_right()


@pytest.mark.parametrize("point", ["switch.in_survey.before", "switch.in_return.before"])
def test_if_the_one_that_comes_dies_the_other_runs_on(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    holds = Holds(tmp_path / "holds", point)
    product = make_product(environment=holds.environment)
    first, second = product.run("--idle-kib", "4096"), product.run()
    product.call("suspend", target=second.pid)

    def switch_to_one_that_dies() -> None:
        with holds.at(point, lambda: switch(product, first, second)):
            os.kill(second.pid, signal.SIGKILL)
            assert second.process is not None
            second.process.wait(DEADLINE_S)

    with pytest.raises(TargetLostError) as failed:
        switch_to_one_that_dies()
    assert (failed.value.target_state, failed.value.details["in_state"]) == ("running", "gone")
    assert state_of(product, first) == "running"
    first.check_runs_right()
    with pytest.raises(NotFoundError):
        switch(product, first, second)


def walk(product: Product, *options: str) -> None:
    """Switch until it succeeds; after each failure one of the two runs, and nothing is lost."""
    first = product.run(*options, "--pace-us", "2000")
    product.call("suspend", target=first.pid)
    second = product.run(*options, "--pace-us", "2000")
    for _ in range(40):
        daemon = product.daemon_pid()
        failed: WoodfrogError | None = None
        try:
            switch(product, second, first)
        except NoDaemonError:
            product.wait_for_new_daemon(daemon)
        except WoodfrogError as failure:
            failed = failure
        else:
            break
        if failed is not None and failed.target_state != "untouched":
            assert failed.target_state == state_of(product, second), failed
            assert failed.details["in_state"] == state_of(product, first), failed
        states = state_of(product, second), state_of(product, first)
        assert "running" in states, states
        if states[0] != "running":
            first.wait_steps(1)
            switch_back(product, second, first)
        else:
            second.wait_steps(1)
            if states[1] == "running":
                product.call("suspend", target=first.pid)
    else:
        raise AssertionError("it never succeeded")
    assert (state_of(product, second), state_of(product, first)) == ("suspended", "running")
    first.check_runs_right()
    product.call("resume", target=second.pid)
    second.check_runs_right()


def switch_back(product: Product, suspended: Stepper, running: Stepper) -> None:
    product.call("suspend", target=running.pid)
    product.call("resume", target=suspended.pid)


@pytest.mark.parametrize("memory", ["2GiB", "64MiB"], ids=["at once", "in turn"])
def test_no_failure_of_any_phase_leaves_both_off_the_gpu(
    make_product: Callable[..., Product], tmp_path: Path, memory: str
) -> None:
    state = tmp_path / "fired"
    state.mkdir()
    points = list(fault_points("switch"))
    environment = {
        "WOODFROG_FAULTS": ",".join(f"{point}:error" for point in points),
        "WOODFROG_FAULTS_STATE": str(state),
        "WOODFROG_SIMGPU_MEMORY": memory,
    }
    walk(make_product(environment=environment, daemon_arguments=["--arena", "128M"]), "--idle-kib", str(36 << 10))
    assert {path.name.split(":")[0] for path in state.iterdir()} == set(points)


@pytest.mark.parametrize("points", [("out_drain", "in_refill"), ("out_commit", "in_return", "out_end")])
def test_a_daemon_killed_within_a_switch_loses_neither(
    make_product: Callable[..., Product], tmp_path: Path, points: tuple[str, ...]
) -> None:
    state = tmp_path / "fired"
    state.mkdir()
    faults = ",".join(f"switch.{point}.after:kill" for point in points)
    product = make_product(environment={"WOODFROG_FAULTS": faults, "WOODFROG_FAULTS_STATE": str(state)})
    walk(product, "--idle-kib", "4096")
    assert len(list(state.iterdir())) == len(points)
