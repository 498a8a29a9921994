"""Waits for restored processes, so that none stays a zombie and none's exit status is lost.

A restored tree is a child of nobody who expects it: CRIU starts it and ends, and the kernel gives it to the nearest
subreaper, which is the daemon. A zombie keeps its number, and a later restore of the same image would fail on it.

One thread waits on pidfds. It reaps only what it was given (`adopt`) and what those leave behind (processes of the same
sessions whose parents ended), never other children of this process: those belong to whoever started them. A process
that ends before its parent is the parent's to wait for; when that ends without, the kernel gives the child to us, and
only then tells of the parent's end. So it is tried again whenever one has ended. Its session would not tell: each of
torchrun's ranks leads one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from woodfrog.errors import WoodfrogError
from woodfrog.target import procfs
from woodfrog.target.identity import Identity

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_REMEMBERED = 4096  # exit statuses kept


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: by `exit_code`, or by `signal` when that is not 0.

    Exit code -1: it was the child of another process, which alone gets to know.
    """

    exit_code: int
    signal: int


_UNKNOWN = ExitStatus(-1, 0)


@dataclass(frozen=True)
class _Watched:
    pidfd: int
    session_id: int


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's. For the daemon, once, at its start."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise WoodfrogError(f"This process could not become a subreaper: {os.strerror(error)}.")


class Reaper:
    """A background thread; close it, or use it in a `with`. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._changed = threading.Condition()
        self._watched: dict[Identity, _Watched] = {}
        self._left: dict[Identity, _Watched] = {}  # ended, and not ours: their parents may wait for them, or end
        self._ended: OrderedDict[Identity, ExitStatus] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="woodfrog-reaper", daemon=True)
        self._thread.start()

    def adopt(self, pids: list[int]) -> list[Identity]:
        """Watch these processes of one restored tree, root first; those that have ended already are reaped at once."""
        adopted = []
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            stat = procfs.stat(pid)
            if stat is None:
                os.close(pidfd)
                continue
            identity = Identity(pid, stat.start_ticks)
            adopted.append(identity)
            with self._changed:
                if identity in self._watched:
                    os.close(pidfd)
                    continue
                self._watched[identity] = _Watched(pidfd, stat.session_id)
                self._selector.register(pidfd, selectors.EVENT_READ, identity)
        self._wake()
        return adopted

    def is_watched(self, identity: Identity) -> bool:
        """Whether this process was adopted and has not been reaped yet."""
        with self._changed:
            return identity in self._watched or identity in self._left

    def status(self, identity: Identity) -> ExitStatus | None:
        """How a process that was adopted has ended; None while it runs."""
        with self._changed:
            return self._ended.get(identity)

    def wait(self, identity: Identity, timeout_s: float | None = None) -> ExitStatus | None:
        """Wait until an adopted process has been reaped; None when the time is over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while identity not in self._ended:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or self._closing:
                    return None
                self._changed.wait(left)
            return self._ended[identity]

    def wait_reaped(self, identities: Iterable[Identity], timeout_s: float) -> bool:
        """Wait until the numbers of these adopted processes are free, which are to have ended with all of their
        parents that are not this process. False when the time is over first."""
        wanted = set(identities)
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or not wanted & (self._watched.keys() | self._left.keys()), timeout_s
            )

    def close(self) -> None:
        """End the thread. Processes that still run are not touched."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()
        for watched in (*self._watched.values(), *self._left.values()):
            os.close(watched.pidfd)
        self._watched.clear()
        self._left.clear()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._wake_write, b"x")

    def _loop(self) -> None:
        while True:
            ready = self._selector.select()
            if self._closing:
                return
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            ended = [key.data for key, _ in ready if isinstance(key.data, Identity)]
            if ended:
                with self._changed:
                    # Taken before the ended ones are forgotten: what they leave behind is of their sessions.
                    sessions = {watched.session_id for watched in self._watched.values()}
                for identity in ended:
                    self._reap(identity)
                for identity in list(self._left):
                    self._reap(identity)  # its parent may be among the ended ones
                self._take_orphans(sessions - {os.getsid(0)})

    def _reap(self, identity: Identity) -> None:
        """Called once the process has ended: it is a zombie, or its own parent has reaped it."""
        with self._changed:
            watched = self._watched.pop(identity, None)
            if watched is not None:
                self._selector.unregister(watched.pidfd)
                self._left[identity] = watched
            watched = self._left.get(identity)
        if watched is None:
            return
        status = _UNKNOWN
        try:
            result = os.waitid(os.P_PIDFD, watched.pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                status = ExitStatus(result.si_status if exited else 0, 0 if exited else result.si_status)
            gone = True
        except ChildProcessError:
            stat = procfs.stat(identity.pid)
            gone = stat is None or stat.start_ticks != identity.start_ticks
        with self._changed:
            if gone:
                del self._left[identity]
                os.close(watched.pidfd)
            if status != _UNKNOWN or identity not in self._ended:
                self._ended[identity] = status
                self._ended.move_to_end(identity)
                while len(self._ended) > _REMEMBERED:
                    self._ended.popitem(last=False)
            self._changed.notify_all()

    def _take_orphans(self, sessions: set[int]) -> None:
        """Adopt what ended processes left to us: children of this process in the sessions of restored trees."""
        with self._changed:
            known = {identity.pid for identity in (*self._watched, *self._left)}
        orphans = []
        for pid in procfs.children(os.getpid()):
            stat = procfs.stat(pid)
            if stat is not None and stat.session_id in sessions and pid not in known:
                orphans.append(pid)
        if orphans:
            self.adopt(orphans)
