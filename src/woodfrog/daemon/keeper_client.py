"""The daemon's side of the keeper's socket: hands descriptors over, takes them back, rewrites notes.

The only Python code that knows the layout of native/wire/keeper.h (a test compares the two). It must never hold
descriptors of its own: `append` and `replace` leave the caller's open, `fetch` gives new ones that the caller closes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from woodfrog import errors

# native/wire/keeper.h
MAGIC = 0x4B524657
VERSION = 1
MAX_FDS = 240
MAX_RECORDS = 4096
KEY_BYTES = 64
Fds = list[int]  # the class below has a method of the name `list`
_MESSAGE = struct.Struct("<IHHiIQQ64s")  # magic version command status fd_count first total key


class Command(IntEnum):
    """WF_KEEPER_COMMANDS of native/wire/keeper.h."""

    append = 1
    fetch = 2
    drop = 3
    list = 4
    replace = 5
    stop = 6
    ping = 7


@dataclass(frozen=True)
class KeeperRecord:
    """What `list` tells of a record: its key and how many descriptors it holds."""

    key: str
    fd_count: int


@dataclass(frozen=True)
class _Reply:
    first: int
    total: int
    key: str
    fds: Fds


class KeeperClient:
    """One connection to the keeper; calls from several threads take turns.

    After a time-out or a broken connection every further call fails: replies could no longer be told apart, so the
    caller makes a new client. What `append` or `replace` returned for is in the keeper; a call that raised because the
    connection broke may or may not have taken effect (`fetch` tells).
    """

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        """Connects. NoDaemonError if nobody listens at `path`."""
        self._path = str(path)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._broken = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(self._path)
        except OSError as error:
            self._socket.close()
            raise errors.NoDaemonError(
                f"The keeper cannot be reached at {self._path}: {os.strerror(error.errno or errno.ETIMEDOUT)}.",
                advice="Start the node daemon through woodfrog, which starts the keeper with it.",
            ) from error

    def append(self, key: str, fds: Sequence[int]) -> int:
        """Adds `fds` to the record `key`, a new one if there is none; returns how many it holds now.

        More than 240 descriptors go in several messages: if a later one fails, the record holds the earlier ones, and
        `details["taken"]` of the error says how many. NoSpaceError when the keeper is full.
        """
        if not fds:
            raise errors.UsageError("A keeper record needs at least one descriptor.")
        total = 0
        for start in range(0, len(fds), MAX_FDS):
            try:
                total = self._exchange(Command.append, key, fds=fds[start : start + MAX_FDS]).total
            except errors.WoodfrogError as error:
                error.details["taken"] = start
                raise
        return total

    def fetch(self, key: str, first: int = 0, count: int | None = None) -> Fds:
        """New descriptors for `count` of the record's (all that follow `first` if None), in order; the caller closes
        them. NotFoundError if there is no such record."""
        fds: Fds = []
        try:
            while count is None or len(fds) < count:
                reply = self._exchange(Command.fetch, key, first=first + len(fds))
                fds.extend(reply.fds)
                if not reply.fds or first + len(fds) >= reply.total:
                    break
        except BaseException:
            _close_all(fds)
            raise
        if count is not None and len(fds) > count:
            _close_all(fds[count:])
            del fds[count:]
        return fds

    def drop(self, key: str) -> None:
        """Closes the record's descriptors in the keeper and forgets it. NotFoundError if there is none."""
        self._exchange(Command.drop, key)

    def list(self) -> list[KeeperRecord]:
        """All records in order of creation."""
        records: list[KeeperRecord] = []
        while True:
            try:
                reply = self._exchange(Command.list, "", first=len(records))
            except errors.NotFoundError:
                return records
            records.append(KeeperRecord(reply.key, reply.total))

    def replace(self, key: str, index: int, fd: int) -> None:
        """Puts `fd` at `index` of the record, in one step, and closes the one that was there."""
        self._exchange(Command.replace, key, first=index, fds=[fd])

    def stop(self) -> None:
        """Tells the keeper to leave and not to start the daemon again. RefusedError while it holds anything."""
        self._exchange(Command.stop, "")

    def ping(self) -> int:
        """The number of records, if the keeper answers."""
        return self._exchange(Command.ping, "").total

    def close(self) -> None:
        """Closes the connection; the records stay in the keeper."""
        self._broken = True
        self._socket.close()

    def __enter__(self) -> KeeperClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, command: Command, key: str, *, first: int = 0, fds: Sequence[int] = ()) -> _Reply:
        name = key.encode("ascii", "replace")
        if len(name) >= KEY_BYTES:
            raise errors.UsageError(f"A keeper key has at most {KEY_BYTES - 1} characters: {key!r}.")
        if first < 0:
            raise errors.UsageError(f"The index of a descriptor cannot be negative: {first}.")
        packet = _MESSAGE.pack(MAGIC, VERSION, command, 0, len(fds), first, 0, name)
        with self._lock:
            if self._broken:
                raise self._lost("the connection was closed before")
            try:
                socket.send_fds(self._socket, [packet], array.array("i", fds))
                data, received, flags = self._receive()
            except OSError as error:
                if error.errno == errno.EBADF and self._socket.fileno() >= 0:  # nothing was sent
                    raise errors.UsageError(f"One of the descriptors for {key!r} is not open.") from error
                self.close()
                raise self._lost(str(error)) from error
            if flags & socket.MSG_CTRUNC:  # the reply itself is whole, the connection stays usable
                _close_all(received)
                raise errors.NoSpaceError(
                    f"This process has no room for the descriptors of {key!r}.", advice=_ADVICE[errno.EMFILE]
                )
            if len(data) != _MESSAGE.size:
                _close_all(received)
                self.close()
                raise self._lost("it closed the connection" if not data else "its reply was cut short")
            magic, version, answered, status, fd_count, at, total, name = _MESSAGE.unpack(data)
            if (magic, version, answered, fd_count) != (MAGIC, VERSION, command, len(received)):
                _close_all(received)
                self.close()
                raise self._lost("its reply does not belong to the request")
        if status:
            _close_all(received)
            raise _error(command, key, status)
        return _Reply(at, total, name.split(b"\0", 1)[0].decode("ascii", "replace"), received)

    def _receive(self) -> tuple[bytes, Fds, int]:
        fds = array.array("i")
        data, ancillary, flags, _ = self._socket.recvmsg(
            _MESSAGE.size, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        return data, fds.tolist(), flags

    def _lost(self, reason: str) -> errors.NoDaemonError:
        return errors.NoDaemonError(
            f"The keeper at {self._path} did not answer: {reason}.",
            advice="Another client may hold its only connection; what it was given before is still there.",
        )


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # closing the rest matters more
            os.close(fd)


_KINDS: dict[int, type[errors.WoodfrogError]] = {
    errno.ENOENT: errors.NotFoundError,
    errno.EBUSY: errors.RefusedError,
    errno.EMFILE: errors.NoSpaceError,
    errno.ENOSPC: errors.NoSpaceError,
    errno.ENOMEM: errors.NoSpaceError,
    errno.EINVAL: errors.UsageError,
    errno.EBADMSG: errors.UsageError,
}
_ADVICE: dict[int, str] = {
    errno.EBUSY: "Resume or drop what is suspended first: `woodfrog ps` lists it.",
    errno.EMFILE: "Raise the hard limit of open files (RLIMIT_NOFILE) of the user and start the daemon again.",
    errno.ENOSPC: f"The keeper holds {MAX_RECORDS} records; resume or drop some.",
}


def _error(command: Command, key: str, status: int) -> errors.WoodfrogError:
    kind = _KINDS.get(status, errors.WoodfrogError)
    about = f" of {key!r}" if key else ""
    return kind(
        f"The keeper refused {command.name}{about}: {os.strerror(status)}.",
        advice=_ADVICE.get(status, ""),
        details={"errno": status, "command": command.name, "key": key},
    )
