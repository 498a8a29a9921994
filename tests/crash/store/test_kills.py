"""kill -9 at moments that nobody chose, in the middle of whatever a store can do: no committed image is ever hurt.

WOODFROG_CRASH_ROUNDS says how many times each; a few by default, hundreds before a release.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import file_ways
import pytest
import store_images
from crash_rounds import Rounds
from failing_proxy import FailingProxy
from s3_server import S3Server
from store_images import CHUNK_BYTES

from woodfrog.store.open import open_store
from woodfrog.store.packing import PACKS_ON_THE_WAY

WRITER = Path(__file__).resolve().parents[2] / "support" / "s3_writer.py"

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


@pytest.mark.parametrize("action", ["commit", "push"])
def test_what_a_killed_writer_has_sent_to_s3_is_not_sent_again(
    store_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """The bytes of all requests are counted between the writer and a real server. Killed after every third pack, the
    image is there in the end, and no more was sent in vain than the packs on their way at each kill."""
    size, pack = 48 << 20, 4 << 20
    for name, value in store_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"s3://stores/{secrets.token_hex(6)}"
    source = str(tmp_path / "source")
    with open_store(source, chunk_bytes=CHUNK_BYTES) as store:
        store_images.write(store, store_images.pattern(size, "large"))
    proxy = FailingProxy(store_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    writer = [sys.executable, str(WRITER), action, url, str(pack), str(size), source]

    def packs_that_count() -> int:
        """Those that an index names."""
        return sum(1 for method, path, _ in proxy.passed if method == "PUT" and "/index/" in path)

    kills = 0
    try:
        while True:
            before = packs_that_count()
            process = subprocess.Popen(writer)
            while process.poll() is None and packs_that_count() < before + 3:
                time.sleep(0.001)
            if process.poll() is not None:
                break
            process.kill()
            assert process.wait() == -signal.SIGKILL
            kills += 1
            assert kills < 20, "it gets nowhere"
        assert process.returncode == 0
        sent = sum(length for method, path, length in proxy.passed if method == "PUT" and "/packs/" in path)
    finally:
        proxy.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_server.endpoint)
    assert kills >= 2
    assert size <= sent <= size * 1.02 + kills * PACKS_ON_THE_WAY * pack
    with open_store(url, chunk_bytes=CHUNK_BYTES) as store:
        assert store_images.references(store) == ["small@1"]
        assert store_images.read(store, "small@1") == store_images.pattern(size, "large")
        assert store.verify(store_images.digests) == []
    print(f"{action}: {kills} kills, {sent / size:.2f} of the image's bytes sent")
