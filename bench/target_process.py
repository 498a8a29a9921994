"""Benchmark targets as processes: start them with or without woodfrog, follow their logs, compare them, end them.

A ``TargetRun`` owns the processes it started and its log, and ends only these. It never decides what is measured.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import REPOSITORY

TARGETS = REPOSITORY / "bench" / "targets"
BINARIES = Path(os.environ.get("WOODFROG_BENCH_BINARIES", REPOSITORY / "build" / "bench"))
TORCH_PYTHON = os.environ.get("WOODFROG_BENCH_TORCH_PYTHON", sys.executable)  # torchrun's, and its ranks'
RUN_VARIABLE = "WOODFROG_BENCH_RUN"  # a value of its own in every process of a run, restored ones too
POLL_S = 0.002  # how often a log is looked at: well below the shortest step that is waited for


class TargetError(Exception):
    """A target did not do what its protocol promises. The text says which, what it did, and where its output is."""


def command(name: str, *options: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """The command line of the target ``name`` (its file without ending), ``python`` before it if it is a script.
    Raises TargetError if it is not built."""
    script = TARGETS / f"{name}.py"
    if script.exists():
        return [*python, str(script), *options]
    program = BINARIES / name
    if not program.exists():
        raise TargetError(f"{program} does not exist: build the targets with bench/targets/build.sh")
    return [str(program), *options]


@dataclass
class Log:
    """What a target has written so far. ``read`` takes in what is new; a step that is written again must be equal."""

    path: Path
    start: dict[str, Any] | None = None
    values: dict[int, str] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)  # of targets/saving.py
    done: dict[str, Any] | None = None
    conflict: str | None = None
    _offset: int = 0
    _rest: bytes = b""

    @property
    def last_step(self) -> int:
        """The number of the last step in the log, 0 if there is none."""
        return self.lines[-1]["step"] if self.lines else 0

    def read(self) -> None:
        """Takes in the lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        for text in whole:
            self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        if "step" in line and "value" in line:
            step = int(line["step"])
            earlier = self.values.setdefault(step, line["value"])
            if earlier != line["value"] and self.conflict is None:
                self.conflict = f"step {step} was {earlier} and then {line['value']}"
            self.lines.append(line)
        elif line.get("done"):
            self.done = line
        elif "target" in line:
            self.start = line
        elif line.get("verify"):
            self.verdicts.append(line)
        elif "saved" in line:
            self.saved.append(line)

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Times between two steps that overlap the wall clock interval, in seconds."""
        times = [line["time_s"] for line in self.lines]
        return [b - a for a, b in itertools.pairwise(times) if b >= begin_s and a <= end_s]

    def lost_s(self, begin_s: float, end_s: float, usual_s: float) -> float:
        """Of the time from the step before ``begin_s`` to the one after ``end_s``, what steps of ``usual_s`` would not
        have taken. There must be such steps."""
        times = [line["time_s"] for line in self.lines]
        first = bisect.bisect_right(times, begin_s) - 1
        last = bisect.bisect_left(times, end_s)
        return times[last] - times[first] - (last - first) * usual_s

    def usual_step_s(self, before_s: float, count: int = 50) -> float:
        """The median time of the last ``count`` steps before that moment."""
        times = [line["time_s"] for line in self.lines if line["time_s"] <= before_s][-count - 1 :]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def step_times_s(self, skip: int) -> list[float]:
        """Times between steps, without the first ``skip``."""
        times = [line["time_s"] for line in self.lines][skip:]
        return [b - a for a, b in itertools.pairwise(times)]


@dataclass
class Logs:
    """The logs of a job's ranks, as if they were one: what all of them have done."""

    parts: list[Log]

    @property
    def start(self) -> dict[str, Any] | None:
        return self.parts[0].start if all(part.start for part in self.parts) else None

    @property
    def last_step(self) -> int:
        return min(part.last_step for part in self.parts)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return min((part.lines for part in self.parts), key=len)

    @property
    def done(self) -> dict[str, Any] | None:
        return self.parts[0].done if all(part.done for part in self.parts) else None

    @done.setter
    def done(self, value: None) -> None:
        for part in self.parts:
            part.done = value

    def read(self) -> None:
        for part in self.parts:
            part.read()


@dataclass
class Start:
    """How a target is started, and where it says what. The environment tells its processes from all others."""

    argv: list[str]
    environment: dict[str, str]
    log: Any  # a Log, or the Logs of a job
    output: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.environment[RUN_VARIABLE] = self.mark


