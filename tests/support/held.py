"""A checkpoint that is held at a fault point until the test has done what it wants to do at that very moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from product import DEADLINE_S


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
        """The body runs while the daemon, after `work` began on a thread, stands at that point; then that goes on.
        `work` may have returned by then, if what passes the point goes on behind it. Whatever `work` raises is raised
        at the end, or at once when it fails before that point."""
        pipe = self.folder / point
        os.mkfifo(pipe)
        failed, late = threading.Event(), threading.Event()

        def give_up(why: threading.Event) -> None:
            why.set()
            with suppress(FileNotFoundError):  # it was there, and has gone on
                os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))

        def working() -> Any:
            try:
                return work()
            except BaseException:
                give_up(failed)
                raise

        patience = threading.Timer(DEADLINE_S, give_up, (late,))
        with ThreadPoolExecutor(1, thread_name_prefix="held") as pool:
            future = pool.submit(working)
            patience.start()
            end = os.open(pipe, os.O_WRONLY)  # returns once the daemon stands there
            patience.cancel()
            try:
                if failed.is_set():
                    future.result()
                assert not late.is_set(), f"nobody came to {point} within {DEADLINE_S:g} s"
                yield future
            finally:
                pipe.unlink()
                os.close(end)
            future.result()
