"""Phases with undo, and the runner that takes an operation through them.

A phase is a name, what it does, and what takes it back. The runner goes through phases in order, times them, reports
them, and passes the fault points `<operation>.<phase>.before` and `.after`. Until a phase marked `commits` has ended,
every failure, time-out or cancellation runs the undo of each begun phase, last one first, and then raises. It knows
nothing of GPUs or processes, and must never leave a thread behind or swallow a failure.

An undo is called for every phase that *began*, finished or not, so it must look at what is there rather than assume it.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from woodfrog.errors import BadImageError, NoSpaceError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.faults import fault_point

log = logging.getLogger(__name__)

Event = dict[str, Any]
Emit = Callable[[Event], None]

CUDA_ERROR_OUT_OF_MEMORY = 2  # cuda.h
PROGRESS_INTERVAL_S = 0.1  # ten events a second move a progress bar smoothly and cost nothing


class CancelledOperationError(WoodfrogError):
    """Somebody asked for the operation to end before its commit point."""


class ProgressLike(Protocol):
    """What the native transfer calls count their bytes in."""

    @property
    def bytes_done(self) -> int: ...

    @property
    def bytes_total(self) -> int: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True)
class Phase:
    """One step. `limit_s` bounds it: when it passes, `fault_point` and cancellable copies inside it are cancelled.
    `after`: of a phase within Beside: it waits for the ends of these phases of its backgrounds (not of its own), in
    their order; with `ready`, only until that is true at the end of one."""

    name: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None
    limit_s: float | None = None
    commits: bool = False
    after: Sequence[str] = ()
    ready: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Beside:
    """`background` phases, in order, on a thread of their own beside the `foreground` phases, and each sequence of
    `more` likewise; then all are joined. When one fails, the others begin no further phase."""

    background: Sequence[Phase]
    foreground: Sequence[Phase]
    more: Sequence[Sequence[Phase]] = ()


Step = Phase | Beside


@dataclass(eq=False)
class _Running:
    phase: Phase
    cancel: threading.Event = field(default_factory=threading.Event)
    progress: list[ProgressLike] = field(default_factory=list)
    expired: bool = False


class _Clock:
    """Expires phases that take longer than their limit: one thread for all of an operation's, since a thread that is
    started and joined for each phase costs a waiting target more than the daemon's own work in it. Between `start` and
    `stop`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[_Running, float] = {}
        self._next = math.inf  # when the thread looks again by itself
        self._thread: threading.Thread | None = None

    def start(self, operation: str) -> None:
        self._thread = threading.Thread(target=self._watch, name=f"{operation}-clock", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        thread = self._thread
        if thread is not None:
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            thread.join()

    def add(self, running: _Running) -> None:
        """It may take its phase's limit from now on."""
        if running.phase.limit_s is None:
            return
        deadline = time.monotonic() + running.phase.limit_s
        with self._changed:
            self._deadlines[running] = deadline
            if deadline < self._next:
                self._changed.notify_all()

    def remove(self, running: _Running) -> None:
        """It is over: from here on it does not expire."""
        with self._changed:
            self._deadlines.pop(running, None)

    def _watch(self) -> None:
        with self._changed:
            while self._thread is not None:
                now = time.monotonic()
                for running in [one for one, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[running]
                    running.expired = True
                    _interrupt(running)
                self._next = min(self._deadlines.values(), default=math.inf)
                self._changed.wait(None if self._next == math.inf else max(0.0, self._next - now))


class Runner:
    """Runs one operation's phases. Use once. `times` holds the seconds of every phase that ended, by name; `waits`
    those that a phase waited for another one (`Phase.after`)."""

    def __init__(self, operation: str, emit: Emit | None = None) -> None:
        self.operation = operation
        self.times: dict[str, float] = {}
        self.waits: dict[str, float] = {}
        self.committed = False
        self.undo_failures: list[WoodfrogError] = []
        self._emit = emit or (lambda event: None)
        self._lock = threading.Lock()
        self._begun: list[Phase] = []
        self._running: list[_Running] = []
        self._cancelled: str | None = None
        self._clock = _Clock()

    def run(self, steps: Sequence[Step]) -> None:
        """Do all steps. On failure before the commit point: undo what began, then raise that failure.

        After the commit point there is no way but forward: the failure is raised, and finishing is the operation's.
        """
        self._clock.start(self.operation)
        try:
            for step in steps:
                if isinstance(step, Beside):
                    self._run_beside(step)
                else:
                    self._run_phase(step)
        except WoodfrogError:
            if not self.committed:
                self.undo()
            raise
        finally:
            self._clock.stop()

    def cancel(self, reason: str) -> bool:
        """Ask the operation to stop and take everything back; False when it is already past its commit point."""
        with self._lock:
            if self.committed:
                return False
            self._cancelled = reason
            running = list(self._running)
        for one in running:
            _interrupt(one)
        return True

    def undo(self) -> None:
        """Run the undo of every begun phase, last first. Failures are kept in `undo_failures`, and the rest goes on."""
        with self._lock:
            begun, self._begun = self._begun, []
        for phase in reversed(begun):
            if phase.undo is None:
                continue
            self._emit({"event": "undo", "phase": phase.name})
            try:
                phase.undo()
            except Exception as failure:
                log.exception("%s: undo of %s failed", self.operation, phase.name)
                self.undo_failures.append(as_woodfrog_error(failure, f"{self.operation}.{phase.name}.undo"))

    @contextmanager
    def counting(self, phase: str, progress: ProgressLike) -> Iterator[None]:
        """Report `progress` as events of `phase`, and let cancellation reach it, while the body runs."""
        with self._lock:
            mine = next((one for one in self._running if one.phase.name == phase), None)
            if mine is not None:
                mine.progress.append(progress)
            cancelled = self._cancelled is not None or (mine is not None and mine.cancel.is_set())
        if cancelled:
            progress.cancel()
        done = threading.Event()
        begun = time.monotonic()

        def report() -> None:
            self._emit(
                {
                    "event": "progress",
                    "phase": phase,
                    "bytes_done": progress.bytes_done,
                    "bytes_total": progress.bytes_total,
                    "seconds": time.monotonic() - begun,
                }
            )

        def tick() -> None:
            while not done.wait(PROGRESS_INTERVAL_S):
                report()

        ticker = threading.Thread(target=tick, name=f"progress-{phase}", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
            report()

    def _run_phase(self, phase: Phase) -> None:
        running = _Running(phase)
        with self._lock:
            if self._cancelled is not None and not self.committed:
                raise CancelledOperationError(f"{self.operation} was cancelled: {self._cancelled}", phase=phase.name)
            self._begun.append(phase)
            self._running.append(running)
        self._clock.add(running)
        self._emit({"event": "begin", "phase": phase.name})
        begun = time.monotonic()
        failure: WoodfrogError | None = None
        try:
            fault_point(f"{self.operation}.{phase.name}.before", running.cancel)
            phase.do()
            if phase.commits:
                with self._lock:
                    self.committed = True
            fault_point(f"{self.operation}.{phase.name}.after", running.cancel)
        except Exception as raised:
            failure = as_woodfrog_error(raised, phase.name)
            failure = self._blame_the_clock(failure, running)
            raise failure from raised
        finally:
            self._clock.remove(running)
            seconds = time.monotonic() - begun
            with self._lock:
                self._running.remove(running)
                self.times[phase.name] = self.times.get(phase.name, 0.0) + seconds
            self._emit({"event": "end", "phase": phase.name, "seconds": seconds, "ok": failure is None})

    def _run_beside(self, step: Beside) -> None:
        failures: list[WoodfrogError] = []
        backgrounds = [step.background, *step.more]
        ended = {phase.name: threading.Event() for phases in backgrounds for phase in phases}
        stopped = threading.Event()

        def fail(of: Sequence[Phase]) -> None:
            stopped.set()
            # Without this the failure would wait for a copy of many gigabytes that nobody wants any more.
            self._interrupt_all({phase.name for phases in backgrounds if phases is not of for phase in phases})

        def background(phases: Sequence[Phase]) -> None:
            try:
                for phase in phases:
                    self._wait_for_others(phase, ended)
                    if stopped.is_set():
                        break
                    self._run_phase(phase)
                    ended[phase.name].set()
            except WoodfrogError as failure:
                failures.append(failure)
                fail(phases)
            finally:
                for phase in phases:
                    ended[phase.name].set()

        threads = [
            threading.Thread(
                target=background, args=(phases,), name=f"{self.operation}-background-{number}", daemon=True
            )
            for number, phases in enumerate(backgrounds)
        ]
        for thread in threads:
            thread.start()
        try:
            for phase in step.foreground:
                self._wait_for_others(phase, ended)
                if failures:
                    break
                self._run_phase(phase)
        except WoodfrogError:
            fail(())
            raise
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def _wait_for_others(self, phase: Phase, ended: Mapping[str, threading.Event]) -> None:
        if not phase.after:
            return
        begun = time.monotonic()
        for name in phase.after:
            ended[name].wait()
            if phase.ready is not None and phase.ready():
                break
        self.waits[phase.name] = time.monotonic() - begun

    def _interrupt_all(self, names: set[str]) -> None:
        with self._lock:
            running = [one for one in self._running if one.phase.name in names]
        for one in running:
            _interrupt(one)

    def _blame_the_clock(self, failure: WoodfrogError, running: _Running) -> WoodfrogError:
        if not running.expired or isinstance(failure, TimeoutExceededError):
            return failure
        return TimeoutExceededError(
            f"the phase {running.phase.name} took longer than {running.phase.limit_s:g} s: {failure.reason}",
            phase=running.phase.name,
        )


def _interrupt(running: _Running) -> None:
    running.cancel.set()
    for progress in list(running.progress):
        progress.cancel()


def as_woodfrog_error(failure: BaseException, phase: str) -> WoodfrogError:
    """`failure` as one of ours, with its phase filled in; anything unforeseen keeps its type's name in the sentence."""
    if isinstance(failure, WoodfrogError):
        failure.phase = failure.phase or phase
        return failure
    known = _of_the_system(failure, phase) or _of_a_transfer(failure, phase)
    if known is not None:
        return known
    log.error("unforeseen failure in phase %s", phase, exc_info=failure)
    return WoodfrogError(
        f"{type(failure).__name__}: {failure}",
        phase=phase,
        target_state=TargetState.NONE,
        advice="see daemon.log in the runtime directory",
    )


def _of_the_system(failure: BaseException, phase: str) -> WoodfrogError | None:
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({failure.filename})" if failure.filename else ""
        return NoSpaceError(
            f"no space left on the device{where}", advice="free space there or choose another store", phase=phase
        )
    if isinstance(failure, MemoryError):
        return NoSpaceError(f"host memory does not suffice: {failure}", phase=phase)
    return None


def _of_a_transfer(failure: BaseException, phase: str) -> WoodfrogError | None:
    """Errors of woodfrog._native.transfer, by name and code: this module works where that one cannot be loaded."""
    name = type(failure).__name__
    code = getattr(failure, "code", None)
    if name == "CancelledError":
        return CancelledOperationError(f"{phase} was cancelled", phase=phase)
    if name == "IntegrityError":
        return BadImageError(
            f"the image's data is not what its manifest says: {failure}",
            advice="`woodfrog verify` tells which parts are damaged; use another image",
            phase=phase,
        )
    if code in (-errno.ENOSPC, -errno.EDQUOT):
        return NoSpaceError(
            f"no space left on the device: {failure}", advice="free space there or choose another store", phase=phase
        )
    if code == -errno.ENOMEM:
        return NoSpaceError(f"host memory does not suffice: {failure}", phase=phase)
    if code == CUDA_ERROR_OUT_OF_MEMORY:
        return NoSpaceError(
            f"the GPU's memory does not suffice: {failure}",
            advice="end or suspend what uses that GPU, or choose another one with --gpu",
            phase=phase,
        )
    return None
