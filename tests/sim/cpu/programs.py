"""Test programs that run, count into a log, and are cleaned up with everything they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from woodfrog.cpu.criu import Restored

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


COUNTER = """
import sys, time
n = 0
while True:
    n += 1
    print(n, flush=True)
    time.sleep(0.002)
"""


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
