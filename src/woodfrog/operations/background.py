"""Work that nobody waits for, beside a target that runs on: few processors, a lower priority, and cores of its own.

Hashing on every processor while a training went on made its steps 0.6 to 0.8 times as fast for as long as an image was
being written (H200, 16 processors, 2026-11-30). That goes for all that is written from when the target runs again, what
streams through the arena while it drains included. A lower priority alone changes little: on 32 processors no thread
waits for one, but a core has two (`cores`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from woodfrog.errors import UsageError
from woodfrog.sizes import parse_size
from woodfrog.target import procfs

log = logging.getLogger(__name__)
THREADS_VARIABLE = "WOODFROG_BACKGROUND_THREADS"
RATE_VARIABLE = "WOODFROG_BACKGROUND_RATE"
T = TypeVar("T")

# setpriority(2): a third of the share of those with 0, so that it comes to its end on a busy machine too.
_NICE = 5
# Of the processors one in so many. On 32, beside a training: 16 threads anywhere slowed its steps to 0.73 to 0.87, 8 to
# 0.86 to 0.89, 8 on the other half of the processors to 0.96 to 1.0, 4 and 2 not at all (interference.json). But of
# 63 GB to write 4 slowed it for 10 to 13 s and 8 for 5 to 7 s, by as much (concurrent.json; H200, 2026-11-30; but what
# was usual there was taken from steps of which some had a drain beside them: docs/measurements.md).
_SHARE = 4
_BUSY = 0.2  # of what the target's busiest thread has run: what runs less waits for others most of the time
_TAKEN = 0.5  # of the time: a processor on which somebody else works
_LOOK_EVERY_S = 0.25  # threads stay where they are as long as their processor is free


def background_threads() -> int:
    """How many threads such work should have: as many as $WOODFROG_BACKGROUND_THREADS says, if it does. UsageError."""
    if text := os.environ.get(THREADS_VARIABLE):
        if not text.isdecimal() or int(text) == 0:
            raise UsageError(f"{THREADS_VARIABLE}={text!r} is not a number of threads", advice="at least 1")
        return min(int(text), len(os.sched_getaffinity(0)))
    return max(1, len(os.sched_getaffinity(0)) // _SHARE)


def background_rate() -> int:
    """How many bytes a second such work may copy out of each GPU, as $WOODFROG_BACKGROUND_RATE says; 0: no bound.
    UsageError."""
    text = os.environ.get(RATE_VARIABLE)
    return parse_size(text) if text else 0


def require_settings() -> None:
    """UsageError now rather than in the middle of a checkpoint."""
    background_threads()
    background_rate()


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
    """`give_way`, and stay on a few cores that no busy thread of these processes is on, nor much of others. To be made
    while they run, and called by a thread that then works, and starts others, beside them: before each piece of work,
    since their threads may move. From any thread.

    A few cores with as many processors as there are threads, and not all but the busy ones: where each processor of a
    core is taken, the kernel finds no place for a thread of the target there, and on all other cores it is alone."""

    def __init__(self, pids: Sequence[int], threads: int = 0) -> None:
        """`threads`: for how many of one's own; 0: background_threads()."""
        self._pids = pids
        self._all = os.sched_getaffinity(0)
        self._cores = cores(self._all)
        self._threads = threads or background_threads()
        self._before = self._scheduled()
        self._ran_before = procfs.processors_ran()
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
        """So many whole cores side by side on which nothing has run much since this was made: those that are farthest
        from all where something has. What was chosen before, while none of the processes' busy threads is there. All,
        where there are not so many."""
        busy = self._busy()
        if self._chosen != self._all and not self._chosen & busy:
            return self._chosen
        busy |= self._others()
        at = [number for number, core in enumerate(self._cores) if core & busy]
        best, farthest = self._all, 0
        for first in range(len(self._cores)):
            block: set[int] = set()
            end = first
            while end < len(self._cores) and len(block) < self._threads:
                block |= self._cores[end]
                end += 1
            if len(block) < self._threads:
                break
            # In cores from the nearest busy one: 0 where one is among them. Of equals the last, as the first processor
            # has the machine's interrupts.
            distance = min((max(first - one, one - end + 1, 0) for one in at), default=len(self._cores))
            if distance and distance >= farthest:
                best, farthest = block, distance
        return best

    def _busy(self) -> set[int]:
        ran = {
            thread: (now.run_s - self._before[thread].run_s, now.processor)
            for thread, now in self._scheduled().items()
            if thread in self._before
        }
        most_s = max((run_s for run_s, _ in ran.values()), default=0.0)
        return {processor for run_s, processor in ran.values() if run_s > 0 and run_s >= _BUSY * most_s}

    def _others(self) -> set[int]:
        """Where whoever it is has run."""
        found = set()
        for processor, (ran_s, there_s) in procfs.processors_ran().items():
            ran_before_s, there_before_s = self._ran_before.get(processor, (ran_s, there_s))
            if there_s > there_before_s and ran_s - ran_before_s >= _TAKEN * (there_s - there_before_s):
                found.add(processor)
        return found

    def _scheduled(self) -> dict[int, procfs.Scheduled]:
        return {thread: one for pid in self._pids for thread, one in procfs.scheduled(pid).items()}


def cores(processors: Collection[int]) -> list[set[int]]:
    """Which of these share a core, in the order of their numbers.

    A machine that tells of no two on one core is taken to have pairs of neighbours (0 and 1, 2 and 3): a virtual one
    may hide them. On an H200's that told of none, noise on one half of the processors did not slow a training on the
    other half; anywhere it did, by a tenth, though no thread waited for a processor (2026-11-30). Where they are no
    pairs, no harm is done."""
    found = {processor: _siblings(processor) for processor in processors}
    if all(len(core) == 1 for core in found.values()):
        found = {processor: {processor & ~1, processor | 1} for processor in processors}
    each = {min(core): core & set(processors) for core in found.values()}
    return [each[first] for first in sorted(each)]


def _siblings(processor: int) -> set[int]:
    return {processor, *procfs.listed(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")}
