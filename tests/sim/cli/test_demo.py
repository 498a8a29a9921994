"""`woodfrog demo`: a newcomer's first command works, proves its point, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its directory, so that what it leaves can be seen; short, for the sockets' sake."""
    with tempfile.TemporaryDirectory(prefix="wfd-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "woodfrog", "demo", "--simulated", *arguments]


def processes_below(directory: Path) -> list[str]:
    """Command lines of processes whose environment names the directory: the demo's daemon, keeper and targets."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if f"WOODFROG_RUNTIME_DIR={directory}".encode() in environment:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # ended meanwhile, or not ours
    return found


def test_the_demo_ends_with_identical_bytes_within_a_minute_and_leaves_nothing(private_tmp: Path) -> None:
    finished = subprocess.run(demo(), capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    last = json.loads(finished.stdout.splitlines()[-1])
    assert last["identical"] is True
    assert last["simulated"] is True
    assert last["gone_while_frozen"] is True
    assert last["verified"] is True
    assert 80 <= last["frozen_at_step"] < 200
    assert last["result_bytes"] > 0
    for phase in ("quiesce", "handover", "control", "cpu", "drain", "commit", "refill", "return"):
        assert phase in finished.stdout
    assert list(private_tmp.glob("woodfrog-demo-*")) == []
    assert processes_below(private_tmp) == []


def test_an_interrupted_demo_leaves_nothing_either(private_tmp: Path) -> None:
    running = subprocess.Popen(demo(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert running.stdout is not None
    try:
        while not running.stdout.readline().startswith("2. "):
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=120)
        assert running.returncode == 130
    finally:
        running.kill()
        running.wait()
    assert list(private_tmp.glob("woodfrog-demo-*")) == []
    assert processes_below(private_tmp) == []


def test_a_demo_that_fails_in_the_middle_says_why_and_leaves_nothing(private_tmp: Path) -> None:
    environment = {**os.environ, "WOODFROG_FAULTS": "checkpoint.commit.before:error"}
    finished = subprocess.run(demo("--json"), capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert finished.returncode == 1, finished.stdout
    told = json.loads(finished.stdout)
    assert "checkpoint.commit.before" in told["reason"]
    assert told["target_state"] == "running"
    assert list(private_tmp.glob("woodfrog-demo-*")) == []
    assert processes_below(private_tmp) == []
