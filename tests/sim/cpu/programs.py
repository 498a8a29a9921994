"""Test programs that run, count into a log, and are cleaned up with everything they started."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from woodfrog.cpu import processes
from woodfrog.cpu.criu import Criu, Dumped, Restored
from woodfrog.errors import NoSpaceError, TargetState, TimeoutExceededError
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.target.process import ProcessTree

_PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition of another process; there is nothing to wait on for a line in its log."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"did not happen within {_PATIENCE_S:g} s: {what}")
        time.sleep(0.005)


Start = Callable[..., "Program"]


@dataclass
class Program:
    """A running test program whose log has one number a line, counting up."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def numbers(self) -> list[int]:
        """Complete lines of the log."""
        text = self.log.read_text()
        return [int(line) for line in text[: text.rfind("\n") + 1].split()]

    def wait_for_more(self, than: int) -> None:
        wait_until(lambda: bool(self.numbers()) and self.numbers()[-1] > than, f"a number above {than} in {self.log}")

    def grow(self) -> None:
        """Of one that is `growing`: returns when it has."""
        (self.directory / "grow").touch()
        wait_until((self.directory / "grown").exists, "the program's growth")

    def tracer(self) -> int:
        """The process that traces it; 0: none."""
        with ProcessTree(self.pid) as tree:
            return tree.root.tracer_pid

    def kill_all(self) -> None:
        """End the original with its children, which are in its session, and reap them."""
        kill_session(self.pid)
        self.process.wait()
        reap_session(self.pid)


def session_members(session: int) -> list[int]:
    """Processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    """End all at once: one that saw another end first would say so in its log."""
    members = session_members(session)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in members:
            os.kill(pid, number)


def reap_session(session: int) -> None:
    """Reap children of this process that belonged to an original's session (orphans come here: we are a subreaper)."""
    wait_until(lambda: not session_members(session), f"the end of session {session}")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and int(fields[1]) == os.getpid():
                os.waitpid(int(entry.name), 0)


_COUNT = """
import os, sys, time
n = 0
def count(check):
    global n
    while check():
        n += 1
        print(n, flush=True)
        time.sleep(0.002)
"""
_OVER = "print('what it looks at is not what it was', flush=True)\n"


def counting(check: str = "True") -> str:
    """A program, or the end of one, that counts as long as `check` is true."""
    return f"{_COUNT}count(lambda: {check})\n{_OVER}"


def growing(grow: str, check: str = "True") -> str:
    """A program that counts, does `grow` once it is told to (`Program.grow`), and counts on while `check` is true."""
    until_told = "count(lambda: not os.path.exists('grow'))\n"
    return f"{_COUNT}{until_told}{grow}open('grown', 'w').close()\ncount(lambda: {check})\n{_OVER}"


COUNTER = counting()


def end(restored: Restored) -> None:
    """Kill a restored tree and wait until none of its numbers is in use: zombies would keep theirs."""
    kill_session(restored.tasks[0].session_id)
    wait_until(
        lambda: not any(Path(f"/proc/{task.pid}").exists() for task in restored.tasks), f"the end of {restored.pid}"
    )


def assert_gapless(program: Program) -> None:
    """Every number once, in order: nothing that the program did was lost or done twice."""
    numbers = program.numbers()
    assert numbers == list(range(1, len(numbers) + 1))


def dump_and_end(criu: Criu, program: Program, directory: Path) -> Dumped:
    """An image there of a program that is no more."""
    dumped = criu.dump(program.pid, directory, leave_running=False)
    program.kill_all()
    return dumped


def time_out_anywhere(
    program: Program, dump: Callable[[bool, float], None], *, seed: int, attempts: int, longest_s: float
) -> None:
    """dump(leave_running, timeout_s) with time-outs that come wherever it is: some must do, and the program runs on."""
    moments = random.Random(seed)
    timed_out = killed = 0
    for attempt in range(attempts):
        leave_running = bool(attempt % 2)
        try:
            dump(leave_running, moments.uniform(0.01, longest_s))
        except TimeoutExceededError as failure:
            killed += "killed" in failure.advice
            timed_out += 1
        else:
            if not leave_running:
                processes.resume(program.pid)
        program.wait_for_more(program.numbers()[-1] + 5)
    assert timed_out >= attempts // 6
    assert killed == 0
    assert_gapless(program)


@contextmanager
def outgrowing(folder: MemoryFolder, program: Program) -> Iterator[pytest.ExceptionInfo[NoSpaceError]]:
    """The body dumps `program` into a folder that is too small for it; it is told so, and runs on."""
    with pytest.raises(NoSpaceError, match=r"outgrew the 0\.1 GB of memory") as caught, folder.told():
        yield caught
    assert caught.value.target_state == TargetState.RUNNING
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)
