"""The Python half of the benchmark targets' protocol: options, the log, digests.

The same rules as protocol.hpp (bench/targets/README.md describes them): JSON lines appended to the file of ``--log``,
which is opened and closed for each line, since a log held open while it grows would keep the CPU side of a checkpoint
from being restored. Nothing here may import torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOLD_S = 0.01  # how often a target that waits looks whether it may go on


def parser(description: str, *, steps: int, state_gib: float | None = None) -> argparse.ArgumentParser:
    """An argument parser with the options that every target has; ``state_gib`` None: the size cannot be chosen."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--log", default="", metavar="FILE", help="append JSON lines to FILE (default: stdout)")
    result.add_argument("--steps", type=int, default=steps, help=f"steps to run (default {steps})")
    result.add_argument("--pace-ms", type=float, default=0.0, help="pause after each step, in milliseconds")
    result.add_argument(
        "--hold",
        default="",
        metavar="FILE",
        help="go no further than the step whose number FILE holds, if it is there",
    )
    result.add_argument("--seed", type=int, default=1, help="seed of every random number")
    result.add_argument("--device", default="cuda", help="torch device (cpu: to check the program's logic)")
    if state_gib is not None:
        result.add_argument(
            "--state-gib", type=float, default=state_gib, help=f"GPU state in GiB (default {state_gib})"
        )
    return result


def hold_signals() -> None:
    """Keeps SIGUSR1 and SIGTERM for `in_bursts`. Call it before anything starts a thread: threads inherit it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})


def in_bursts(steps: int, burst: int) -> Iterator[None]:
    """One item a step; after every ``burst`` steps (0: never) it waits for SIGUSR1, and ends at SIGTERM.

    So a benchmark decides what lies between two checkpoints, and the target is at rest when it looks."""
    for step in range(1, steps + 1):
        yield
        if burst and step % burst == 0 and signal.sigwait({signal.SIGUSR1, signal.SIGTERM}) == signal.SIGTERM:
            return


def set_environment() -> None:
    """Sets what must be in the environment before torch is imported, for results that are the same in every run."""
    # cuBLAS is deterministic only with a fixed workspace: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Models are made here from random numbers: nothing may reach for the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def float_bits(value: float) -> str:
    """The 16 hexadecimal digits of a float's 64 bits: equal only if the value is equal to the last bit."""
    return struct.pack(">d", value).hex()


class Log:
    """The target's log and the running digest over all its step values."""

    def __init__(self, path: str, pace_ms: float = 0.0, hold: str = "") -> None:
        self._path = path
        self._hold = Path(hold) if hold else None
        self._pace_s = pace_ms / 1000.0
        self._digest = hashlib.sha256()
        self._steps = 0

    def _line(self, **members: Any) -> None:
        text = (json.dumps(members) + "\n").encode()
        if not self._path:
            sys.stdout.write(text.decode())
            sys.stdout.flush()
            return
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # One write: the line is in the log as a whole or not at all.
            if os.write(file, text) != len(text):
                raise OSError(f"the log {self._path} took only part of a line; is its disk full?")
        finally:
            os.close(file)

    def start(self, target: str, state_bytes: int, **extra: Any) -> None:
        """The first line, written when the target is about to make its first step."""
        self._line(target=target, pid=os.getpid(), state_bytes=state_bytes, time_s=time.time(), **extra)

    def step(self, value: str, **extra: Any) -> None:
        """The line of one step; ``value`` holds its observable result exactly. Then pauses as asked."""
        self._steps += 1
        self._digest.update(value.encode())
        self._line(step=self._steps, time_s=time.time(), value=value, **extra)
        held = self._held()
        if self._pace_s > 0 and (self._hold is None or held):
            time.sleep(self._pace_s)
        while held and self._steps >= held:
            time.sleep(HOLD_S)
            held = self._held()

    def _held(self) -> int:
        """The last step that may be made, 0 when nothing is held: then there is no pace either."""
        try:
            return int(self._hold.read_text()) if self._hold is not None else 0
        except FileNotFoundError:
            return 0

    def note(self, **members: Any) -> None:
        """A line about something else."""
        self._line(**members)

    def done(self, final: str, **extra: Any) -> None:
        """The last line; ``final`` holds the state of the target at its end exactly and goes into the digest."""
        self._digest.update(final.encode())
        self._line(done=True, steps=self._steps, digest=self._digest.hexdigest(), time_s=time.time(), **extra)
