"""The promotions that are under way, and those that stopped: one thread each, in turn with the target's operations.

A promotion is an operation of its own, begun by the daemon once a restore has ended: a checkpoint that is asked for
meanwhile waits until it is over. The keeper has a record of it until then, by which the next daemon goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from woodfrog.daemon.metrics import Metrics
from woodfrog.daemon.targets import Targets
from woodfrog.errors import WoodfrogError
from woodfrog.operations.context import Context
from woodfrog.operations.notes import Notes, Record, promote_key
from woodfrog.operations.phases import Emit, Event, as_woodfrog_error
from woodfrog.operations.promote import Promote, PromoteRequest, PromoteStats
from woodfrog.operations.survey import survey

log = logging.getLogger(__name__)

RUNNING, COMPLETE, STOPPED = "running", "complete", "stopped"


@dataclass
class Promotion:
    """One promotion as others see it. `state`: running, complete, or stopped (then `reason` says why)."""

    notes: Notes
    state: str = RUNNING
    stats: PromoteStats = field(default_factory=PromoteStats)
    failure: WoodfrogError | None = None
    listeners: list[Emit] = field(default_factory=list)

    @property
    def hosted_bytes(self) -> int:
        """What has not moved, as far as is known here."""
        if self.state == RUNNING:
            return self.stats.total_bytes - self.stats.moved_bytes
        return self.stats.left_bytes

    def to_dict(self) -> dict[str, Any]:
        return {"state": self.state, **self.stats.to_dict()}


class Promotions:
    """Thread-safe."""

    def __init__(self, context: Context, targets: Targets, metrics: Metrics) -> None:
        self._context = context
        self._targets = targets
        self._metrics = metrics
        self._lock = threading.Condition()
        self._latest: dict[int, Promotion] = {}  # by root pid

    def start(self, notes: Notes) -> Promotion:
        """Begin; returns at once. One that is under way for this target is what is returned then."""
        with self._lock:
            self._forget_dead()
            latest = self._latest.get(notes.root_pid)
            if latest is not None and latest.state == RUNNING:
                return latest
            promotion = self._latest[notes.root_pid] = Promotion(notes)
        work = threading.Thread(target=self._run, args=(promotion,), name=f"promote-{notes.pid}", daemon=True)
        work.start()
        return promotion

    def resume(self, root_pid: int, pids: Sequence[int]) -> Promotion | None:
        """Go on with what is left of a running target's promotion; None when nothing of it lies on host memory. `pids`:
        its processes that use the GPU."""
        latest = self.latest(root_pid)
        if latest is not None and latest.state == RUNNING:
            return latest
        if not any(self._is_hosted(pid) for pid in pids):
            return None
        notes = survey(self._context, root_pid, image=False).notes("promote")
        record = Record(self._context.keeper, promote_key(notes.pid, notes.start_ticks), exists=True)
        record.drop()  # of the promotion that stopped
        record.keep(notes, [])
        return self.start(notes)

    def _is_hosted(self, pid: int) -> bool:
        link = self._context.agents.link(pid)
        if link is None:
            return False
        try:
            with link.hosted() as hosted:
                return bool(hosted.handles)
        except WoodfrogError as failure:  # an older interposer, which cannot have any
            log.info("process %d does not tell where its memory lies: %s", pid, failure.reason)
            return False

    def latest(self, root_pid: int) -> Promotion | None:
        """The newest promotion of that target, ended or not; of those who had its number before, none."""
        with self._lock:
            found = self._latest.get(root_pid)
        return None if found is not None and found.state != RUNNING and not found.notes.alive else found

    def overtaken(self, root_pid: int) -> None:
        """An operation has moved all memory of that target: what had stopped is of no use to anybody any more."""
        with self._lock:
            latest = self._latest.get(root_pid)
            if latest is None or latest.state != STOPPED:
                return
            del self._latest[root_pid]
        Record(self._context.keeper, promote_key(latest.notes.pid, latest.notes.start_ticks), exists=True).drop()

    def wait(self, promotion: Promotion, emit: Emit, cancellable: Callable[[Callable[[str], bool]], None]) -> None:
        """Until it has ended, passing its events on. Whoever cancels the call only ends the waiting."""
        stopped = threading.Event()

        def stop(reason: str) -> bool:
            log.info("nobody waits for the promotion of %s any more: %s", promotion.notes.name, reason)
            with self._lock:
                stopped.set()
                self._lock.notify_all()
            return True

        cancellable(stop)
        with self._lock:
            promotion.listeners.append(emit)
            while promotion.state == RUNNING and not stopped.is_set():
                self._lock.wait()
            promotion.listeners.remove(emit)

    def _run(self, promotion: Promotion) -> None:
        notes = promotion.notes

        def emit(event: Event) -> None:
            if event["event"] == "progress" and event["bytes_total"]:
                done = 100 * event["bytes_done"] // event["bytes_total"]
                self._targets.operations[notes.root_pid] = f"migrating {done} %"
            with self._lock:
                listeners = list(promotion.listeners)
            for listener in listeners:
                listener(event)

        try:
            with self._targets.one_at_a_time(notes.root_pid, "migrating 0 %"):
                promote = Promote(self._context, PromoteRequest(notes), emit)
                promotion.stats = promote.stats
                self._counted(promote)
        except Exception as raised:  # noqa: BLE001 - a thread's failure would be told to nobody
            failure = as_woodfrog_error(raised, "promote")
            promotion.failure = failure
            log.warning("the promotion of %s (process %d) stops: %s", notes.name, notes.pid, failure.reason)
        with self._lock:
            promotion.state = STOPPED if promotion.failure or promotion.stats.left_bytes else COMPLETE
            self._lock.notify_all()

    def _counted(self, promote: Promote) -> None:
        outcome = "ok"
        try:
            promote.run()
        except WoodfrogError as failure:
            outcome = type(failure).__name__
            raise
        finally:
            self._metrics.record("promote", outcome, promote.runner.times, promote.stats.moved_bytes)

    def _forget_dead(self) -> None:
        dead = [pid for pid, one in self._latest.items() if one.state != RUNNING and not one.notes.alive]
        for pid in dead:
            del self._latest[pid]
