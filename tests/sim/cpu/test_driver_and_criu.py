"""The driver's checkpoint and CRIU together, on the simulated GPU, without the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from woodfrog._native import paths


def run(script: str, directory: Path) -> dict[str, Any]:
    """A script in a process of its own, since the driver library is chosen when a process starts."""
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), str(directory)],
        env={**os.environ, "LD_LIBRARY_PATH": str(paths.simgpu_dir())},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def test_gpu_memory_and_process_come_back_together_round_after_round(tmp_path: Path) -> None:
    result = run("driver_cycle.py", tmp_path)
    assert result["simulated"]
    assert result["states_right"]
    assert result["gapless"]
    assert result["count"] > 40
    assert result["gpus"] >= 1


def test_memory_handed_over_by_the_interposer_comes_back_into_a_restored_process(tmp_path: Path) -> None:
    result = run("agent_cycle.py", tmp_path)
    assert result["name"] == "counter"
    assert result["states"] == ["released"] * 3
    assert result["handles"] >= 1
    assert result["gapless"]
    assert result["count"] > 40
