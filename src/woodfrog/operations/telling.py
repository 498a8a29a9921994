"""Telling restored processes that they were restored, and as what: for programs that ask to be told.

A process restored by CRIU is long past its start: its arguments and environment are memory of its own, which nobody
else can change behind its back. So a program that wants to know keeps a memfd called `woodfrog-restored`
(woodfrog.restore_news does it for Python), with `{"signal": N}` in it. CRIU brings the memfd back, the daemon writes
the new values into it before the gate opens, and sends the signal afterwards. What is in the file is the target's word:
it is read with a bound, and a signal goes only to a process that has a handler for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from woodfrog.errors import NotFoundError, TargetLostError, WoodfrogError
from woodfrog.operations.notes import Notes
from woodfrog.target import procfs
from woodfrog.target.identity import ProcessHandle

log = logging.getLogger(__name__)

FILE_NAME = "woodfrog-restored"
MAX_BYTES = 1 << 16
_LINK = f"/memfd:{FILE_NAME} (deleted)"
_F_GET_SEALS = 1034  # linux/fcntl.h; the Python constant is younger than 3.10


class _Asked(msgspec.Struct):
    """What is read of a program's file."""

    signal: int = 0


@dataclass(frozen=True)
class Told:
    """A process that has its news, and the signal that it waits for (0: none)."""

    pid: int
    signal: int


def tell(notes: Notes, environment: Mapping[str, str]) -> list[Told]:
    """Write what is new into the file of every process of the tree that has one. WoodfrogError when that fails: then
    the program would go on with what was."""
    told = []
    for pid in notes.tree:
        with contextlib.suppress(PermissionError):
            for descriptor, link in procfs.descriptors(pid).items():
                if link == _LINK:
                    told.append(Told(pid, _write(pid, descriptor, notes, environment)))
                    break
    return told


def call(told: list[Told]) -> None:
    """The signals, once the gate is open. Never raises: the target runs."""
    for one in told:
        caught = int((procfs.status(one.pid) or {}).get("SigCgt", "0"), 16)
        if not (0 < one.signal <= 64 and caught >> (one.signal - 1) & 1):
            continue
        with contextlib.suppress(NotFoundError, TargetLostError, ProcessLookupError), ProcessHandle(one.pid) as handle:
            handle.signal(one.signal)


def _write(pid: int, descriptor: int, notes: Notes, environment: Mapping[str, str]) -> int:
    try:
        # Not followed anywhere else: only a memfd has seals, whatever a link's text says.
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            fcntl.fcntl(file, _F_GET_SEALS)
            signal = _signal_of(os.pread(file, MAX_BYTES, 0))
            data = msgspec.json.encode({"signal": signal, **_news(notes, environment)})
            os.ftruncate(file, 0)
            if os.pwrite(file, data, 0) != len(data):
                raise OSError("it took a part only")
        finally:
            os.close(file)
    except OSError as failure:
        raise WoodfrogError(
            f"process {pid} asked to be told of its restore, and its file {FILE_NAME} cannot be written: {failure}",
            pid=pid,
            advice="it must be a memfd without seals",
        ) from failure
    return signal


def _signal_of(data: bytes) -> int:
    try:
        return msgspec.json.decode(data, type=_Asked).signal
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _news(notes: Notes, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": notes.name,
        "image": notes.image,
        "instance": notes.instance,
        "ports": {str(old): new for old, new in notes.ports.items()},
        "environment": dict(environment),
    }
