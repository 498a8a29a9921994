"""kill -9 at moments that nobody chose, in the middle of whatever a store can do: no committed image is ever hurt.

WOODFROG_CRASH_ROUNDS says how many times each; a few by default, hundreds before a release.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import file_ways
import pytest
from crash_rounds import Rounds

ROUNDS = int(os.environ.get("WOODFROG_CRASH_ROUNDS", "3"))
LONGEST_S = 0.4  # about what an order takes on an idle machine


def kill_some(rounds: Rounds, pids: list[int], chosen: random.Random) -> list[int]:
    """Lets them work for a random while, then kills them in a random order; their exit statuses."""
    time.sleep(chosen.uniform(0, LONGEST_S))  # the moment is the point
    chosen.shuffle(pids)
    return [rounds.end(pid, kill=True) for pid in pids]


def assert_orderly(rounds: Rounds, statuses: list[int]) -> None:
    """Killed, finished, or refused in a sentence; never a traceback."""
    assert set(statuses) <= {0, 3, -signal.SIGKILL}, rounds.errors()


@pytest.mark.parametrize("action", ["write", "prune", "copy", "repair", "lose"])
def test_a_process_killed_at_any_moment_hurts_no_image(make_rounds: Callable[[str], Rounds], action: str) -> None:
    rounds = make_rounds("disk")
    chosen = random.Random(action)
    for number in range(ROUNDS):
        assert rounds.run("write", chosen.randrange(1 << 30)) == 0, rounds.errors()
        pid = rounds.begin(action, chosen.randrange(1 << 30))
        assert_orderly(rounds, kill_some(rounds, [pid], chosen))
        rounds.check()
        if number % 4 == 2:
            assert rounds.run("prune", chosen.randrange(1 << 30)) == 0, rounds.errors()
            rounds.check()
    assert rounds.images_checked >= ROUNDS


@pytest.mark.parametrize("way", file_ways.WAYS)
def test_a_writer_killed_with_writes_in_flight_hurts_no_image(tmp_path: Path, way: str) -> None:
    """On a disk, where there is something to be in flight; the other rounds are in memory."""
    with file_ways.chosen(way):  # skips where the kernel has no ring for us
        rounds = Rounds(tmp_path)
    chosen = random.Random(way)
    try:
        for _ in range(ROUNDS):
            pid = rounds.begin("write", chosen.randrange(1 << 30), WOODFROG_FILE_IO=way)
            assert_orderly(rounds, kill_some(rounds, [pid], chosen))
            rounds.check()
        assert rounds.run("write", 1, WOODFROG_FILE_IO=way) == 0, rounds.errors()
        rounds.check()
    finally:
        rounds.close()
    assert rounds.images_checked > 0


def test_two_writers_and_a_pruner_killed_at_any_moment_hurt_no_image(make_rounds: Callable[[str], Rounds]) -> None:
    rounds = make_rounds("disk")
    chosen = random.Random("together")
    for _ in range(ROUNDS):
        pids = [rounds.begin(action, chosen.randrange(1 << 30)) for action in ("write", "write", "prune", "copy")]
        assert_orderly(rounds, kill_some(rounds, pids, chosen))
        rounds.check()


def test_two_writers_a_copier_and_a_pruner_end_well_together(make_rounds: Callable[[str], Rounds]) -> None:
    rounds = make_rounds("disk")
    for seed in range(max(1, ROUNDS // 3)):
        orders = ("write", "write", "prune", "copy", "prune")
        pids = [rounds.begin(action, 1000 * seed + number) for number, action in enumerate(orders)]
        assert [rounds.end(pid, kill=False) for pid in pids] == [0] * len(orders), rounds.errors()
        rounds.check()
    assert rounds.images_checked > 0


def test_a_copy_to_s3_killed_at_any_moment_hurts_no_image_on_either_side(make_rounds: Callable[[str], Rounds]) -> None:
    rounds = make_rounds("s3")
    chosen = random.Random("s3")
    for _ in range(max(2, ROUNDS // 3)):
        assert rounds.run("write", chosen.randrange(1 << 30)) == 0, rounds.errors()
        pids = [rounds.begin(action, chosen.randrange(1 << 30)) for action in ("copy", "copy")]
        assert_orderly(rounds, kill_some(rounds, pids, chosen))
        rounds.check()
    assert rounds.run("copy", 1) == 0, rounds.errors()
    rounds.check()
