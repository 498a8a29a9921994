"""Places for stores: one of each tier, made anew for each test. The S3 server runs once a session."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import file_ways
from s3_server import S3Server
from store_places import Place

from woodfrog.store.store import Store
from woodfrog.store.tiers.ram import SHARED_MEMORY

TIERS = ("disk", "disk by threads", "ram", "s3")  # `disk` by io_uring


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def make_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Place]]:
    """Makes a new place of that tier at each call."""
    made: list[Place] = []
    memory: list[Path] = []

    def make(tier: str) -> Place:
        token = secrets.token_hex(6)
        if tier == "s3":
            for name, value in request.getfixturevalue("s3_server").environment().items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            place = Place(f"s3://stores/{token}/deep")
        elif tier == "ram":
            place = Place(f"ram:test-{token}")
            memory.append(SHARED_MEMORY / f"woodfrog-{os.geteuid()}" / f"test-{token}")
        else:
            assert tier.startswith("disk"), tier
            place = Place(str(tmp_path / f"store-{token}"))
        made.append(place)
        return place

    yield make
    for place in made:
        place.close()
    for path in memory:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=TIERS)
def place(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Iterator[Place]:
    ways = {"disk": "uring", "disk by threads": "threads"}
    with contextlib.ExitStack() as stack:
        if request.param in ways:
            stack.enter_context(file_ways.chosen(ways[request.param]))
        yield make_place(request.param)


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()
