"""The daemon killed at moments that nobody chose: inside phases, not only between them."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from product import Product

sys.path.insert(0, str(Path(__file__).resolve().parent))

from side_by_side import side_by_side
from walking import Walker

from woodfrog.errors import NoDaemonError, WoodfrogError

KILLS = 4  # the keeper starts a daemon five times a minute
SEEDS = 2
LONGEST_S = {"checkpoint": 0.8, "checkpoint and stop": 0.9, "suspend": 0.25, "resume": 0.25, "restore": 0.6}


@pytest.mark.parametrize("way", LONGEST_S)
def test_a_daemon_killed_at_any_moment_costs_nothing(make_product: Callable[..., Product], way: str) -> None:
    walks = {f"seed {seed}": partial(kill_at_random, make_product, way, seed) for seed in range(SEEDS)}
    side_by_side({**walks, "again while it recovers": partial(kill_twice, make_product, way)})


def kill_at_random(make_product: Callable[..., Product], way: str, seed: int) -> None:
    random_ = random.Random(f"{way} {seed}")
    walker = Walker(make_product(), [], Path())
    walker.prepare(way)
    for _ in range(KILLS):
        daemon = walker.product.daemon_pid()
        walker.make_ready(way)
        killer = threading.Timer(random_.uniform(0.0, LONGEST_S[way]), os.kill, (daemon, signal.SIGKILL))
        killer.start()
        attempt(walker, way, daemon, killer)
    walker.finish()
    walker.product.close()


def kill_twice(make_product: Callable[..., Product], way: str) -> None:
    random_ = random.Random(f"{way} twice")
    walker = Walker(make_product(), [], Path())
    walker.prepare(way)
    for _ in range(KILLS // 2):
        daemon = walker.product.daemon_pid()
        walker.make_ready(way)
        first_s = random_.uniform(0.05, LONGEST_S[way])
        first = threading.Timer(first_s, os.kill, (daemon, signal.SIGKILL))
        # A daemon needs about half a second until it recovers what it finds.
        second = threading.Timer(first_s + random_.uniform(0.4, 1.4), walker.product.kill_whatever_daemon)
        first.start()
        second.start()
        attempt(walker, way, daemon, first, second)
    walker.finish()
    walker.product.close()


def attempt(walker: Walker, way: str, daemon: int, *killers: threading.Timer) -> None:
    """The operation once, under these; then the promise is checked."""
    failure: WoodfrogError | None = None
    try:
        walker.attempt(way)
    except NoDaemonError as lost:
        failure = lost
    finally:
        for killer in killers:
            killer.join()
    walker.product.wait_for_new_daemon(daemon)
    walker.check(way, failure)
