"""One process that stays the same one: a pid alone may belong to somebody else a moment later.

A `ProcessHandle` holds a pidfd and the process's start time; each later step asks it whether that process is still
there, and signals go through the pidfd, so they can never reach a stranger. Must never signal by bare pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass

from woodfrog.errors import NotFoundError, TargetLostError, TargetState
from woodfrog.target import procfs


@dataclass(frozen=True, order=True)
class Identity:
    """A process for as long as this machine is up: no two have the same pid and start time (clock ticks since boot)."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether this process still exists and is not a zombie."""
        stat = procfs.stat(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"


class ProcessHandle:
    """A held process. Owns a pidfd; close it, or use it in a `with`."""

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        """NotFoundError when there is no such process; TargetLostError when it is another than `start_ticks` says."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _gone(pid) from None
        except OSError as error:
            # EINVAL: the number belongs to a thread that leads no process (ENOENT on newer kernels).
            raise NotFoundError(
                f"{pid} is not the number of a process ({error.strerror}); is it a thread's?", pid=pid
            ) from error
        # The pidfd was opened first: when the start time read now is right, it is right for what the pidfd holds.
        stat = procfs.stat(pid)
        if stat is None:
            os.close(self._pidfd)
            raise _gone(pid)
        if start_ticks is not None and stat.start_ticks != start_ticks:
            os.close(self._pidfd)
            raise TargetLostError(
                f"Process {pid} is another one than before: the target has ended and its number was given away.",
                pid=pid,
                target_state=TargetState.GONE,
            )
        self.identity = Identity(pid, stat.start_ticks)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def pidfd(self) -> int:
        """For poll and select: readable once the process has ended. Owned by this object."""
        return self._pidfd

    def is_alive(self) -> bool:
        """False once it has ended, also while it is still a zombie."""
        return self._pidfd >= 0 and not _readable(self._pidfd, 0)

    def ends_within(self, timeout_s: float) -> bool:
        """Whether it has ended, or does so in that time. Not known, so False, once this is closed."""
        return self._pidfd >= 0 and _readable(self._pidfd, timeout_s)

    def require_alive(self) -> None:
        """TargetLostError when the process has ended."""
        if not self.is_alive():
            raise TargetLostError(
                f"The target (process {self.pid}) has ended.",
                advice="Its output may say why; an earlier image can be restored.",
                pid=self.pid,
                target_state=TargetState.GONE,
            )

    def signal(self, number: int) -> None:
        """Send a signal; TargetLostError when the process has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            self.require_alive()
            raise

    def kill(self, timeout_s: float = 10.0) -> bool:
        """SIGKILL, and wait for the end; False when it has not ended in time (it hangs in the kernel)."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended (it may still be a zombie); whether it has."""
        return _readable(self._pidfd, timeout_s)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> ProcessHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(int(timeout_s * 1000)))


def _gone(pid: int) -> NotFoundError:
    return NotFoundError(
        f"Process {pid} does not exist.",
        advice="`woodfrog ps` lists the targets.",
        pid=pid,
        target_state=TargetState.GONE,
    )
