"""Fault points: named places where a test can make this process fail in a chosen way.

`fault_point(name)` costs one dictionary look-up when nothing is configured. It must never be given a name that is built
from user input, and nothing outside tests may set the environment it reads:

    WOODFROG_FAULTS        comma-separated `name:action[:nth]`; nth counts the passes through that point in this process
                           from 1 (default 1)
    WOODFROG_FAULTS_STATE  a directory: a fault that fired leaves a file there and never fires again, not even in the
                           process that a supervisor starts after a `kill`
    WOODFROG_FAULTS_TRACE  a file: each name is appended when it is passed, so that a test can walk all of them

Actions: `hold` waits, every time, until a test has opened and closed the named pipe `<name>` in WOODFROG_FAULTS_STATE
(where there is none it goes on), so that the test does something at that very moment; `error` raises
InjectedFaultError; `enospc` raises OSError(ENOSPC); `timeout` raises TimeoutExceededError; `kill` ends the process
with SIGKILL; `hang` blocks until `cancel` is set (for ever without one), then raises TimeoutExceededError.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import NamedTuple

from woodfrog.errors import TimeoutExceededError, UsageError, WoodfrogError

ACTIONS = frozenset({"error", "enospc", "timeout", "kill", "hang", "hold"})


class InjectedFaultError(WoodfrogError):
    """The failure that a test asked for."""


class Fault(NamedTuple):
    name: str
    action: str
    nth: int


_lock = threading.Lock()
_passes: dict[str, int] = {}
_parsed: tuple[str, dict[str, list[Fault]]] = ("", {})


def parse(specification: str) -> dict[str, list[Fault]]:
    """WOODFROG_FAULTS as faults by name; UsageError names the part that cannot be understood."""
    faults: dict[str, list[Fault]] = {}
    for part in filter(None, (piece.strip() for piece in specification.split(","))):
        fields = part.split(":")
        nth = fields[2] if len(fields) == 3 else "1"
        if len(fields) not in (2, 3) or not fields[0] or fields[1] not in ACTIONS or not nth.isdigit() or nth == "0":
            raise UsageError(
                f"WOODFROG_FAULTS: {part!r} is not name:action[:nth]",
                advice=f"actions: {', '.join(sorted(ACTIONS))}; nth counts from 1",
            )
        faults.setdefault(fields[0], []).append(Fault(fields[0], fields[1], int(nth)))
    return faults


def fault_point(name: str, cancel: threading.Event | None = None) -> None:
    """Fail here if a test asked for it; otherwise return at once. `cancel` ends a `hang`."""
    if trace := os.environ.get("WOODFROG_FAULTS_TRACE"):
        _append(trace, name)
    specification = os.environ.get("WOODFROG_FAULTS")
    if specification and (fault := _due(specification, name)) is not None:
        _fail(fault, cancel)


def _due(specification: str, name: str) -> Fault | None:
    global _parsed
    with _lock:
        if _parsed[0] != specification:
            _parsed = (specification, parse(specification))
            _passes.clear()
        faults = _parsed[1].get(name)
        if not faults:
            return None
        _passes[name] = _passes.get(name, 0) + 1
        for fault in faults:
            if fault.action == "hold" or (fault.nth == _passes[name] and _first_time(fault)):
                return fault
    return None


def _first_time(fault: Fault) -> bool:
    directory = os.environ.get("WOODFROG_FAULTS_STATE")
    if not directory:
        return True
    try:
        Path(directory, f"{fault.name}:{fault.action}:{fault.nth}").touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def _fail(fault: Fault, cancel: threading.Event | None) -> None:
    if fault.action == "hold":
        _hold(fault.name)
        return
    if fault.action == "error":
        raise InjectedFaultError(f"injected fault at {fault.name}", phase=fault.name)
    if fault.action == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {fault.name})")
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "hang":
        (cancel or threading.Event()).wait()
    raise TimeoutExceededError(f"injected time-out at {fault.name}", phase=fault.name)


def _hold(name: str) -> None:
    path = Path(os.environ.get("WOODFROG_FAULTS_STATE", ""), name)
    if path.is_fifo():
        path.read_bytes()  # opening waits for the test to open its end, reading for it to be closed


def _append(path: str, name: str) -> None:
    # O_APPEND: one line is one write, so that threads and processes do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, name.encode() + b"\n")
    finally:
        os.close(descriptor)
