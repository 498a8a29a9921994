"""Every phase of every operation, with every kind of failure: an error, a time-out, a full disk, a killed daemon."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product

sys.path.insert(0, str(Path(__file__).resolve().parent))

from walking import WAYS, Walker, environment, points

from woodfrog.operations.fault_points import PHASES, fault_points

# Two rounds, so that each phase meets each kind of failure.
ROUNDS = {"error and time-out": ("error", "timeout"), "full disk and error": ("enospc", "error")}
# The keeper starts a daemon five times a minute: four deaths are what one walk may cost.
KILLED_TOGETHER = 2


@pytest.mark.parametrize("actions", ROUNDS)
@pytest.mark.parametrize("way", WAYS)
def test_no_failure_of_any_phase_costs_the_target(
    make_product: Callable[..., Product], tmp_path: Path, way: str, actions: str
) -> None:
    before, after = ROUNDS[actions]
    walk(make_product, tmp_path, way, points(way, before, after, _reached(way)))


def _killings() -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for way in WAYS:
        phases = _reached(way)
        found += [(way, phases[at : at + KILLED_TOGETHER]) for at in range(0, len(phases), KILLED_TOGETHER)]
    return found


def _reached(way: str) -> tuple[str, ...]:
    return tuple(phase for phase in WAYS[way][1] if phase != "verify")  # only with --verify: a test of its own


@pytest.mark.parametrize(
    ("way", "phases"), _killings(), ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_a_daemon_killed_in_any_phase_costs_nothing(
    make_product: Callable[..., Product], tmp_path: Path, way: str, phases: tuple[str, ...]
) -> None:
    walk(make_product, tmp_path, way, points(way, "kill", "kill", phases))


def walk(make_product: Callable[..., Product], tmp_path: Path, way: str, faults: list) -> None:  # type: ignore[type-arg]
    state = tmp_path / "fired"
    walker = Walker(make_product(environment=environment(faults, state)), faults, state)
    walker.walk(way)
    walker.finish()


@pytest.mark.parametrize("phase", ["quiesce", "drain", "cpu", "write", "commit"])
def test_a_phase_that_hangs_is_ended_by_its_limit(
    make_product: Callable[..., Product], tmp_path: Path, phase: str
) -> None:
    state = tmp_path / "fired"
    faults = points("checkpoint", "hang", "hang", [phase])
    limits = {"WOODFROG_PHASE_LIMIT_S": "1.5"}
    walker = Walker(make_product(environment={**environment(faults, state), **limits}), faults, state)
    walker.walk("checkpoint")
    walker.finish()


def test_a_verification_that_fails_leaves_nothing_of_the_target(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    from woodfrog.errors import WoodfrogError

    state = tmp_path / "fired"
    faults = points("restore", "error", "error", ["verify"])
    product = make_product(environment=environment(faults, state))
    target = product.run()
    image = product.checkpoint(target, stop=True)["image"]
    for _ in faults:
        with pytest.raises(WoodfrogError):
            product.restore(image, target.log, verify=True)
        assert not target.alive
    product.restore(image, target.log, verify=True).check_runs_right()


@pytest.mark.parametrize("way", ["checkpoint", "checkpoint and stop"])
def test_the_list_of_fault_points_is_what_an_operation_passes(
    make_product: Callable[..., Product], tmp_path: Path, way: str
) -> None:
    trace = tmp_path / "trace"
    product = make_product(environment={"WOODFROG_FAULTS_TRACE": str(trace)})
    target = product.run()
    image = product.checkpoint(target, stop=way != "checkpoint")["image"]
    if way != "checkpoint":
        product.restore(image, target.log, verify=True)
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
    passed = {line for line in trace.read_text().splitlines() if not line.startswith("store.")}
    wanted = {point for point in fault_points("checkpoint") if point.split(".")[1] in WAYS[way][1]}
    if way != "checkpoint":
        wanted |= {point for operation in PHASES if operation != "checkpoint" for point in fault_points(operation)}
    assert passed == wanted
