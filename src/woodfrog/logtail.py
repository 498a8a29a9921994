"""Reading a growing log file of a running process, woken by inotify and the process's pidfd, never by a clock.

It must never read from before the offset that it was given, and owns every descriptor it opens until `close`.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator
from types import TracebackType

IN_MODIFY = 0x2  # sys/inotify.h
_READ_BYTES = 1 << 16


class LogTail:
    """The output of process `pid` in the file `path` from `offset` on. Use as a context manager."""

    def __init__(self, path: str | os.PathLike[str], offset: int, pid: int) -> None:
        self._log = self._process = self._inotify = -1
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._log = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(self._log, offset, os.SEEK_SET)
            self._inotify = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if self._inotify < 0 or libc.inotify_add_watch(self._inotify, os.fsencode(path), IN_MODIFY) < 0:
                code = ctypes.get_errno()
                raise OSError(code, f"the log cannot be watched: {os.strerror(code)}", os.fspath(path))
            try:
                self._process = os.pidfd_open(pid)
            except ProcessLookupError:
                self._process = -1  # ended and reaped already: what it wrote is all in the file
        except BaseException:
            self.close()
            raise

    def blocks(self, timeout_s: float | None = None) -> Iterator[bytes]:
        """Everything written, as it comes, until the process has ended. TimeoutError when `timeout_s` passes in all."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        if self._process >= 0:
            poll.register(self._process, select.POLLIN)
        ended = self._process < 0
        while True:
            # Ended first, read after: what the process wrote last is then in the file.
            while data := os.read(self._log, _READ_BYTES):
                yield data
            if ended:
                return
            left_ms = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left_ms is not None and left_ms <= 0:
                raise TimeoutError(f"the process still runs after {timeout_s:g} s")
            ready = {descriptor for descriptor, _ in poll.poll(left_ms)}
            if self._inotify in ready:
                os.read(self._inotify, _READ_BYTES)
            ended = self._process in ready

    def lines(self, timeout_s: float | None = None) -> Iterator[str]:
        """The same, as whole lines without their end; a last line without one counts."""
        rest = b""
        for block in self.blocks(timeout_s):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def close(self) -> None:
        for descriptor in (self._log, self._process, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._process = self._inotify = -1

    def __enter__(self) -> LogTail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
