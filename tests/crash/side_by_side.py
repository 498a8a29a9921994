"""Several walks at once: most of a walk waits for a daemon to start, for CRIU, for a disk.

Each walk has a daemon, a GPU and a store of its own. It must never hide a failure: all walks are finished, the first
failure is raised, the others are printed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = max(2, os.cpu_count() or 2)


def side_by_side(walks: Mapping[str, Callable[[], None]]) -> None:
    """Run all of these, by name, some at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {name: pool.submit(walk) for name, walk in walks.items()}
    failures = {name: failure for name, one in running.items() if (failure := one.exception()) is not None}
    for name, failure in failures.items():
        print(f"── {name}")
        traceback.print_exception(failure)
    if failures:
        name, first = next(iter(failures.items()))
        raise AssertionError(f"{len(failures)} of {len(walks)} walks failed, the first: {name}") from first
