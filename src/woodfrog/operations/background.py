"""Work that nobody waits for, beside a target that runs on: few processors, and others go first.

Hashing on every processor while a training went on made its steps 0.6 to 0.8 times as fast for as long as an image was
being written (H200, 16 processors, 2026-11-30). That goes for all that is written from when the target runs again, what
streams through the arena while it drains included.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# setpriority(2): a third of the share of those with 0, so that it comes to its end on a busy machine too.
_NICE = 5
_SHARE = 4  # of the processors one in so many


def background_threads() -> int:
    """How many threads such work should have."""
    return max(1, len(os.sched_getaffinity(0)) // _SHARE)


def in_background(work: Callable[[], T]) -> T:
    """What `work` returns or raises. It, and the threads that it starts, run with a lower priority."""
    with ThreadPoolExecutor(1, thread_name_prefix="woodfrog-background", initializer=give_way) as pool:
        return pool.submit(work).result()


def give_way() -> None:
    """The calling thread, and those that it starts from now on, run with a lower priority."""
    # Of this thread alone (0: the caller, and Linux has a priority for each thread), inherited by those that it starts.
    if os.getpriority(os.PRIO_PROCESS, 0) < _NICE:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
