"""`checkpoint --every`: checkpoints of one running target until it ends or the caller is interrupted.

The policy says when; this does it, waits for the target's end in between without polling, and keeps the number of
images down. Between two checkpoints nothing of this touches the target. The first checkpoint's failure is raised, since
then something is wrong with what was asked; later ones are told of, and tried again.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from woodfrog import api, store_api
from woodfrog.api import OnEvent, StorePath
from woodfrog.errors import NotFoundError, TargetLostError, UsageError, WoodfrogError
from woodfrog.periodic.policy import Cost, Policy
from woodfrog.results import CheckpointResult

_POLL_S = 86400.0  # poll(2) takes milliseconds as an int: 24 days at most


@dataclass(frozen=True)
class Made:
    """One round: a checkpoint, or why there is none; and when the next is due."""

    result: CheckpointResult | None
    error: WoodfrogError | None
    total_s: float
    next_in_s: float  # from now
    interval_s: float  # from begin to begin
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of what went wrong with removing old ones

    def to_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": self.result.to_dict() if self.result is not None else None,
            "error": self.error.to_dict() if self.error is not None else None,
            "total_s": self.total_s,
            "next_in_s": self.next_in_s,
            "interval_s": self.interval_s,
            "removed": self.removed,
            "notes": self.notes,
        }


@dataclass
class Summary:
    """What became of it. `ended`: the target ended (else it was interrupted, and the target runs on)."""

    images: list[str] = field(default_factory=list)
    failures: int = 0
    stall_s: float = 0.0
    elapsed_s: float = 0.0
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def checkpoint_every(
    target: api.Target | int | str,
    interval_s: float,
    *,
    max_overhead: float | None = 0.01,
    keep_last: int | None = None,
    store: StorePath = None,
    name: str | None = None,
    on_event: OnEvent | None = None,
    on_round: Callable[[Made], None] | None = None,
    **options: Any,
) -> Summary:
    """Checkpoint the target now and then every `interval_s` seconds or as much less often as `max_overhead` (a fraction
    of the time that the target may wait) calls for, until it ends. `keep_last`: remove all but so many of the newest
    images of its name, and free their room. `options` go to `woodfrog.checkpoint`.

    KeyboardInterrupt between two checkpoints is how it is ended, and returns; within one it is raised, once that one is
    taken back or has passed its commit. The target runs on either way."""
    if keep_last is not None and keep_last < 1:
        raise UsageError(f"keeping {keep_last} images makes no sense", advice="keep at least one")
    summary = Summary()
    loop = _Loop(Policy(interval_s, max_overhead), keep_last, store, summary)
    begun_s = time.monotonic()
    with _following(target) as (pid, ended):
        while True:
            try:
                summary.ended = ended(loop.wait_s)
            except KeyboardInterrupt:
                break
            if summary.ended:
                break
            made = loop.round(pid, {**options, "store": store, "name": name, "on_event": on_event})
            if made is None:
                summary.ended = ended(None)
                break
            if on_round is not None:
                on_round(made)
    summary.elapsed_s = time.monotonic() - begun_s
    return summary


class _Loop:
    def __init__(self, policy: Policy, keep_last: int | None, store: StorePath, summary: Summary) -> None:
        self._policy = policy
        self._keep_last = keep_last
        self._store = store
        self._summary = summary
        self._begun_s: float | None = None
        self._removed = 0  # images since the last prune

    @property
    def wait_s(self) -> float:
        """From now until the next one is due."""
        if self._begun_s is None:
            return 0.0
        return max(0.0, self._begun_s + self._policy.next_begin_s() - time.monotonic())

    def round(self, pid: int, options: dict[str, Any]) -> Made | None:
        """One checkpoint; None when the target is no longer there."""
        first = self._begun_s is None
        self._begun_s = time.monotonic()
        result: CheckpointResult | None = None
        error: WoodfrogError | None = None
        removed: list[str] = []
        notes: list[str] = []
        try:
            result = api.checkpoint(pid, **options)
        except (UsageError, TargetLostError):
            raise
        except WoodfrogError as failure:
            if first:
                raise
            if isinstance(failure, NotFoundError):
                return None
            error = failure
        took_s = time.monotonic() - self._begun_s
        if result is not None:
            self._policy.succeeded(Cost(result.stall_s, took_s))
            self._summary.images.append(str(result.image))
            self._summary.stall_s += result.stall_s
            removed, notes = self._let_go(str(result.image))
        else:
            self._policy.failed(took_s)
            self._summary.failures += 1
        return Made(result, error, took_s, self.wait_s, self._policy.next_begin_s(), removed, notes)

    def _let_go(self, image: str) -> tuple[list[str], list[str]]:
        """Remove what `keep_last` lets go; free its room now and then, since that means looking at the whole store."""
        if self._keep_last is None:
            return [], []
        name = image.partition("@")[0]
        removed, notes = [], []
        try:
            for entry in [one for one in api.images(name, store=self._store) if one.error is None][: -self._keep_last]:
                removed.append(api.rm(entry.reference, store=self._store))
            self._removed += len(removed)
            if self._removed >= self._keep_last:
                store_api.prune(store=self._store)
                self._removed = 0
        except WoodfrogError as error:  # the store is in use, for instance: the next round tries again
            notes.append(error.reason)
        return removed, notes


@contextmanager
def _following(target: api.Target | int | str) -> Iterator[tuple[int, Callable[[float | None], bool]]]:
    """Its pid, and a function that waits for its end for some seconds (None: however long) and says whether it came."""
    pid = _pid_of(target)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise NotFoundError(f"process {pid} has ended", advice="`woodfrog ps` lists the targets") from None
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)

        def ended(timeout_s: float | None) -> bool:
            deadline_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
            while True:
                left_s = max(0.0, deadline_s - time.monotonic())
                if poll.poll(min(left_s, _POLL_S) * 1000):
                    return True
                if left_s <= _POLL_S:
                    return False

        yield pid, ended
    finally:
        os.close(pidfd)


def _pid_of(target: api.Target | int | str) -> int:
    if isinstance(target, api.Target):
        return target.pid
    if isinstance(target, int) or target.isdigit():
        return int(target)
    found = [one for one in api.ps() if one.name == target]
    if not found:
        raise NotFoundError(f"there is no target {target}", advice="`woodfrog ps` lists the targets")
    if len(found) > 1:
        raise UsageError(f"several targets are called {target}", advice="give the pid of one: `woodfrog ps`")
    return found[0].root_pid or found[0].pid
