"""Each named point of a commit, a prune, a copy and a repair, with the process killed right there, and once more with
an error: what is left is always a store with nothing but whole images."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_rounds import Rounds

POINTS = {
    "write": [
        "store.session.begin",
        "store.pack.written",
        "store.packs.synced",
        "store.packs.durable",
        "store.index.durable",
        "store.put.written",
        "store.put.named",
        "store.commit.begin",
        "store.commit.flushed",
        "store.commit.manifest_made",
        "store.commit.published",
    ],
    "prune": [
        "store.remove.marked",
        "store.remove.deleted",
        "store.prune.locked",
        "store.prune.dead_deleted",
        "store.prune.rewritten",
        "store.prune.rewritten_indexed",
        "store.prune.old_deleted",
        "store.prune.index_durable",
        "store.prune.old_indexes_deleted",
    ],
    "copy": ["store.copy.located", "store.copy.flushed", "store.copy.chunks"],
    "lose": [
        "store.repair.locked",
        "store.repair.salvaged",
        "store.repair.index_durable",
        "store.repair.old_indexes_deleted",
        "store.repair.damaged_deleted",
    ],
}
SEED = 5


def prepared(make_rounds: Callable[[str], Rounds]) -> Rounds:
    rounds = make_rounds("disk")
    for seed in (1, 2):
        assert rounds.run("write", seed) == 0, rounds.errors()
    return rounds


@pytest.mark.parametrize("action", POINTS)
def test_these_are_the_points_that_it_passes(make_rounds: Callable[[str], Rounds], tmp_path: Path, action: str) -> None:
    rounds = prepared(make_rounds)
    trace = tmp_path / "trace"
    assert rounds.run(action, SEED, WOODFROG_FAULTS_TRACE=str(trace)) == 0, rounds.errors()
    passed = set(trace.read_text().split())
    others = {point for points in POINTS.values() for point in points}
    assert set(POINTS[action]) <= passed <= others


@pytest.mark.parametrize("action", POINTS)
def test_a_process_killed_at_a_point_hurts_no_image(make_rounds: Callable[[str], Rounds], action: str) -> None:
    rounds = prepared(make_rounds)
    for number, point in enumerate(POINTS[action]):
        status = rounds.run(action, SEED + number, WOODFROG_FAULTS=f"{point}:kill")
        assert status == -signal.SIGKILL, f"{point} was not passed: {rounds.errors()}"
        rounds.check()
        # What is left can be worked with.
        assert rounds.run("write", 100 + number) == 0, rounds.errors()
    assert rounds.run("prune", SEED) == 0, rounds.errors()
    rounds.check()


@pytest.mark.parametrize("fault", ["error", "enospc"])
@pytest.mark.parametrize("action", POINTS)
def test_a_failure_at_a_point_is_told_and_hurts_no_image(
    make_rounds: Callable[[str], Rounds], action: str, fault: str
) -> None:
    rounds = prepared(make_rounds)
    for number, point in enumerate(POINTS[action]):
        status = rounds.run(action, SEED + number, WOODFROG_FAULTS=f"{point}:{fault}")
        assert status == 3, f"{point}: {rounds.errors()}"
    rounds.check()
    assert rounds.run("prune", SEED) == 0, rounds.errors()
    rounds.check()
