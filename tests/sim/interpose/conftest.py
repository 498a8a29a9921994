"""Fixtures of the interposer's tests: compiled test programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import interposer_support as support
from interposer_agents import Listener, Target


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that compiled test programs go to."""
    return tmp_path_factory.mktemp("interpose-programs")


@pytest.fixture(scope="session")
def calls_program(programs: Path) -> Path:
    """programs/calls.cpp, compiled."""
    return support.compile_program("calls.cpp", programs)


@pytest.fixture(scope="session")
def target_program(programs: Path) -> Path:
    """programs/target.cpp, compiled."""
    return support.compile_program("target.cpp", programs)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    """A daemon's socket in a runtime directory of its own."""
    listening = Listener(tmp_path)
    yield listening
    listening.close()


@pytest.fixture
def target(target_program: Path, listener: Listener) -> Iterator[Target]:
    """A target whose agent connects to `listener`; it must end in the ordinary way."""
    with Target(target_program, listener.directory, WOODFROG_NAME="a target") as running:
        yield running
