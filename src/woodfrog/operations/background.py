"""Work that nobody waits for, beside a target that runs on: few processors, a lower priority, and not on the cores of
the target's busy threads.

Hashing on every processor while a training went on made its steps 0.6 to 0.8 times as fast for as long as an image was
being written (H200, 16 processors, 2026-11-30). That goes for all that is written from when the target runs again, what
streams through the arena while it drains included.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from woodfrog.target import procfs

log = logging.getLogger(__name__)
T = TypeVar("T")

# setpriority(2): a third of the share of those with 0, so that it comes to its end on a busy machine too.
_NICE = 5
_SHARE = 4  # of the processors one in so many
_BUSY = 0.2  # of what the target's busiest thread has run: what runs less waits for others most of the time
_LOOK_EVERY_S = 0.25  # threads stay where they are as long as their processor is free


def background_threads() -> int:
    """How many threads such work should have."""
    return max(1, len(os.sched_getaffinity(0)) // _SHARE)


def give_way() -> None:
    """The calling thread, and those that it starts from now on, run with a lower priority."""
    # Of this thread alone (0: the caller, and Linux has a priority for each thread), inherited by those that it starts.
    if os.getpriority(os.PRIO_PROCESS, 0) < _NICE:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def in_background(work: Callable[[], T], giving_way: Callable[[], None] = give_way) -> T:
    """What `work` returns or raises. It runs in a thread of its own that has called `giving_way` before."""
    with ThreadPoolExecutor(1, thread_name_prefix="woodfrog-background", initializer=giving_way) as pool:
        return pool.submit(work).result()


class Elsewhere:
    """`give_way`, and stay away from the cores that busy threads of these processes are on. To be made while they run,
    and called by a thread that then works, and starts others, beside them: before each piece of work, since their
    threads may move. From any thread."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._all = os.sched_getaffinity(0)
        self._least = background_threads()
        self._before = self._scheduled()
        self._chosen = self._all
        self._look_s = 0.0

    def __call__(self) -> None:
        give_way()
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + _LOOK_EVERY_S
            self._chosen = self.processors()
        try:
            os.sched_setaffinity(0, self._chosen)
        except OSError as failure:  # this daemon's own set has changed: the work is done all the same
            log.info("cannot stay on processors %s: %s", sorted(self._chosen), failure)

    def processors(self) -> set[int]:
        """Those that share no core with a thread which has run much since this was made. All of them, where too few
        would be left."""
        ran = {
            thread: (now.run_s - self._before[thread].run_s, now.processor)
            for thread, now in self._scheduled().items()
            if thread in self._before
        }
        most_s = max((run_s for run_s, _ in ran.values()), default=0.0)
        busy = {processor for run_s, processor in ran.values() if run_s > 0 and run_s >= _BUSY * most_s}
        left = self._all.difference(*(siblings(processor) for processor in busy))
        return left if len(left) >= self._least else self._all

    def _scheduled(self) -> dict[int, procfs.Scheduled]:
        return {thread: one for pid in self._pids for thread, one in procfs.scheduled(pid).items()}


def siblings(processor: int) -> set[int]:
    """The processors of its core, itself among them; it alone where the machine does not say."""
    return {processor, *procfs.listed(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")}
