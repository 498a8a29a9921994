"""Processes whose kernels wait for each other come to rest at any moment, and nothing is lost by it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import interposer_support as support
import pytest
from interposer_agents import Listener
from product import Stepper, build_targets
from sharing_job import Agents

from woodfrog.errors import TimeoutExceededError
from woodfrog.operations.context import Context
from woodfrog.operations.cut import CutStats, come_to_rest
from woodfrog.operations.members import Member
from woodfrog.operations.notes import MemberNote

CUTS = int(os.environ.get("WOODFROG_TEST_CUTS", "1000"))  # in all
FAR_CUTS = CUTS // 10  # of them those with a rank that is far behind, which take ten times as long
MOST_STEPS_ALONE = 200  # a step of the collective's has fewer launches
WAYS = [(2, ()), (3, ()), (2, ("graph",)), (2, ("pace-us", "0")), (3, ("fill", "50"))]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_targets(tmp_path_factory)


class Ranks:
    """A collective target's ranks, through their agents."""

    def __init__(self, process: Stepper, listener: Listener, ranks: int) -> None:
        self.process = process
        self._agents = Agents(listener)
        for _ in range(ranks):
            link = listener.accept()
            self._agents._links[link.pid] = link
        context = cast(Context, SimpleNamespace(agents=self._agents))
        identities = [link.identity for link in self._agents._links.values()]
        self.members = [
            Member(context, number, MemberNote(one.pid, one.start_ticks)) for number, one in enumerate(identities)
        ]

    def rest(self, timeout_s: float = 90.0) -> CutStats:
        return come_to_rest(self.members, 1, timeout_s)

    def let_on_until_it_waits(self) -> bool:
        """Of one rank: it does what it can without the others, step by step, until its GPU waits for them. False: it
        stays idle, since it waits for them on the processor's side."""
        (member,) = self.members
        return any(not member.link().hold(1, 2.0, admit=1).idle for _ in range(MOST_STEPS_ALONE))

    def go_on(self) -> None:
        for member in self.members:
            if member.link().state != "running":
                member.link().resume()


@contextmanager
def collective(targets: Path, listener: Listener, tmp_path: Path, ranks: int, *options: str) -> Iterator[Ranks]:
    log = tmp_path / "log"
    environment = support.environment(
        {"WOODFROG_RUNTIME_DIR": str(tmp_path), "WOODFROG_SIMGPU_MACHINE": f"cut-{os.getpid()}-{tmp_path.name}"}
    )
    command = [str(targets / "collective"), str(targets / "collective.ptx"), str(ranks), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        stepper = Stepper(process.pid, log, process)
        stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        yield Ranks(stepper, listener, ranks)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(("ranks", "options"), WAYS, ids=["two", "three", "graph", "unpaced", "far"])
def test_no_cut_hangs_or_loses_an_update(
    targets: Path, listener: Listener, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    randoms = random.Random(len(options) * 8 + ranks)
    steps = submitted = rounds = 0
    cuts = FAR_CUTS if "fill" in options else (CUTS - FAR_CUTS) // (len(WAYS) - 1)
    with collective(targets, listener, tmp_path, ranks, *options) as job:
        for _ in range(cuts):
            time.sleep(randoms.uniform(0.0, 0.02))  # the moment of the cut is what varies, not what is waited for
            stats = job.rest()
            steps, submitted, rounds = steps + stats.steps, submitted + stats.submitted, rounds + stats.rounds
            before = [member.link().survey().launches for member in job.members]
            assert before == [member.link().survey().launches for member in job.members]
            job.go_on()
        job.process.finish()
    if "fill" in options:
        assert rounds < steps, "a rank that is far behind takes several steps at once"
    print(f"{cuts} cuts took {steps} steps in {rounds} rounds, {submitted} of which gave a GPU work")


def test_a_cut_that_cannot_end_is_undone(targets: Path, listener: Listener, tmp_path: Path) -> None:
    with collective(targets, listener, tmp_path, 2) as job:
        # The second rank's work is what the first one's waits for, and it stays where it is.
        lone = Ranks.__new__(Ranks)
        lone.process, lone._agents, lone.members = job.process, job._agents, job.members[:1]
        os.kill(job.members[1].pid, signal.SIGSTOP)
        while not lone.let_on_until_it_waits():  # the second one was stopped where the first one's socket waits for it
            lone.go_on()
            os.kill(job.members[1].pid, signal.SIGCONT)
            job.process.wait_steps(1)
            os.kill(job.members[1].pid, signal.SIGSTOP)
        with pytest.raises(TimeoutExceededError):
            lone.rest(0.5)
        lone.go_on()
        os.kill(job.members[1].pid, signal.SIGCONT)
        job.process.finish()
