"""The daemon killed at moments that nobody chose: inside phases, not only between them."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product

sys.path.insert(0, str(Path(__file__).resolve().parent))

from walking import WAYS, Walker

from woodfrog.errors import NoDaemonError, WoodfrogError

KILLS = 4  # the keeper starts a daemon five times a minute
LONGEST_S = {"checkpoint": 0.8, "checkpoint and stop": 0.9, "suspend": 0.25, "resume": 0.25, "restore": 0.6}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_killed_at_any_moment_costs_nothing(make_product: Callable[..., Product], way: str, seed: int) -> None:
    random_ = random.Random(f"{way} {seed}")
    walker = Walker(make_product(), [], Path())
    walker.prepare(way)
    for _ in range(KILLS):
        daemon = walker.product.daemon_pid()
        walker.make_ready(way)
        killer = threading.Timer(random_.uniform(0.0, LONGEST_S[way]), os.kill, (daemon, signal.SIGKILL))
        killer.start()
        failure: WoodfrogError | None = None
        try:
            walker.attempt(way)
        except NoDaemonError as lost:
            failure = lost
        finally:
            killer.join()
        walker.product.wait_for_new_daemon(daemon)
        walker.check(way, failure)
    walker.finish()


@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_killed_again_while_it_recovers_costs_nothing(make_product: Callable[..., Product], way: str) -> None:
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
        failure: WoodfrogError | None = None
        try:
            walker.attempt(way)
        except NoDaemonError as lost:
            failure = lost
        finally:
            first.join()
            second.join()
        walker.product.wait_for_new_daemon(daemon)
        walker.check(way, failure)
    walker.finish()
