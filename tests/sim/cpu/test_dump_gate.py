"""A dump that is started before its target may be stopped: CRIU does nothing to it until the gate is opened."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from woodfrog.cpu import gate as gates
from woodfrog.cpu.criu import Criu, Dumped, GateShutError, Restored
from woodfrog.cpu.gate import Gate
from woodfrog.cpu.run import still_running
from woodfrog.errors import TimeoutExceededError, WoodfrogError

from .programs import COUNTER, Program, Start, assert_gapless, wait_until
from .test_gate import gates as waiting


class Dumping:
    """A dump on a thread of its own, held at `gate`."""

    def __init__(
        self, criu: Criu, program: Program, directory: Path, *, timeout_s: float = 60, gate_s: float = 600
    ) -> None:
        self.gate = Gate()
        self.dumped: Dumped | None = None
        self.failure: BaseException | None = None
        self._arguments = (criu, program.pid, directory, timeout_s, gate_s)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: bool(waiting(directory)), "CRIU at its gate")

    def _run(self) -> None:
        criu, pid, directory, timeout_s, gate_s = self._arguments
        try:
            self.dumped = criu.dump(
                pid, directory, leave_running=False, gate=self.gate, timeout_s=timeout_s, gate_s=gate_s
            )
        except BaseException as failure:  # noqa: BLE001 (looked at by the test)
            self.failure = failure

    def end(self) -> None:
        self._thread.join()
        self.gate.close()


def test_the_target_runs_until_the_gate_is_opened_and_what_is_saved_is_of_then(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start()
    dumping = Dumping(criu, program, tmp_path / "image", timeout_s=5)
    at_gate = program.numbers()[-1]
    program.wait_for_more(at_gate + 50)
    assert program.tracer() == 0
    assert list((tmp_path / "image").iterdir()) == []
    dumping.gate.open()
    dumping.end()
    assert dumping.dumped is not None
    last = program.numbers()[-1]
    assert last > at_gate + 50
    assert gates.waited_s((dumping.dumped.directory / "dump.log").read_text()) > 0
    program.kill_all()
    restore(dumping.dumped.directory)
    program.wait_for_more(last + 20)
    assert_gapless(program)


def test_the_time_runs_from_when_the_gate_is_opened(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start("x = bytearray(b'ab' * (50 << 20))\n" + COUNTER)
    dumping = Dumping(criu, program, tmp_path / "image", timeout_s=0.001)
    program.wait_for_more(program.numbers()[-1] + 50)
    assert dumping.failure is None
    dumping.gate.open()
    dumping.end()
    assert isinstance(dumping.failure, TimeoutExceededError)
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


@pytest.mark.parametrize("by", ["its holder", "the time"])
def test_a_gate_that_is_shut_ends_criu_with_nothing_done(criu: Criu, start: Start, tmp_path: Path, by: str) -> None:
    program = start()
    dumping = Dumping(criu, program, tmp_path / "image", gate_s=5 if by == "the time" else 600)
    if by == "its holder":
        dumping.gate.shut()
    dumping.end()
    assert isinstance(dumping.failure, GateShutError)
    assert waiting(tmp_path / "image") == []
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


DUMPS = """
import sys
from pathlib import Path
from woodfrog.cpu.criu import find
from woodfrog.cpu.gate import Gate
find().dump(int(sys.argv[1]), Path(sys.argv[2]), leave_running=False, log_directory=Path(sys.argv[3]), gate=Gate())
"""


def test_criu_ends_by_itself_when_who_has_the_gate_is_killed(start: Start, tmp_path: Path) -> None:
    program = start()
    arguments = [sys.executable, "-c", DUMPS, str(program.pid), str(tmp_path / "image"), str(tmp_path / "logs")]
    with subprocess.Popen(arguments) as dumper:
        wait_until(lambda: bool(waiting(tmp_path / "image")), "CRIU at its gate")
        dumper.kill()
    (work,) = (tmp_path / "logs").glob("criu-*")
    wait_until(lambda: still_running(work) is None, "CRIU's end")
    assert "Pre dump script failed" in (work / "dump.log").read_text()
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


def test_criu_that_ends_before_its_gate_is_told_at_once_and_the_gate_may_be_opened(
    start: Start, tmp_path: Path, criu: Criu
) -> None:
    failing = tmp_path / "criu"
    failing.write_text("#!/bin/sh\necho not here; exit 3\n")
    failing.chmod(0o755)
    program = start()
    gate = Gate()
    with pytest.raises(WoodfrogError, match="CRIU failed: not here"):
        Criu(failing, criu.version).dump(program.pid, tmp_path / "image", leave_running=True, gate=gate)
    assert gate.open(), "whoever would have opened it does not know yet"
    gate.close()
    program.wait_for_more(program.numbers()[-1] + 20)
