"""When the next periodic checkpoint is due, out of what the last ones cost. Numbers in, a number out: no clock, no I/O.

Each checkpoint pays for itself: the next one begins no sooner than `stall / max_overhead` after it, so that over any
number of whole intervals the target waits for at most that fraction of the time. Of the time that a checkpoint takes
beside the running target (writing, hashing CRIU's files) at most half of the time is used. The interval that was asked
for is never undercut.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from woodfrog.errors import UsageError

WINDOW = 3  # the last checkpoints whose cost counts: one of them may have met a quiet moment
BUSY = 0.5  # of the time may a checkpoint be going on
MAX_DOUBLINGS = 6  # after failures: 64 times the interval
MAX_BACK_OFF_S = 3600.0  # and no longer than this, unless the interval itself is longer
MIN_INTERVAL_S = 1.0  # below that there is no interval, but a loop


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint: how long the target waited for it, and how long all of it took. Seconds."""

    stall_s: float
    total_s: float


class Policy:
    """Told of each checkpoint's cost or failure in turn; says how long after its begin the next one is to begin."""

    def __init__(self, interval_s: float, max_overhead: float | None = 0.01) -> None:
        """`max_overhead`: the fraction of the time that the target may wait; None: no bound. UsageError."""
        if interval_s < MIN_INTERVAL_S:
            raise UsageError(f"an interval of {interval_s:g} s is too short", advice=f"at least {MIN_INTERVAL_S:g} s")
        if max_overhead is not None and not 0 < max_overhead <= 1:
            raise UsageError(
                f"an overhead of {max_overhead:.3%} is not possible", advice="give more than 0% and at most 100%"
            )
        self.interval_s = interval_s
        self.max_overhead = max_overhead
        self._costs: deque[Cost] = deque(maxlen=WINDOW)
        self._failures = 0
        self._lost_s = 0.0  # what the last failure cost

    @property
    def failures(self) -> int:
        """How many in a row there were until now."""
        return self._failures

    def succeeded(self, cost: Cost) -> None:
        self._costs.append(cost)
        self._failures = 0

    def failed(self, took_s: float) -> None:
        """A checkpoint failed after so many seconds, of which nobody knows how many the target waited."""
        self._failures += 1
        self._lost_s = took_s

    def next_begin_s(self) -> float:
        """How long after the begin of the last one (0 before the first) the next one is to begin."""
        if self._failures:
            return self._back_off_s()
        if not self._costs:
            return 0.0
        return max(self.interval_s, self._affordable_s())

    def _affordable_s(self) -> float:
        # The last one's own cost is what has to be paid for; the largest of the last ones is what the next may cost.
        total_s = max(cost.total_s for cost in self._costs) / BUSY
        if self.max_overhead is None:
            return total_s
        return max(total_s, self._costs[-1].stall_s / self.max_overhead)

    def _back_off_s(self) -> float:
        doubled_s = self.interval_s * 2.0 ** min(self._failures, MAX_DOUBLINGS)
        paid_s = self._lost_s / self.max_overhead if self.max_overhead is not None else 0.0
        return max(self.interval_s, min(max(doubled_s, paid_s), MAX_BACK_OFF_S), self._lost_s)
