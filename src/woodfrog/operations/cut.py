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

A process that is far behind would need a round of questions for each of hundreds of steps, so it may take several in
one: twice as many each time that no other process has become idle or busy meanwhile, else one again. Of those it takes
an eighth (16 at most) without a look, and stops by itself when it is not idle again at once after them, for one of
them may wait for others. So it goes too far by so many at most, and then the others are behind. When that has happened
(another one has become idle, and it is still busy when its own work must be done) nobody may take more than half as
many steps at once from then on: after a few times that is one, and all that is said above holds.

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

# Work that needs nobody else ends by itself, and a process that is let on meanwhile only gives the others more to catch
# up with. Only idle ones are let on, and they stop when they are idle no more, so that is not much.
PATIENCE_S = 0.02
QUEUE_S = 0.05  # what a round has queued on its GPU, beside the work of others
LOOK_S = 0.002  # how long a process is given to become idle after a step: more than a kernel of a collective takes
LONGEST_LOOK_S = 0.02  # when nobody can take a step, looking more often would change nothing
ANSWER_S = 0.1  # beyond its look, until an agent counts as held up by the driver
BUSY_PATIENCE_S = 0.25  # that all must have been busy, with nothing changing, before a busy one takes a step
MOST_STEPS = 1024  # of one process in a round; its agent ends a round after 50 ms in any case
ROUND_S = 0.05  # native/interpose/quiesce.cpp: kLongestRound


@dataclass
class CutStats:
    """What it took: steps of processes that were behind, how many of them gave a GPU work, and rounds (a process that
    took one step or several)."""

    steps: int = 0
    submitted: int = 0
    rounds: int = 0
    seconds: float = 0.0


class _Watch:
    """Who is idle, since when, and what that says about how many steps may be taken at once."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks
        self._most = MOST_STEPS
        self._last: _Rank | None = None
        self._idle = self._who()
        self.since = time.monotonic()  # the same ones are

    def stepped(self, rank: _Rank) -> None:
        """That one has taken a round of steps."""
        self._last = rank
        rank.stride = min(2 * rank.stride, self._most)

    def look(self) -> _Rank | None:
        """The newest answers are there. Gives the process that may have gone too far."""
        before, self._idle = self._idle, self._who()
        if self._idle == before:
            return None
        self.since = time.monotonic()
        last = self._last
        mine = {last.member.pid} if last is not None else set[int]()
        if not (self._idle ^ before) - mine:
            return None
        for rank in self._ranks:
            rank.stride = 1
        return last if last is not None and not last.idle and last.took > 1 and self._idle - before else None

    def too_far(self, rank: _Rank) -> None:
        """That one waits for others now: nobody may take so many steps at once any more."""
        self._most = max(1, rank.took // 2)

    def _who(self) -> set[int]:
        return {rank.member.pid for rank in self._ranks if rank.idle}


@dataclass
class _Rank:
    member: Member
    held: Held | None = None  # the latest answer; None while it is looking
    steps: int = 0
    stride: int = 1  # how many steps it may take in its next round
    took: int = 1  # in its last one
    fruitless: bool = False  # its last step gave the GPU no work, and nobody else's has since
    asked: Future[Held] | None = None

    @property
    def idle(self) -> bool:
        return self.held is not None and self.held.idle

    @property
    def can_step(self) -> bool:
        return self.held is not None and self.held.waiting > 0

    def to_dict(self) -> dict[str, int | bool | None]:
        """What is known of it, for who asks why the others wait; `waiting` is None when its agent does not answer."""
        return {
            "pid": self.member.pid,
            "idle": self.idle,
            "waiting": self.held.waiting if self.held is not None else None,
            "steps": self.steps,
            "stride": self.stride,
            "fruitless": self.fruitless,
        }


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
        look_s, watch = LOOK_S, _Watch(ranks)
        while not all(rank.idle for rank in ranks):
            if time.monotonic() > deadline:
                raise _timed_out(ranks, timeout_s)
            ahead = watch.look()
            if ahead is not None:
                # What it has queued may be its own work only, which ends by itself.
                _look(pool, [ahead], operation, QUEUE_S)
                if ahead.idle:
                    continue
                watch.too_far(ahead)
            rank = _next(ranks, busy_too=time.monotonic() - watch.since > BUSY_PATIENCE_S)
            if rank is None:
                _look(pool, ranks, operation, look_s)
                look_s = min(2 * look_s, LONGEST_LOOK_S)
                for one in ranks:
                    one.fruitless = False
                continue
            look_s = LOOK_S
            submitted = _step(pool, rank, ranks, operation)
            watch.stepped(rank)
            stats.rounds += 1
            stats.steps += max(1, submitted)
            stats.submitted += submitted
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
    """As many pieces of work of one process as it may do in a round; how many its threads gave the GPU."""
    rank.asked = pool.submit(rank.member.link().hold, operation, LOOK_S, admit=rank.stride)
    _gather([rank], ROUND_S if rank.stride > 1 else LOOK_S)
    submitted = rank.held.submitted if rank.held is not None else 0
    rank.took = max(1, submitted)
    rank.steps += rank.took
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
        details={
            "busy": busy,
            "steps": sum(rank.steps for rank in ranks),
            "processes": [rank.to_dict() for rank in ranks],
        },
    )
