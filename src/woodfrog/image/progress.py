"""The native calls' progress as calls of a function, for those who show a bar. Must never outlive its `with`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress

# (bytes done, bytes in all)
OnProgress = Callable[[int, int], None]
INTERVAL_S = 0.1  # ten calls a second move a progress bar smoothly and cost nothing


@contextmanager
def told(on_progress: OnProgress | None, total_bytes: int) -> Iterator[Progress]:
    """A Progress to pass to native calls; `on_progress` hears of it from another thread, and once more at the end.
    `total_bytes` 0: not known, the native calls add to the total as they go."""
    from woodfrog._native import transfer

    progress = transfer.Progress(total_bytes)
    if on_progress is None:
        yield progress
        return
    done = threading.Event()

    def tick() -> None:
        while not done.wait(INTERVAL_S):
            total = total_bytes or progress.bytes_total
            on_progress(min(progress.bytes_done, total), total)

    on_progress(0, total_bytes)
    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield progress
    finally:
        done.set()
        ticker.join()
    total = total_bytes or progress.bytes_total
    on_progress(total, total)