class TargetRun:
    """One running target. ``handle`` is woodfrog's object for it where woodfrog started or restored it."""

    def __init__(self, name: str, pid: int, start: Start, process: subprocess.Popen[bytes] | None, handle: Any) -> None:
        self.name = name
        self.pid = pid
        self.log = start.log
        self.handle = handle
        self._output = start.output
        self._process = process
        self._mark = start.mark

    def wait_ended(self, timeout_s: float = 30.0) -> None:
        """Returns when the process has ended and was waited for, so that its pid is free for a restore."""
        waiter = self._process if self._process is not None else self.handle
        if waiter is not None:
            waiter.wait(timeout_s)

    def adopt(self, handle: Any) -> None:
        """Follows the process that a restore has made of this target; its last line is expected once more."""
        self.log.read()
        self.log.done = None
        pid = int(handle.pid)
        self.pid = pid
        self.handle = handle
        self._process = None

    def alive(self) -> bool:
        """Whether the process runs (a process that has ended and was not waited for does not)."""
        if self._process is not None:
            return self._process.poll() is None
        if self.handle is not None:
            return bool(self.handle.poll())
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def tail(self) -> str:
        """The end of its output."""
        try:
            return self._output.read_text(errors="replace")[-1500:]
        except OSError:
            return ""

    def _trouble(self, wanted: str) -> TargetError:
        tail = self.tail()
        state = "still runs" if self.alive() else "has ended"
        return TargetError(
            f"{self.name} (pid {self.pid}) {state} and has not reached {wanted}; its output ends: {tail}"
        )

    def _wait(self, reached: Any, wanted: str, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while True:
            alive = self.alive()
            self.log.read()
            if reached():
                return
            if not alive or time.monotonic() > end_s:
                raise self._trouble(wanted)
            time.sleep(POLL_S)

    def wait_start(self, timeout_s: float = 180.0) -> None:
        """Returns when the target is about to make its first step."""
        self._wait(lambda: self.log.start is not None, "its first step", timeout_s)

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Returns when step number ``step`` or a later one is in the log."""
        self._wait(lambda: self.log.last_step >= step, f"step {step}", timeout_s)

    def wait_more_steps(self, steps: int, timeout_s: float = 120.0) -> None:
        """Returns when ``steps`` further steps are in the log."""
        self.log.read()
        self.wait_lines(len(self.log.lines) + steps, timeout_s)

    def wait_lines(self, count: int, timeout_s: float = 120.0) -> None:
        """Returns when that many steps are in the log, those of before a restore and repeated ones counted."""
        self._wait(lambda: len(self.log.lines) >= count, f"{count} steps", timeout_s)

    def wait_done(self, timeout_s: float = 300.0) -> None:
        """Returns when the target has written its last line."""
        self._wait(lambda: self.log.done is not None, "its end", timeout_s)

    def verify(self, timeout_s: float = 60.0) -> int:
        """Asks fill_state to check its memory on the GPU; returns the number of wrong words."""
        before = len(self.log.verdicts)
        os.kill(self.pid, signal.SIGUSR1)
        self._wait(lambda: len(self.log.verdicts) > before, "the verification of its memory", timeout_s)
        return int(self.log.verdicts[-1]["wrong_words"])

    def save(self, timeout_s: float = 300.0) -> tuple[float, float]:
        """Asks a training target to save itself; when that began and ended (``time.time()``)."""
        before = len(self.log.saved)
        begin_s = time.time()
        os.kill(self.pid, signal.SIGUSR2)
        self._wait(lambda: len(self.log.saved) > before, "the end of its own saving", timeout_s)
        return begin_s, float(self.log.saved[-1]["time_s"])

    def rewrite(self, timeout_s: float = 60.0) -> int:
        """Has fill_state write all of its memory anew and check it; returns the number of wrong words."""
        before = len(self.log.verdicts)
        os.kill(self.pid, signal.SIGUSR2)
        self._wait(lambda: len(self.log.verdicts) > before, "the rewriting of its memory", timeout_s)
        return int(self.log.verdicts[-1]["wrong_words"])

    def end(self) -> None:
        """Ends every process of this run that is still there, and waits until they are gone."""
        victims = sorted(self._processes(), key=lambda one: one.pid != self.pid)  # a launcher first: it starts no more
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        if self._process is not None or self.handle is not None:
            self.wait_ended(60.0)
        psutil.wait_procs(victims, timeout=10)

    def _processes(self) -> list[psutil.Process]:
        """What runs of it, its launcher's children included when the launcher has died."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_VARIABLE) == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


# Ranks as torchrun starts them, without torchrun's own process.
RANKS_ALONE = 'n=$1; shift; for ((r = 0; r < n; r++)); do RANK=$r LOCAL_RANK=$r WORLD_SIZE=$n "$@" & done; wait'


def default_launcher(name: str) -> str:
    """What starts the ranks of the target ``name``: torchrun for PyTorch's, where there is one."""
    if name not in ("train_ddp", "tp_generate"):
        return "ranks"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"  # not imported: seconds
    return "ranks" if subprocess.run([TORCH_PYTHON, "-c", look], check=False).returncode else "torchrun"


@dataclass(frozen=True)
class Ranks:
    """So many of a target as one job, each with a log of its own (Logs), started by ``launcher`` (torchrun, or ranks: a
    shell). None: the target itself."""

    count: int = 0
    launcher: str = "ranks"


NO_RANKS = Ranks()


def _prepare(
    name: str, options: Sequence[str], work: Path, label: str, env: Mapping[str, str] | None, ranks: Ranks
) -> Start:
    work.mkdir(parents=True, exist_ok=True)
    log, output = work / f"{label}.jsonl", work / f"{label}.out"
    environment = {**os.environ, **(env or {})}
    paths = [Path(f"{log}.{rank}") for rank in range(ranks.count)] if ranks.count else [log]
    for path in (*paths, output):
        path.unlink(missing_ok=True)
    if not ranks.count:
        return Start(command(name, *options, "--log", str(log)), environment, Log(log), output)
    environment |= {"RANK_LOG": str(log), "RANKS_PORT": str(_free_port())}
    if ranks.launcher == "torchrun":
        # The address: it would look its own host's name up, which a machine without a network may not know.
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks.count}",
        ]
        argv = command(name, *options, python=[TORCH_PYTHON, *torchrun])
    else:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        argv = ["bash", "-c", RANKS_ALONE, "launcher", str(ranks.count), *command(name, *options)]
    return Start(argv, environment, Logs([Log(path) for path in paths]), output)


