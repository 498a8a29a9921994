"""Fixtures of the interposer's tests: compiled test programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import interposer_support as support
from interposer_agents import Listener, Target
from once import session_folder
from product import Stepper
from sharer import Sharer
from sharing_job import Job


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that compiled test programs go to."""
    return session_folder(tmp_path_factory) / "interpose-programs"


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


@pytest.fixture(scope="session")
def sharer_program(programs: Path) -> Path:
    return support.compile_program("../../targets/sharer.cpp", programs)


@pytest.fixture
def make_job(sharer_program: Path, tmp_path: Path, listener: Listener) -> Iterator[Callable[[int], Job]]:
    made: list[Job] = []

    def make(workers: int) -> Job:
        log, orders = tmp_path / f"log-{len(made)}", tmp_path / f"orders-{len(made)}"
        orders.touch()
        environment = support.environment(
            {
                "WOODFROG_RUNTIME_DIR": str(tmp_path),
                "WOODFROG_SIMGPU_MACHINE": f"sharing-{os.getpid()}-{tmp_path.name}-{len(made)}",
            }
        )
        with log.open("wb") as output:
            process = subprocess.Popen([sharer_program, orders, str(workers)], stdout=output, env=environment)
        stepper = Stepper(process.pid, log, process)
        stepper.wait_for(lambda lines: "0 ready" in lines, "ready sharer")
        made.append(Job(Sharer(stepper, orders, workers), listener))
        return made[-1]

    yield make
    for job in made:
        assert job.sharer.process.process is not None
        job.let_go()
        if job.sharer.process.process.poll() is None:
            job.sharer.end()
        job.agents.close()
