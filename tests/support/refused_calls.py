"""System calls that fail when a test says so, of a program and all that it starts, or of a thread of this process.

The kernel asks for each of them (seccomp_unotify(2)), so the second of several can fail, in code that nothing else
reaches: CRIU's within a process that it is restoring. Run with a socket's path and a command, this file is the program
that hands itself over to the test and becomes that command. x86-64.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# asm/unistd_64.h, linux/seccomp.h, linux/bpf_common.h, linux/userfaultfd.h
IOCTL, _SECCOMP, USERFAULTFD = 16, 317, 323
UFFDIO_REGISTER, UFFDIO_COPY = 0xC020AA00, 0xC028AA03
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_GO_ON = 1
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_libc = ctypes.CDLL(None, use_errno=True)


class Call(NamedTuple):
    """One that was asked about: of which thread, its number, its arguments."""

    thread: int
    number: int
    arguments: tuple[int, ...]

    @property
    def what(self) -> int:
        """USERFAULTFD, UFFDIO_REGISTER or UFFDIO_COPY."""
        return self.number if self.number == USERFAULTFD else self.arguments[1]


def listen() -> int:
    """From now on this thread, and what it starts, is asked about; the descriptor on which. It cannot be undone."""
    lines = (
        (_LOAD, 0, 0, 0),  # the number
        (_EQUAL, 5, 0, USERFAULTFD),
        (_EQUAL, 0, 3, IOCTL),
        (_LOAD, 0, 0, 24),  # the low half of the second argument
        (_EQUAL, 2, 0, UFFDIO_REGISTER),
        (_EQUAL, 1, 0, UFFDIO_COPY),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ASK),
    )
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=H6xQ", len(lines), ctypes.addressof(buffer))
    fd = int(_libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, program))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return fd


class Refusing:
    """A context that answers, by `decide`: 0, the call is made, or the error that it fails with."""

    def __init__(self, decide: Callable[[Call], int]) -> None:
        self._decide = decide
        self.refused: list[Call] = []
        self._over, self._end = os.pipe2(os.O_CLOEXEC)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        for thread in self._threads:
            thread.join()
        os.close(self._over)

    def watch(self, listener: int) -> None:
        """Answer what comes from there, which is closed in the end."""
        thread = threading.Thread(target=self._answer_all, args=(listener,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def around(self, program: Path, folder: Path) -> Path:
        """A program in `folder` with that one's name, which runs it and is asked about."""
        meeting = socket.socket(socket.AF_UNIX)
        path = folder / "meeting"
        meeting.bind(os.fspath(path))
        meeting.listen()
        wrapper = folder / program.name
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{__file__}" "{path}" "{program}" "$@"\n')
        wrapper.chmod(0o755)
        thread = threading.Thread(target=self._meet, args=(meeting,), daemon=True)
        thread.start()
        self._threads.append(thread)
        return wrapper

    def _meet(self, meeting: socket.socket) -> None:
        with meeting:
            while self._over not in _readable(meeting.fileno(), self._over):
                with meeting.accept()[0] as connection:
                    _, (listener,), _, _ = socket.recv_fds(connection, 1, 1)
                self.watch(listener)

    def _answer_all(self, listener: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        while not any(fd == self._over or event & select.POLLHUP for fd, event in poll.poll()):
            question = bytearray(80)
            try:
                fcntl.ioctl(listener, _RECEIVE, question)
            except FileNotFoundError:
                continue  # who asked was killed meanwhile
            number, thread, _, system_call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", question)
            call = Call(thread, system_call, tuple(arguments))
            error = self._decide(call)
            if error:
                self.refused.append(call)
            answer = struct.pack("=QqiI", number, 0, -error, 0 if error else _GO_ON)
            try:
                fcntl.ioctl(listener, _ANSWER, bytearray(answer))
            except FileNotFoundError:
                continue
        os.close(listener)


def _readable(*fds: int) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll()]


def main() -> None:
    path, *command = sys.argv[1:]
    listener = listen()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"1"], [listener])
    os.close(listener)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
