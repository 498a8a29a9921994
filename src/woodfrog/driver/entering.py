"""Standing beside a process that we did not start while its driver checkpoints or restores it.

The driver saves everything into one mapping that the kernel populates page by page, on one thread. woodfrog-enter
(native/enter) sees that system call from outside, takes the populating out, asks for huge pages, and has several
threads put them in place while the driver goes on. It also has threads in the process help with the driver's copies, in
both directions (`COPIES`). It saves time only: whatever stands in the way, the driver does everything by itself, and
`Visit.reason` and `Copies.reason` say why. Must never raise, nor leave a thread stopped or traced.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from woodfrog._native import paths
from woodfrog.driver.limits import processors_of, threads_left
from woodfrog.driver.process import DriverProcess
from woodfrog.errors import WoodfrogError

log = logging.getLogger(__name__)

SWITCH = "WOODFROG_ENTER"  # 0: leave every process alone
COPIES = "WOODFROG_ENTER_COPIES"  # threads that help with the driver's copies; 0: none
DEFAULT_COPY_THREADS = 4  # as in targets of ours (native/interpose/control_copy.cpp), at most half of the processors
MOST_COPY_THREADS = 16
SPARE_THREADS = 64  # that a process must be allowed beside ours: one that it could not start might end it
LEAST_BYTES = 64 << 20  # of a mapping that is taken for the driver's; 333 MiB was the least that was seen (driver 580)
MOST_THREADS = 16  # that populate
ATTACH_TIMEOUT_S = 2.0  # threads stop within a millisecond, unless they are in uninterruptible sleep; the target waits
END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Populated:
    """One mapping of the driver's; `resident_bytes` and `huge_bytes` are what the kernel told afterwards."""

    address: int
    size_bytes: int
    huge: bool  # the kernel took the advice
    resident_bytes: int = 0
    huge_bytes: int = 0
    took_s: float = 0.0


@dataclass(frozen=True)
class Helpers:
    """How many threads are to help with the driver's copies; `reason`: why they are fewer than would be good."""

    count: int
    reason: str = ""


@dataclass(frozen=True)
class Copies:
    """What threads in the process did for one step of the driver. `reason`: why nothing, why they were fewer than they
    should be, or why not all is gone."""

    step: str  # checkpoint, restore
    threads: int = 0
    copies: int = 0  # that were shared
    copied_bytes: int = 0
    slow_copies: int = 0  # of them, slower than alone: after some in a row the next ones are not shared
    reason: str = ""


@dataclass(frozen=True)
class Visit:
    """What became of it. `reason`: why nothing, or not everything, was done; empty when all went well. `copies`: one
    for each step of the driver that was to be helped with, with a reason of its own."""

    threads: int = 0  # that were traced
    mappings: list[Populated] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    stops: int = 0  # of these threads, each some microseconds
    stopped_s: float = 0.0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For results and for JSON."""
        return asdict(self)

    def with_restore(self, other: Visit) -> Visit:
        """With what a visit beside the driver's restore told."""
        return replace(
            self,
            threads=self.threads or other.threads,
            copies=self.copies + other.copies,
            stops=self.stops + other.stops,
            stopped_s=self.stopped_s + other.stopped_s,
            reason=self.reason or other.reason,
        )


