"""Bringing several processes to rest at once, where the work of one may wait for the work of another.

A gate that closes on one process before it launched its half of a collective leaves the other half spinning on another
GPU. So all gates close, and while a GPU is not idle, processes are let on, one at a time and by one piece of work each,
until every GPU is idle with all gates closed.

Why this ends. A GPU that stays busy waits for work that some process has not given its GPU yet, and such a process is
on its way there or stands at its gate. Idle processes go first: of the ranks of one communicator an idle one is behind
a busy one, so each of its steps brings it nearer, and it stops being idle by launching what the busy one waits for. No
process that is ahead moves while one that is behind can. Processes that took a step without giving their GPU any work
(their other threads wait for somebody on the CPU side) stand back until somebody else has moved; only when none is left
and nothing has changed for a while do busy ones take steps: theirs may be a second stream, or a thread that an idle
process waits for. Among several communicators it is not known who waits for whom; who has had the fewest steps goes
first, and of those a random one, so that no order is excluded. The time-out bounds it all, and then every gate opens
again.

What it cannot handle: work that waits for a process that is not part of the target, or for a host function captured
into a graph that calls the driver; there the time-out comes. A kernel that spins in a per-thread default stream looks
idle here, and the last look of the agent, which sees it, fails with the time-out as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from woodfrog.errors import TimeoutExceededError, WoodfrogError
from woodfrog.operations.members import Member, side_by_side
from woodfrog.target.link import Held

# Work that needs nobody else ends by itself: what a GPU has queued when its gate closes is often tens of milliseconds,
# and a process that is let on meanwhile only gives the others more to catch up with.
PATIENCE_S = 0.05
LOOK_S = 0.002  # how long a process is given to become idle after a step: more than a kernel of a collective takes
LONGEST_LOOK_S = 0.02  # when nobody can take a step, looking more often would change nothing
ANSWER_S = 0.1  # beyond its look, until an agent counts as held up by the driver
BUSY_PATIENCE_S = 0.25  # that all must have been busy, with nothing changing, before a busy one takes a step


@dataclass
class CutStats:
    """What it took: steps of processes that were behind, and how many of them gave a GPU work."""

    steps: int = 0
    submitted: int = 0
    seconds: float = 0.0


@dataclass
class _Rank:
    member: Member
    held: Held | None = None  # the latest answer; None while it is looking
    steps: int = 0
    fruitless: bool = False  # its last step gave the GPU no work, and nobody else's has since
    asked: Future[Held] | None = None

    @property
    def idle(self) -> bool:
        return self.held is not None and self.held.idle

    @property
    def can_step(self) -> bool:
        return self.held is not None and self.held.waiting > 0


def come_to_rest(members: Sequence[Member], operation: int, timeout_s: float) -> CutStats:
    """All gates closed and all GPUs idle, and every agent knows it. TimeoutExceededError; whatever is raised, gates may
    still be closed: the caller opens them (FrozenTarget.bring_back)."""
    begun = time.monotonic()
    deadline = begun + timeout_s
    ranks = [_Rank(member) for member in members]
    stats = CutStats()
    # A process whose agent is held up by the driver must not hold up the looks at the others: a thread for each.
    with ThreadPoolExecutor(len(ranks), thread_name_prefix="cut") as pool:
        _look(pool, ranks, operation, PATIENCE_S)
        look_s = LOOK_S
        idle_since = time.monotonic()  # since when the same ones are
        idle = {rank.member.pid for rank in ranks if rank.idle}
        while not all(rank.idle for rank in ranks):
            if time.monotonic() > deadline:
                raise _timed_out(ranks, timeout_s)
            now_idle = {rank.member.pid for rank in ranks if rank.idle}
            if now_idle != idle:
                idle, idle_since = now_idle, time.monotonic()
            rank = _next(ranks, busy_too=time.monotonic() - idle_since > BUSY_PATIENCE_S)
            if rank is None:
                _look(pool, ranks, operation, look_s)
                look_s = min(2 * look_s, LONGEST_LOOK_S)
                for one in ranks:
                    one.fruitless = False
                continue
            look_s = LOOK_S
            stats.steps += 1
            stats.submitted += _step(pool, rank, ranks, operation)
            _look(pool, [one for one in ranks if not one.idle], operation, 0.0)
    left_s = max(LOOK_S, deadline - time.monotonic())
    side_by_side(members, lambda member: member.link().quiesce(operation, left_s))
    stats.seconds = time.monotonic() - begun
    return stats


def _next(ranks: Sequence[_Rank], *, busy_too: bool) -> _Rank | None:
    able = [rank for rank in ranks if rank.can_step and not rank.fruitless]
    able = [rank for rank in able if rank.idle] or (able if busy_too else [])
    if not able:
        return None
    fewest = min(rank.steps for rank in able)
    return random.choice([rank for rank in able if rank.steps == fewest])


def _step(pool: ThreadPoolExecutor, rank: _Rank, ranks: Sequence[_Rank], operation: int) -> int:
    """One piece of work of one process; how many of its threads gave the GPU some."""
    rank.steps += 1
    rank.asked = pool.submit(rank.member.link().hold, operation, LOOK_S, admit=True)
    _gather([rank], LOOK_S)
    submitted = rank.held.submitted if rank.held is not None else 0
    if submitted:
        for one in ranks:
            one.fruitless = False
    else:
        rank.fruitless = True
    return submitted


def _look(pool: ThreadPoolExecutor, ranks: Sequence[_Rank], operation: int, timeout_s: float) -> None:
    """The newest answer of each, as far as it comes in time."""
    for rank in ranks:
        if rank.asked is None:
            rank.asked = pool.submit(rank.member.link().hold, operation, timeout_s)
    _gather(ranks, timeout_s)


def _gather(ranks: Sequence[_Rank], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s + ANSWER_S
    pending = {rank.asked for rank in ranks if rank.asked is not None}
    while pending and time.monotonic() < until:
        pending = wait(pending, until - time.monotonic(), FIRST_COMPLETED).not_done
    for rank in ranks:
        if rank.asked is not None:
            if rank.asked.done():
                rank.held, rank.asked = rank.asked.result(), None
            else:
                rank.held = None


def _timed_out(ranks: Sequence[_Rank], timeout_s: float) -> WoodfrogError:
    busy = [rank.member.pid for rank in ranks if not rank.idle]
    capturing = [rank.member.pid for rank in ranks if rank.held is not None and rank.held.capturing]
    why = f"; a stream capture is active in process {capturing[0]}" if capturing else ""
    return TimeoutExceededError(
        f"the GPU work of {'processes' if len(busy) > 1 else 'process'} {', '.join(map(str, busy))} did not finish "
        f"within {timeout_s:g} s, though the other processes of the target were let on, step by step{why}",
        advice="it runs on; try again with a larger --timeout. Work that waits for a process outside of the target "
        "never ends this way: run all of them as one target",
        pid=busy[0],
        details={"busy": busy, "steps": sum(rank.steps for rank in ranks)},
    )
