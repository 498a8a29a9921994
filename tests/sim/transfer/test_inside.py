"""Runs the files of the folder inside/ in processes of their own that see a simulated GPU with two devices.

On a machine with a GPU (two, for some) the same files run against the real driver:
`python -m pytest --import-mode=importlib tests/sim/transfer/inside/check_*.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from woodfrog._native import paths

FILES = sorted((Path(__file__).resolve().parent / "inside").glob("check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_transfer_engine_keeps_what_these_checks_promise(file: Path) -> None:
    assert (paths.simgpu_dir() / "libcuda.so.1").exists(), "the simulated driver was not built"
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(paths.simgpu_dir()),
        "WOODFROG_SIMGPU_MACHINE": f"transfer-{uuid.uuid4().hex[:12]}",
        "WOODFROG_SIMGPU_MEMORY": "512MiB",
        "WOODFROG_SIMGPU_DEVICES": "2",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-o",
        "addopts=",
        str(file),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
