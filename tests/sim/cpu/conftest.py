"""Real processes for real CRIU: started with a log file, in a session of their own, and always cleaned up.

Where there is no CRIU these tests fail: `make test` brings one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from subreaper import subreaper

from woodfrog.cpu import criu as criu_module
from woodfrog.cpu.criu import Criu, Restored
from woodfrog.operations import room
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.target.reaper import Reaper

from .programs import COUNTER, Program, end, kill_session, reap_session, wait_until


@pytest.fixture(scope="package", autouse=True)
def _surroundings() -> Iterator[None]:
    if os.getsid(0) == 0:
        # Our session began outside of this PID namespace (a container's): CRIU refuses what runs in it, and says so.
        os.setsid()
    with subreaper():
        yield


@pytest.fixture(scope="session")
def criu() -> Criu:
    return criu_module.find()


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as found:
        yield found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """start(code) runs a Python program with its output appended to a log file, as `woodfrog run` does."""
    started: list[Program] = []

    def run(code: str = COUNTER, *, append: bool = True, session: bool = True, wait: bool = True) -> Program:
        directory = tmp_path / f"program{len(started)}"
        directory.mkdir()
        with open(directory / "log", "ab" if append else "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                start_new_session=session,
            )
        program = Program(process, directory)
        started.append(program)
        if wait:
            wait_until(lambda: bool(program.numbers()) or process.poll() is not None, "the program's first line")
            assert process.poll() is None, program.log.read_text()
        return program

    yield run
    for program in started:
        kill_session(program.pid)
        program.process.kill()  # one without a session of its own
        program.process.wait()
        reap_session(program.pid)


@pytest.fixture
def small_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFolder]:
    """For dumps, in memory: as it would be had the target had nothing when it was looked at."""
    monkeypatch.setattr(room, "host_available_bytes", lambda: room.HOST_RESERVE_BYTES)
    folder = MemoryFolder.make(0)
    assert folder is not None
    yield folder
    folder.close()


@pytest.fixture
def restore(criu: Criu, reaper: Reaper, tmp_path: Path) -> Iterator[Callable[[Path], Restored]]:
    """restore(directory) brings a tree back, watched by the reaper; `end` of the result kills and reaps it."""
    alive: list[Restored] = []

    def run(directory: Path) -> Restored:
        restored = criu.restore(directory, log_directory=tmp_path / "restore-logs", timeout_s=60)
        reaper.adopt([task.pid for task in restored.tasks])
        alive.append(restored)
        return restored

    yield run
    for restored in alive:
        end(restored)