def _free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def plain(
    name: str,
    options: Sequence[str],
    work: Path,
    label: str,
    env: Mapping[str, str] | None = None,
    *,
    ranks: Ranks = NO_RANKS,
) -> Iterator[TargetRun]:
    """Runs a target without woodfrog; ends it when the block is left. Its log and output are ``work/label.*``.
    ``ranks``: what of it makes up a job."""
    start = _prepare(name, options, work, label, env, ranks)
    with start.output.open("wb") as file:
        # A session of its own: a signal meant for the benchmark does not reach the target.
        process = subprocess.Popen(
            start.argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=start.environment,
            start_new_session=True,
        )  # fmt: skip
    run = TargetRun(name, process.pid, start, process, None)
    try:
        yield run
    finally:
        run.end()


@contextmanager
def interposed(
    name: str,
    options: Sequence[str],
    work: Path,
    label: str,
    env: Mapping[str, str] | None = None,
    *,
    ranks: Ranks = NO_RANKS,
) -> Iterator[TargetRun]:
    """Runs a target under ``woodfrog.run``; ends it when the block is left. Its log is ``work/label.jsonl``.
    ``ranks``: as of ``plain``."""
    import woodfrog

    start = _prepare(name, options, work, label, env, ranks)
    handle = woodfrog.run(start.argv, name=f"{label}-{os.getpid()}", env=start.environment, log=start.output)
    run = TargetRun(name, handle.pid, start, None, handle)
    try:
        yield run
    finally:
        run.end()


def steps_differ(reference: Log, other: Log, first: int, last: int) -> str | None:
    """Says where the steps ``first`` to ``last`` of ``other`` differ from the reference's; None if they are equal."""
    for step in range(first, last + 1):
        if step not in other.values:
            return f"step {step} is missing"
        if other.values[step] != reference.values.get(step):
            return f"step {step} is {other.values[step]} instead of {reference.values.get(step)}"
    return other.conflict


def ends_differ(reference: Log, other: Log) -> str | None:
    """Says how the ends of two runs differ; None if both ended with the same digest."""
    if reference.done is None or other.done is None:
        return "the uninterrupted run did not end" if reference.done is None else "the run did not end"
    if reference.done["digest"] != other.done["digest"]:
        return f"the final digest is {other.done['digest']} instead of {reference.done['digest']}"
    return None
