"""The lock of a store on a local disk: an flock, which the kernel ends with its holder. Beside it each holder keeps a
lock object that says who it is; that one is for messages only, and being unable to write it changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import threading
import time

from woodfrog.errors import RefusedError
from woodfrog.store import files, keys, owners

_FLOCK = "flock"  # in locks/
_POLL_S = (0.01, 0.1)  # flock(2) has no time-out: it is tried again after a random pause of this length


class DiskLock:
    """See Hold."""

    def __init__(self, locks_fd: int, lock_fd: int, token: str, owner_fd: int) -> None:
        self._locks_fd = locks_fd
        self._lock_fd = lock_fd
        self._token = token
        self._owner_fd = owner_fd

    def check(self) -> None:
        """The kernel keeps it."""

    def release(self) -> None:
        if self._owner_fd >= 0:
            with contextlib.suppress(OSError):  # the object only tells; the next `clean` removes it
                files.unlink(self._token, dir_fd=self._locks_fd)
            os.close(self._owner_fd)
            self._owner_fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def acquire(locks_fd: int, place: str, *, exclusive: bool, purpose: str, wait_s: float) -> DiskLock:
    """RefusedError naming the holders. `locks_fd` stays the caller's, and open as long as the lock."""
    lock_fd = _open(locks_fd)
    if lock_fd < 0:
        return DiskLock(locks_fd, -1, "", -1)
    try:
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock_fd, operation)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _in_use(locks_fd, place, purpose) from None
            threading.Event().wait(random.uniform(*_POLL_S))
        token, owner_fd = _tell(locks_fd, exclusive, purpose)
    except BaseException:
        os.close(lock_fd)
        raise
    return DiskLock(locks_fd, lock_fd, token, owner_fd)


def holders(locks_fd: int) -> list[owners.Owner]:
    """Who has the lock now, as far as they could say."""
    found = []
    for name in files.names_in(locks_fd):
        if not keys.is_key(keys.lock_key(name)):
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            descriptor = os.open(name, files.FILE_FLAGS, dir_fd=locks_fd)
            try:
                owner = owners.decode(files.read_whole(descriptor, keys.OWNER_MAX_BYTES))
                if owner is not None and not files.try_lock_shared(descriptor):
                    found.append(owner)
            finally:
                os.close(descriptor)
    return found


def clean(locks_fd: int) -> None:
    """Remove the objects of holders that are no more."""
    for name in files.names_in(locks_fd):
        if not keys.is_key(keys.lock_key(name)):
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or was not made by us
            descriptor = os.open(name, files.FILE_FLAGS, dir_fd=locks_fd)
            try:
                if files.try_lock(descriptor):
                    files.unlink(name, dir_fd=locks_fd)
            finally:
                os.close(descriptor)


def _open(locks_fd: int) -> int:
    """-1 on a read-only file system without that file: nobody can delete anything there."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(_FLOCK, flags | os.O_CREAT, 0o600, dir_fd=locks_fd)
    except OSError:
        if not os.fstatvfs(locks_fd).f_flag & os.ST_RDONLY:
            raise
    try:
        return os.open(_FLOCK, flags, dir_fd=locks_fd)
    except FileNotFoundError:
        return -1


def _tell(locks_fd: int, exclusive: bool, purpose: str) -> tuple[str, int]:
    token = secrets.token_hex(16)
    try:
        descriptor = files.create_file(token, dir_fd=locks_fd)
    except OSError:
        return token, -1  # a full or read-only disk: the lock is held all the same
    files.try_lock(descriptor)
    with contextlib.suppress(OSError):  # an empty object tells nothing, and harms nothing
        files.write_all(descriptor, owners.this_process(exclusive=exclusive, purpose=purpose).encode())
    return token, descriptor


def _in_use(locks_fd: int, place: str, purpose: str) -> RefusedError:
    who = ", ".join(owner.describe() for owner in holders(locks_fd)) or "a process that could not say who it is"
    return RefusedError(f"the store {place} is in use, so this cannot {purpose}: {who}", advice="wait for it to end")
