"""Ctrl-C while a request is in progress: seen between two messages, never in the middle of one.

Python raises KeyboardInterrupt wherever it happens to be: within a frame that is then lost, or in a callback that
swallows it. While `deferred` is active the signal is only noted (by the C handler, in a pipe), and `wait` raises. It
must never be active longer than a request, and leaves alone whoever has a SIGINT handler of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator


class Interrupt:
    """What `deferred` yields. `fd` is the reading end of the pipe, or -1 where SIGINT is not ours to defer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def wait(self, connection: socket.socket) -> None:
        """Until something can be received; KeyboardInterrupt when a SIGINT came first, or at any time before."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if self._fd >= 0:
            poll.register(self._fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            # The pipe gets the number of every signal that Python handles.
            if self._fd in ready and signal.SIGINT in os.read(self._fd, 4096):
                raise KeyboardInterrupt
            if connection.fileno() in ready:
                return


@contextlib.contextmanager
def deferred() -> Iterator[Interrupt]:
    """SIGINT is noted for `Interrupt.wait` instead of raised, where it would be raised here: in the main thread, with
    Python's own handler. One that nobody waited for is raised at the end."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield Interrupt(-1)
        return
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    missed = b""
    try:
        yield Interrupt(read)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
        os.close(write)
        missed = os.read(read, 4096)  # never waits: the other end is closed
        os.close(read)
    if signal.SIGINT in missed:
        raise KeyboardInterrupt
