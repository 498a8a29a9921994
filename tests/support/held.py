"""A checkpoint that is held at a fault point until the test has done what it wants to do at that very moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Holds:
    """Fault points at which a daemon waits, by named pipes in `folder`."""

    def __init__(self, folder: Path, *points: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.points = points

    @property
    def environment(self) -> dict[str, str]:
        """Of the daemon."""
        faults = ",".join(f"{point}:hold" for point in self.points)
        return {"WOODFROG_FAULTS": faults, "WOODFROG_FAULTS_STATE": str(self.folder)}

    @contextmanager
    def at(self, point: str, work: Callable[[], Any]) -> Iterator[Future[Any]]:
        """The body runs while `work`, on a thread, has the daemon standing at `point`; then that goes on. Whatever
        `work` raises is raised at the end, or at once when it fails before that point."""
        pipe = self.folder / point
        os.mkfifo(pipe)

        def working() -> Any:
            try:
                return work()
            finally:
                with suppress(FileNotFoundError):  # it was there, and has gone on
                    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))

        with ThreadPoolExecutor(1, thread_name_prefix="held") as pool:
            future = pool.submit(working)
            end = os.open(pipe, os.O_WRONLY)  # returns once the daemon stands there, or `work` has failed
            try:
                if future.done():
                    future.result()
                yield future
            finally:
                pipe.unlink()
                os.close(end)
            future.result()
