"""The driver's checkpoint around a real CRIU dump and restore: the target is gone in between and goes on afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated import CHECKPOINTED, SUCCESS, Controller, Machine, free_mib

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 120


def find_criu() -> Path | None:
    """The one that scripts/get-criu.sh provides, or one that CRIU names, or the system's."""
    candidates = [os.environ.get("CRIU"), str(REPOSITORY / ".prefix/criu/bin/criu"), shutil.which("criu")]
    return next((Path(path) for path in candidates if path and Path(path).exists()), None)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.02)


def run_criu(criu: Path, folder: Path, *arguments: str) -> None:
    log = folder / f"{arguments[0]}.log"
    command = [criu, *arguments, "-D", folder, "-o", log.name, "-v4", "--libdir", folder / "no-plugins"]
    command += ["--file-locks", "--link-remap", "--ext-unix-sk", "--tcp-close"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + "".join(log.read_text(errors="replace").splitlines(True)[-25:])


@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
def test_a_target_saved_and_killed_by_criu_goes_on_where_it_was(
    machine: Machine, compiled: Callable[[str], Path], tmp_path: Path
) -> None:
    criu = find_criu()
    if criu is None:
        pytest.skip("no CRIU: run scripts/get-criu.sh")
    images, output, stop = tmp_path / "images", tmp_path / "output", tmp_path / "stop"
    images.mkdir()
    (images / "no-plugins").mkdir()
    with output.open("w") as stream, open(os.devnull) as nothing:
        process = subprocess.Popen(
            [compiled("multistream"), stop],
            env=dict(machine.environment),
            stdin=nothing,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )

    def steps() -> int:
        lines = output.read_text().splitlines()
        return int(lines[-1].split()[1]) if lines else 0

    control = Controller(machine)
    try:
        wait_for(lambda: steps() > 5, "progress")
        for _ in range(2):  # what was restored can be saved again
            assert control("lock", process.pid, 30000) == SUCCESS
            assert control("checkpoint", process.pid) == SUCCESS
            run_criu(criu, images, "dump", "-t", str(process.pid))
            process.wait()  # returns at once for one that CRIU restored: init reaps that
            wait_for(lambda: not Path(f"/proc/{process.pid}").exists(), "end of the target")
            assert free_mib(machine) == 256
            before = steps()
            run_criu(criu, images, "restore", "--restore-detached")
            assert control.state(process.pid) == CHECKPOINTED
            assert control("restore", process.pid) == SUCCESS
            assert control("unlock", process.pid) == SUCCESS
            wait_for(lambda: steps() > before + 5, "progress after the restore")  # noqa: B023
        stop.touch()
        wait_for(lambda: "done" in output.read_text(), "last line")
        assert output.read_text().splitlines()[-1].endswith("errors 0")
    finally:
        control.close()
        stop.touch()
        if Path(f"/proc/{process.pid}").exists():
            subprocess.run(["kill", "-9", str(process.pid)], check=False)
