"""Runs the files of the folder inside/, which test the driver from within a process that uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulated import Machine

FILES = sorted((Path(__file__).resolve().parent / "inside").glob("check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_driver_keeps_what_these_checks_promise(machine: Machine, file: Path) -> None:
    done = machine.with_environment(WOODFROG_SIMGPU_DEVICES="2").run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", file], timeout_s=240
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
