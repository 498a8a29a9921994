"""GPU tests: they need a real NVIDIA GPU, and say so where there is none.

A machine has a GPU if the driver's control device is there. Where it is, nothing is left out: a driver that does not
work then fails the tests. Where it is not, every test here is reported as not run, and a line at the end says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "bench"))  # the targets and the harness that starts them

HERE = Path(__file__).resolve().parent
CONTROL_DEVICE = Path("/dev/nvidiactl")
NOT_RUN = f"not run: this machine has no NVIDIA GPU ({CONTROL_DEVICE} is not there)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test below this folder as one that needs a GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not CONTROL_DEVICE.exists():
                item.add_marker(pytest.mark.skip(reason=NOT_RUN))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in one line how many GPU tests were not run."""
    left_out = [r for r in terminalreporter.stats.get("skipped", []) if NOT_RUN in str(r.longrepr)]
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} GPU tests NOT RUN: this machine has no NVIDIA GPU")


@pytest.fixture(scope="session", autouse=True)
def compiled_targets() -> None:
    """Builds the compiled benchmark targets; a compiler's complaint fails the tests."""
    import subprocess

    built = subprocess.run(
        [str(REPOSITORY / "bench" / "targets" / "build.sh")], capture_output=True, text=True, timeout=280, check=False
    )
    assert built.returncode == 0, built.stderr


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder for the logs of one test."""
    return tmp_path
