"""A folder in memory that no path leads to but that of its owner's descriptor: a tmpfs that is mounted nowhere.

CRIU's files are the target's memory, written while it stands still. Memory in large pieces (huge=within_size: as large
as the writes) takes a fraction of the time of a common tmpfs's small pages, and no disk has to keep up. The folder is
gone with its last descriptor, so a killed daemon leaves nothing. It needs CAP_SYS_ADMIN and memory; who cannot have one
uses a disk.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from woodfrog.errors import NoSpaceError
from woodfrog.operations import room

log = logging.getLogger(__name__)

# fsopen(2), fsconfig(2), fsmount(2), linux/mount.h; since Linux 5.2, with the same numbers on every architecture.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_SMALL_BYTES = 64 << 20  # for files that are not pages of memory
_FULL_BYTES = 4 << 20  # with less left it was this folder that had no space: CRIU writes larger pieces

_libc = ctypes.CDLL(None, use_errno=True)


class MemoryFolder:
    """Made by `make`; `path` is an empty folder (0700), good for every process that may look into this one, until
    `close`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}") / "files"
        self.path.mkdir(mode=0o700)

    @classmethod
    def make(cls, size_bytes: int) -> MemoryFolder | None:
        """With room for files of so many bytes in all, as far as is known, if the host has twice as much to give; else,
        and where this process may not mount, None. It can grow to half of what the host has."""
        if not room.host_has(2 * size_bytes):
            return None
        try:
            return cls(_mounted(max(size_bytes + _SMALL_BYTES, room.host_available_bytes() // 2)))
        except OSError as failure:
            refused = failure.errno in (errno.EPERM, errno.ENOSYS, errno.EINVAL)  # EINVAL: no huge pages in this kernel
            log.log(logging.DEBUG if refused else logging.WARNING, "no folder in memory: %s", failure)
            return None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Of a NoSpaceError from inside, whose writer takes it for a disk, says that it was this folder, if it was."""
        try:
            yield
        except NoSpaceError as failure:
            status = os.statvfs(self.path)
            if status.f_bavail * status.f_frsize >= _FULL_BYTES:
                raise
            limit_gb = status.f_blocks * status.f_frsize / 1e9
            raise NoSpaceError(
                f"The CPU side outgrew the {limit_gb:.1f} GB of memory that were set apart for it when it all began.",
                advice="Repeat it: what the target has grown to is counted anew, and a disk is used if need be.",
                phase=failure.phase,
                pid=failure.pid,
                target_state=failure.target_state,
                details=failure.details,
            ) from failure

    def close(self) -> None:
        """Give its memory back. Safe to repeat."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _mounted(limit_bytes: int) -> int:
    """A descriptor of a new tmpfs's root; OSError."""
    context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        for key, value in (("huge", "within_size"), ("size", str(limit_bytes)), ("mode", "0700")):
            _call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, _NOSUID | _NODEV | _NOEXEC)
    finally:
        os.close(context)


def _call(number: int, *arguments: int | bytes | None) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *(_word(one) for one in arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _word(value: int | bytes | None) -> ctypes.c_long | ctypes.c_char_p:
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value)
