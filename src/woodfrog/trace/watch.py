"""Takes a process through a cycle of its driver's checkpoint, or follows one that others make, and records it.

A process that is locked or checkpointed by us is brought back whatever happens in between: an error and Ctrl-C too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from woodfrog.driver import calls, devices
from woodfrog.driver.entering import Entered, driver_threads
from woodfrog.driver.process import DriverProcess, ProcessState
from woodfrog.errors import RefusedError, TargetState, WoodfrogError
from woodfrog.target import discovery, procfs
from woodfrog.trace import contents, memory
from woodfrog.trace.record import Holdings, LongCall, Sample, SavedState, Step, Trace

SAMPLE_INTERVAL_S = 0.05
LEAST_STATE_BYTES = 16 << 20  # of new memory that is taken for the saved state
LONG_CALLS = 400  # of a trace's timeline
STATES = {state: state.name.lower() for state in ProcessState}


@dataclass(frozen=True)
class Request:
    """What was asked for. `help_driver`: populate its mapping from outside; `known`: files that may be in the state."""

    pid: int
    timeout_s: float = 30.0
    all_threads: bool = False
    help_driver: bool = False
    calls: bool = True  # trace its threads; without, nothing in it is stopped
    watch_s: float = 0.0  # only follow, for so long; 0: make the cycle
    known: Sequence[Path] = ()
    started_by_us: bool = False


@dataclass
class _Sampler:
    """Samples of the process's memory from a thread of its own."""

    pid: int
    zero_s: float
    gpus: list[bytes]
    samples: list[Sample] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()

        def loop() -> None:
            while (one := memory.sample(self.pid, time.monotonic() - self.zero_s, self.gpus)) is not None:
                self.samples.append(one)
                if stop.wait(SAMPLE_INTERVAL_S):
                    break

        thread = threading.Thread(target=loop, name="trace-samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def trace(request: Request, on_following: Callable[[], None] = lambda: None) -> Trace:
    """The whole trace. RefusedError when the process is not there to be traced; a step that fails is in the trace.
    `on_following`: called once with `watch_s`, when what others do from then on is seen."""
    return _Watch(request, on_following).run()


class _Watch:
    def __init__(self, request: Request, on_following: Callable[[], None]) -> None:
        self._request = request
        self._on_following = on_following
        self._pid = request.pid
        self._driver = DriverProcess(request.pid)
        if (state := self._driver.state()) is not ProcessState.RUNNING and not request.watch_s:
            raise RefusedError(
                f"the driver says process {self._pid} is {STATES[state]}, not running",
                advice="somebody else has it in hand; --watch follows what becomes of it",
                pid=self._pid,
            )
        if discovery.agent_of(self._pid) is not None and not request.watch_s:
            raise RefusedError(
                f"process {self._pid} was started by `woodfrog run`, and its driver must be called by the daemon alone",
                advice="trace it with --watch, and have the daemon do it meanwhile (`woodfrog suspend` and `resume`)",
                pid=self._pid,
            )
        self._known = contents.Known(request.known) if request.known else None
        gpus = devices.list_gpus()
        self._trace = Trace(
            pid=self._pid,
            command=" ".join(procfs.command_line(self._pid))[:4096],
            started_by_us=request.started_by_us,
            gpus=[f"{gpu.name} {gpu.uuid_text}" for gpu in gpus],
            driver=".".join(map(str, devices.driver_branch() or ())),
            entered=request.help_driver,
        )
        self._zero_s = time.monotonic()
        self._gpus = [gpu.uuid for gpu in gpus]
        self._sampler = _Sampler(self._pid, self._zero_s, self._gpus)

    def run(self) -> Trace:
        before = self._hold("before")
        threads = [] if self._request.all_threads else driver_threads(self._pid)
        helped = None if self._request.help_driver else 0  # as the environment says, or not
        visitor = Entered(
            self._pid, threads, populate_threads=helped, copy_threads=helped, record=True, step="checkpoint, restore"
        )
        try:
            with self._sampler.running(), visitor if self._request.calls else contextlib.nullcontext():
                self._name_threads(visitor)
                if self._request.watch_s:
                    self._follow(before)
                else:
                    self._cycle(before)
        finally:
            self._bring_back()
        self._add_calls(visitor)
        self._trace.samples = self._sampler.samples
        self._say_what_was_not_seen(visitor)
        return self._trace

    # ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def _cycle(self, before: list[memory.Range]) -> None:
        timeout_s = self._request.timeout_s
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("lock", lambda: self._driver.lock(timeout_s)),
            ("checkpoint", self._driver.checkpoint),
            ("restore", self._driver.restore),
            ("unlock", self._driver.unlock),
        )
        for name, make in steps:
            if not self._step(name, make):
                break
            if name == "checkpoint":
                self._find_saved(before)
            self._hold(name)

    def _step(self, name: str, make: Callable[[], None]) -> bool:
        begun_s = time.monotonic()
        error = ""
        try:
            make()
        except WoodfrogError as failure:
            error = failure.reason
        took_s = time.monotonic() - begun_s
        try:
            state = STATES[self._driver.state()]
        except WoodfrogError:
            state = TargetState.GONE
        self._trace.steps.append(Step(name, begun_s - self._zero_s, took_s, state, error))
        return not error

    def _follow(self, before: list[memory.Range]) -> None:
        """The states that others take it through, until it runs again after a checkpoint, or the time ends."""
        if self._is_checkpointed():
            before = []  # the saved state is among them
        self._on_following()
        end_s = time.monotonic() + self._request.watch_s
        since_s, last, seen = time.monotonic(), None, False
        while time.monotonic() < end_s:
            try:
                state = self._driver.state()
            except WoodfrogError:
                self._trace.steps.append(Step(TargetState.GONE, time.monotonic() - self._zero_s, 0.0, TargetState.GONE))
                return
            if state is not last:
                now_s = time.monotonic()
                if last is not None:
                    self._trace.steps.append(Step(STATES[last], since_s - self._zero_s, now_s - since_s, STATES[state]))
                    self._hold(STATES[state])
                if state is ProcessState.CHECKPOINTED:
                    seen = True
                    self._find_saved(before)
                since_s, last = now_s, state
                if seen and state is ProcessState.RUNNING:
                    return
            time.sleep(SAMPLE_INTERVAL_S)
        if last is not None:
            now_s = time.monotonic()
            self._trace.steps.append(Step(STATES[last], since_s - self._zero_s, now_s - since_s, STATES[last]))

    def _is_checkpointed(self) -> bool:
        try:
            return self._driver.state() is ProcessState.CHECKPOINTED
        except WoodfrogError:
            return False  # it is gone, and the trace will say so

    def _bring_back(self) -> None:
        """After a step of ours that did not lead on. What fails here is told as the state that the last step left."""
        if self._request.watch_s:
            return
        for state, name, make in (
            (ProcessState.CHECKPOINTED, "restore", self._driver.restore),
            (ProcessState.LOCKED, "unlock", self._driver.unlock),
        ):
            try:
                if self._driver.state() is not state:
                    continue
            except WoodfrogError:
                return  # it is gone, and the trace says so
            self._step(f"{name} (bringing it back)", make)

    # ── what there is ───────────────────────────────────────────────────────────────────────────────────────────

    def _hold(self, after: str) -> list[memory.Range]:
        """Notes the driver's files; all mappings of the process, empty when they may not be seen."""
        try:
            files = memory.driver_files(self._pid)
            self._trace.holdings.append(Holdings(after, files, memory.listed(self._pid, self._gpus)))
            return memory.ranges(self._pid)
        except OSError as failure:
            self._unseen(f"the process's files and mappings ({after}): {failure.strerror or failure}")
            return []

    def _find_saved(self, before: list[memory.Range]) -> None:
        """`before`: the mappings of when it held no saved state; empty: not known, and only a file of the daemon's is
        told then."""
        try:
            after = memory.ranges(self._pid)
            found = memory.new_writable(before or after, after)
            if not before and not found:
                self._unseen("the saved state: its mappings could not be looked at before the driver checkpointed it")
                return
            if not found or found[0][1] - found[0][0] < LEAST_STATE_BYTES:
                self._unseen(f"no new mapping of {LEAST_STATE_BYTES >> 20} MiB or more holds a saved state")
                return
            begin, end = found[0]
            sampled, kinds = contents.survey(self._pid, begin, end, self._known)
            huge_bytes, resident_bytes = memory.huge_and_resident(self._pid, begin, end)
        except OSError as failure:
            self._unseen(f"the saved state: {failure.strerror or failure}")
            return
        step = self._trace.step("checkpoint")
        rate = (end - begin) / step.took_s if step and step.took_s else 0.0
        self._trace.saved = SavedState(begin, end - begin, resident_bytes, huge_bytes, sampled, kinds, rate, 0.0)

    def _name_threads(self, visitor: Entered) -> None:
        for event in visitor.named("attached"):
            for thread in event["threads"]:
                self._trace.threads[thread] = procfs.thread_name(self._pid, thread) or ""

    def _add_calls(self, visitor: Entered) -> None:
        seen = calls.read_calls(visitor.events)
        self._trace.copies = visitor.visit.copies
        self._trace.stops, self._trace.stopped_s = visitor.visit.stops, visitor.visit.stopped_s
        long_calls = []
        for step in self._trace.steps:
            begin_s = self._zero_s + step.begun_s
            within = calls.within(seen, begin_s, begin_s + step.took_s)
            self._trace.calls[step.name] = calls.by_kind(within)
            long_calls += [
                LongCall(step.name, call.begun_s - self._zero_s, call.took_s, call.thread, call.kind)
                for call in within
                if not call.waits
            ]
            for call in within:
                self._trace.threads.setdefault(call.thread, "")
        long_calls.sort(key=lambda call: -call.took_s)
        self._trace.long_calls = sorted(long_calls[:LONG_CALLS], key=lambda call: call.begun_s)
        self._add_copied(seen)

    def _add_copied(self, seen: list[calls.SystemCall]) -> None:
        saved, step = self._trace.saved, self._trace.step("checkpoint")
        populated = [call for call in seen if call.kind == "mmap populated" and saved and call.result == saved.address]
        if saved is None or step is None or not populated:
            return
        left_s = step.took_s - populated[0].took_s
        self._trace.saved = replace(saved, copied_bytes_per_s=saved.size_bytes / left_s if left_s > 0 else 0.0)

    def _say_what_was_not_seen(self, visitor: Entered) -> None:
        reason = visitor.visit.reason
        if not self._request.calls:
            self._unseen("the driver's system calls: --no-calls")
        elif reason and not visitor.named("attached"):
            self._unseen(f"the driver's system calls: {reason}")
        elif reason:
            self._unseen(f"not all of the driver's system calls: {reason}")
        for one in visitor.visit.copies:
            if one.reason:
                self._unseen(f"copies that threads in the process help with: {one.reason}")
        if all(sample.gpu_bytes is None for sample in self._trace.samples):
            self._unseen("GPU memory of the process: NVML tells nothing about it here")
        elif not any(holding.listed for holding in self._trace.holdings):
            self._unseen(
                "GPU memory of the process: NVML does not list it (in a container it tells the host's numbers)"
            )
        if not self._request.all_threads and visitor.named("attached"):
            self._unseen("system calls of the program's own threads (--all-threads shows them)")
        self._unseen("what the driver does inside the kernel and on the GPU: only how long its calls took")

    def _unseen(self, sentence: str) -> None:
        if sentence not in self._trace.unseen:
            self._trace.unseen.append(sentence)
