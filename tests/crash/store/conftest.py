"""Worker processes that are killed, on a disk and on a real S3 server."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from crash_rounds import Rounds
from s3_server import S3Server

from woodfrog.store.tiers.ram import SHARED_MEMORY


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: syncing costs nothing there, and it is not the disk that is tried here."""
    path = Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix="woodfrog-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_rounds(
    request: pytest.FixtureRequest, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Rounds]]:
    """For two stores on a "disk" (in memory), or "s3": then the one that is copied to is on a server."""
    made: list[Rounds] = []

    def make(tier: str) -> Rounds:
        directory = memory / secrets.token_hex(4)
        directory.mkdir()
        if tier == "s3":
            for name, value in request.getfixturevalue("store_server").environment().items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
            made.append(Rounds(directory, other=f"s3://stores/{secrets.token_hex(6)}"))
        else:
            made.append(Rounds(directory))
        return made[-1]

    yield make
    for rounds in made:
        rounds.close()
