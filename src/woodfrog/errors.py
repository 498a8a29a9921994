"""Every error a person can meet, as values with fields: raised where they are known, printed in one place (the CLI).

An error says what happened, in which phase, what state the target is in now, and what to do. This module imports
nothing of woodfrog and must never format for a terminal.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the command line, documented in docs/operations.md."""

    OK = 0
    FAILED = 1  # the operation failed; the message says what state the target is in
    USAGE = 2
    NOT_FOUND = 3  # no such target, image or process
    REFUSED = 4  # a precondition is not met; nothing was touched
    TIMEOUT = 5  # the target did not come to rest in time; it runs on
    NO_SPACE = 6  # disk, host memory or GPU memory does not suffice
    BAD_IMAGE = 7  # an image is damaged, incomplete or from an incompatible version
    NO_DAEMON = 8  # the node daemon cannot be reached or started
    LOST = 9  # the target is gone and no complete image exists of this operation


class TargetState:
    """What a message says about the target; plain strings so that they travel as JSON."""

    RUNNING = "running"  # as before the operation
    FROZEN = "frozen"  # its memory is held by the keeper; `woodfrog resume` brings it back
    SUSPENDED = "suspended"
    STANDBY = "standby"  # restored from an image and waiting; `woodfrog restore` of that image takes it
    GONE = "gone"  # no longer there; a complete image exists if the operation says so
    UNTOUCHED = "untouched"  # nothing was done to it
    NONE = "none"  # no target involved


class WoodfrogError(Exception):
    """Base of all: `reason` is one sentence, `advice` the way out."""

    exit_code = ExitCode.FAILED

    def __init__(
        self,
        reason: str,
        *,
        advice: str = "",
        phase: str = "",
        pid: int | None = None,
        device: int | None = None,
        target_state: str = TargetState.UNTOUCHED,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice
        self.phase = phase
        self.pid = pid
        self.device = device
        self.target_state = target_state
        self.details: dict[str, Any] = details or {}

    def to_dict(self) -> dict[str, Any]:
        """As it goes over the daemon's socket and out of `--json`."""
        return {
            "error": type(self).__name__,
            "reason": self.reason,
            "advice": self.advice,
            "phase": self.phase,
            "pid": self.pid,
            "device": self.device,
            "target_state": self.target_state,
            "exit_code": int(self.exit_code),
            "details": self.details,
        }


class UsageError(WoodfrogError):
    """The request itself makes no sense."""

    exit_code = ExitCode.USAGE


class NotFoundError(WoodfrogError):
    """No such target, image or process."""

    exit_code = ExitCode.NOT_FOUND


class RefusedError(WoodfrogError):
    """A precondition is not met. Nothing was touched."""

    exit_code = ExitCode.REFUSED


class TimeoutExceededError(WoodfrogError):
    """The target did not come to rest, or a step did not end, within its time."""

    exit_code = ExitCode.TIMEOUT


class NoSpaceError(WoodfrogError):
    """Disk, host memory or GPU memory does not suffice."""

    exit_code = ExitCode.NO_SPACE


class BadImageError(WoodfrogError):
    """An image is damaged, incomplete, or needs something this version or machine does not have."""

    exit_code = ExitCode.BAD_IMAGE


class NoDaemonError(WoodfrogError):
    """The node daemon cannot be reached or started."""

    exit_code = ExitCode.NO_DAEMON


class TargetLostError(WoodfrogError):
    """The target is gone although it should not be."""

    exit_code = ExitCode.LOST


def from_dict(fields: dict[str, Any]) -> WoodfrogError:
    """The error that `to_dict` described; unknown names become the base class."""
    classes = {c.__name__: c for c in _all_errors(WoodfrogError)}
    kind = classes.get(str(fields.get("error")), WoodfrogError)
    return kind(
        str(fields.get("reason", "")),
        advice=str(fields.get("advice", "")),
        phase=str(fields.get("phase", "")),
        pid=fields.get("pid"),
        device=fields.get("device"),
        target_state=str(fields.get("target_state", TargetState.NONE)),
        details=dict(fields.get("details") or {}),
    )


def _all_errors(base: type[WoodfrogError]) -> list[type[WoodfrogError]]:
    found = [base]
    for sub in base.__subclasses__():
        found.extend(_all_errors(sub))
    return found
