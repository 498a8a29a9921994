"""What is compiled for tests is compiled once, for all workers of pytest-xdist together.

Their session-scoped fixtures are one a worker: without this each compiles everything by itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of the tests, the same for all of its workers."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def once(made: Path, make: Callable[[], object]) -> Path:
    """`made`, a file or folder that `make` leaves there; called by the first who asks, the others wait for it.

    A `make` that fails leaves no mark, so the next who asks tries again, and fails as well.
    """
    made.parent.mkdir(parents=True, exist_ok=True)
    mark = made.with_name(f"{made.name}.made")
    with open(made.with_name(f"{made.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the descriptor, also when this process is killed
        if not mark.exists():
            make()
            mark.touch()
    return made