class Entered:
    """A context manager around a `step` of the driver with process `pid`; `visit` is there when it is left.

    `threads`: those to look at, as this process numbers them; none: all. `populate_threads` 0: mappings are left alone.
    `copy_threads`: that help with the driver's copies; None: `wanted_copy_threads`. With neither it only looks.
    `beside`: how many processes are entered at once. `record`: keep every system call in `events`.
    """

    def __init__(
        self,
        pid: int,
        threads: Sequence[int] = (),
        *,
        populate_threads: int | None = None,
        copy_threads: int | Helpers | None = None,
        wait: bool = False,
        record: bool = False,
        least_bytes: int = LEAST_BYTES,
        step: str = "checkpoint",
        beside: int = 1,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.visit = Visit()
        if populate_threads is None:
            populate_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._command = [str(paths.enter()), "--populate", str(populate_threads), "--least", str(least_bytes)]
        if copy_threads is None:
            copy_threads = wanted_copy_threads(threads, beside)
        helpers = Helpers(copy_threads) if isinstance(copy_threads, int) else copy_threads
        self._command += ["--copy", str(helpers.count)] * (helpers.count > 0)
        self._command += ["--restore"] * (step == "restore") + ["--wait"] * wait + ["--record"] * record
        self._command += [str(number) for number in (pid, *threads)]
        self._enters = populate_threads > 0
        self._copies = helpers.count > 0
        self._fewer = helpers.reason
        self._only_tells = helpers.reason != "" and not (self._enters or self._copies or record)
        self._step = step
        self._pid = pid
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._told = threading.Event()  # attached, refused, or gone

    def __enter__(self) -> Entered:
        if os.environ.get(SWITCH) == "0":
            self.visit = Visit(reason=f"{SWITCH} is 0")
            return self
        if self._only_tells:  # and nobody is stopped for it
            self.visit = Visit(copies=[Copies(self._step, reason=self._fewer)])
            return self
        try:
            # Its own session: signals of a terminal reach it by the end of its input alone.
            # What it tells may have names of files in it, which are bytes of anybody's choice.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as failure:
            self.visit = Visit(reason=f"woodfrog-enter cannot be started: {failure}")
            return self
        self._reader = threading.Thread(target=self._read, name=f"enter-{self._pid}", daemon=True)
        self._reader.start()
        self._told.wait(ATTACH_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert self._reader is not None
        process.stdin.close()
        self._reader.join(END_TIMEOUT_S)
        late = self._reader.is_alive()
        if late:
            process.kill()  # the kernel lets go of what it traced, and no thread is half way through anything
            self._reader.join()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self.visit = self._summed_up(late)
        if self.visit.reason:
            log.info("%s of process %d was made the driver's own way: %s", self._step, self._pid, self.visit.reason)
        for one in self.visit.copies:
            log.info("copies of the driver in process %d: %s", self._pid, one)

    def named(self, event: str) -> list[dict[str, Any]]:
        """The events of one name."""
        return [one for one in self.events if one["event"] == event]

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("woodfrog-enter said %r", line[:200])
                continue
            self.events.append(event)
            if event["event"] in ("attached", "refused"):
                self._told.set()
        self._told.set()

    def _summed_up(self, late: bool) -> Visit:
        filled = {one["address"]: one for one in self.named("populated")}
        mappings = [
            Populated(
                address=one["address"],
                size_bytes=one["bytes"],
                huge=one["advised"] == 0,
                **{name: filled.get(one["address"], {}).get(name, 0) for name in ("resident_bytes", "huge_bytes")},
                took_s=filled.get(one["address"], {}).get("took_s", 0.0),
            )
            for one in self.named("mapping")
        ]
        attached = self.named("attached")
        detached = self.named("detached")
        return Visit(
            threads=len(attached[0]["threads"]) if attached else 0,
            mappings=mappings,
            copies=[self._copied(late)] if self._copies or self._fewer else [],
            stops=detached[0]["stops"] if detached else 0,
            stopped_s=detached[0]["stopped_s"] if detached else 0.0,
            reason=self._reason(attached, mappings, late),
        )

    def _copied(self, late: bool) -> Copies:
        if not self._copies:
            return Copies(self._step, reason=self._fewer)
        if told := self.named("copies"):
            kept = {name: told[0][name] for name in ("threads", "copies", "copied_bytes", "slow_copies", "reason")}
            kept["reason"] = kept["reason"] or self._fewer
            return Copies(self._step, **kept)
        if late:
            return Copies(self._step, reason="woodfrog-enter did not end by itself")
        refused = self.named("refused")
        return Copies(self._step, reason=str(refused[0]["reason"]) if refused else "woodfrog-enter was killed")

    def _reason(self, attached: list[dict[str, Any]], mappings: list[Populated], late: bool) -> str:
        if late:
            return "woodfrog-enter did not end by itself"
        if refused := self.named("refused"):
            return str(refused[0]["reason"])
        if self.named("gone"):
            return "it ended meanwhile"
        if not attached:
            return "its threads could not be stopped"
        if reason := attached[0].get("reason"):
            return str(reason)
        if self._enters and not mappings:
            return "no large mapping was seen in the driver's threads"
        if any(not one.huge for one in mappings):
            return "the kernel gives it no huge pages"
        return ""


def driver_threads(pid: int) -> list[int]:
    """The threads that do the driver's checkpoint: the one it names, and its others; empty when it names none.

    The driver calls its threads cuda…; it may name the thread in the number of the process's own PID namespace.
    """
    try:
        named = DriverProcess(pid).restore_thread_id()
    except WoodfrogError as failure:
        log.info("the driver does not name its thread of process %d: %s", pid, failure)
        return []
    tasks = {int(entry.name): _status(entry / "status") for entry in _entries(Path(f"/proc/{pid}/task"))}
    # The last of these is the thread's number in its own namespace, which is ours as a rule.
    found = [tid for tid, status in tasks.items() if status.get("NSpid", "").split()[-1:] == [str(named)]]
    if not found and named in tasks:
        found = [named]
    return found + [
        tid for tid, status in tasks.items() if status.get("Name", "").startswith("cuda") and tid not in found
    ] * bool(found)


def entered(pid: int, **options: Any) -> Entered:
    """`Entered` for the driver's threads of a process; all its threads where the driver names none."""
    return Entered(pid, driver_threads(pid), **options)


def restore_entered(pid: int, beside: int = 1) -> Entered | None:
    """`Entered` for the driver's restore of one of `beside` processes; None if nothing is to be done beside it."""
    if os.environ.get(SWITCH) == "0" or os.environ.get(COPIES) == "0":
        return None
    threads = driver_threads(pid)
    if (wanted := wanted_copy_threads(threads, beside)) == Helpers(0):
        return None  # so nobody is stopped for it
    return Entered(pid, threads, populate_threads=0, copy_threads=wanted, step="restore")


def wanted_copy_threads(threads: Sequence[int], beside: int = 1) -> Helpers:
    """What the environment says, else some of the processors that the driver's thread may use: of `beside` processes
    each has its part; fewer where the process could then hardly start threads of its own. None where there are no
    `threads` of the driver's: copies of no others are shared."""
    if not threads:
        return Helpers(0)
    if not (text := os.environ.get(COPIES, "")):
        return _allowed(threads[0], min(DEFAULT_COPY_THREADS, int(processors_of(threads[0]) / 2 / beside)))
    try:
        return Helpers(max(0, min(MOST_COPY_THREADS, int(text))))
    except ValueError:
        log.warning("%s is no number: %r", COPIES, text)
        return Helpers(0)


def _allowed(tid: int, wanted: int) -> Helpers:
    """`wanted`, or as many as leave the process what it may want to start itself."""
    left = threads_left(tid)
    if wanted == 0 or left.count >= wanted + SPARE_THREADS:
        return Helpers(wanted)
    count = max(0, int(left.count) - SPARE_THREADS)
    return Helpers(
        count,
        f"it may start {max(0, int(left.count))} threads more ({left.limit}), of which {SPARE_THREADS} are left to it: "
        f"{count} of ours instead of {wanted}",
    )


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _status(path: Path) -> Mapping[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
