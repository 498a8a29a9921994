"""Every phase of every operation, with every kind of failure: an error, a time-out, a full disk, a killed daemon."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from product import Product

sys.path.insert(0, str(Path(__file__).resolve().parent))

from side_by_side import side_by_side
from walking import WAYS, Point, Walker, environment, points

from woodfrog._native import paths
from woodfrog.cpu.lazy_dump import FAULT_POINT as FROZEN
from woodfrog.cpu.pages_by import VARIABLE as CRIU_PAGES
from woodfrog.operations.fault_points import PHASES, fault_points

# Two rounds, so that each phase meets each kind of failure.
ROUNDS = {"error and time-out": ("error", "timeout"), "full disk and error": ("enospc", "error")}


@pytest.mark.parametrize("way", WAYS)
def test_no_failure_of_any_phase_costs_the_target(
    make_product: Callable[..., Product], tmp_path: Path, way: str
) -> None:
    side_by_side(
        {
            name: partial(
                walk, make_product, tmp_path / name.replace(" ", "-"), way, points(way, before, after, _reached(way))
            )
            for name, (before, after) in ROUNDS.items()
        }
    )


@pytest.fixture
def patient_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that starts a daemon again at once, as often as a walk kills one: else it waits longer each time, and a
    minute after the fifth (tests/unit/native/test_keeper.py)."""
    script = tmp_path / "keeper"
    script.write_text(f'#!/bin/sh\nexec {paths.keeper()} --restart-window 0 "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(paths, "keeper", lambda: script)


@pytest.mark.usefixtures("patient_keeper")
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_killed_in_any_phase_costs_nothing(
    make_product: Callable[..., Product], tmp_path: Path, way: str
) -> None:
    reached = _reached(way)
    half = -(-len(reached) // 2)
    groups = [group for group in (reached[:half], reached[half:]) if group]
    side_by_side(
        {
            f"{phases[0]} to {phases[-1]}": partial(
                walk, make_product, tmp_path / phases[0], way, points(way, "kill", "kill", phases)
            )
            for phases in groups
        }
    )


def _reached(way: str) -> tuple[str, ...]:
    # Only with --verify and --hook: tests of their own.
    return tuple(phase for phase in WAYS[way][1] if phase not in ("verify", "hook"))


def walk(make_product: Callable[..., Product], folder: Path, way: str, faults: list, **more: str) -> None:  # type: ignore[type-arg]
    """One walk from beginning to end, with a product of its own that is gone afterwards."""
    folder.mkdir()
    state = folder / "fired"
    product = make_product(environment={**environment(faults, state), **more})
    try:
        walker = Walker(product, faults, state)
        walker.walk(way)
        walker.finish()
    finally:
        product.close()


def test_a_phase_that_hangs_is_ended_by_its_limit(make_product: Callable[..., Product], tmp_path: Path) -> None:
    side_by_side(
        {
            phase: partial(
                walk,
                make_product,
                tmp_path / phase,
                "checkpoint",
                points("checkpoint", "hang", "hang", [phase]),
                WOODFROG_PHASE_LIMIT_S="1.5",
            )
            for phase in ("quiesce", "hash", "drain", "cpu", "write", "commit")
        }
    )


@pytest.mark.parametrize("way", ["checkpoint", "checkpoint and stop"])
def test_whatever_happens_while_criu_waits_for_the_pages_to_be_copied_costs_nothing(
    make_product: Callable[..., Product], tmp_path: Path, way: str
) -> None:
    side_by_side(
        {
            action: partial(
                walk, make_product, tmp_path / action, way, [Point(FROZEN, action)], **{CRIU_PAGES: "threads"}, **more
            )
            for action, more in (
                ("error", {}),
                ("enospc", {}),
                ("kill", {}),
                ("hang", {"WOODFROG_PHASE_LIMIT_S": "1.5"}),
            )
        }
    )


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
    product = make_product(environment={"WOODFROG_FAULTS_TRACE": str(trace), "WOODFROG_SIMGPU_DEVICES": "2"})
    target = product.run()
    image = product.checkpoint(target, stop=way != "checkpoint")["image"]
    if way != "checkpoint":
        product.restore(image, target.log, verify=True, mode="mapped", wait=True, hook="true")
        image = product.checkpoint(target, stop=True)["image"]
        product.call("standby", image=image, store=str(product.store_path), hold="device", hook="true")
        product.restore(image, target.log, verify=True, hook="true")
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        product.call("suspend", target=target.pid)
        product.call("switch", **{"out": product.run().pid, "in": target.pid})
        product.call("migrate", target=target.pid, gpu_map={"0": "1"}, precopy=True)
    apart = ("store.", "precopy.", "promote.batch.", "cpu.")
    passed = {line for line in trace.read_text().splitlines() if not line.startswith(apart)}
    wanted = {point for point in fault_points("checkpoint") if point.split(".")[1] in WAYS[way][1]}
    if way != "checkpoint":
        wanted |= {point for operation in PHASES if operation != "checkpoint" for point in fault_points(operation)}
    assert passed == wanted
