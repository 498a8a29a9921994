"""The file-system steps that publishing, reading and removing are made of, each with its durability said.

Everything works on directory descriptors, one component of a path at a time, and never follows a symbolic link.
Nothing here decides an order: disk.py and writer.py do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from woodfrog.errors import BadImageError, NotFoundError

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a planted FIFO must not hang us
RENAME_NOREPLACE = 1  # linux/fs.h
_libc = ctypes.CDLL(None, use_errno=True)


def random_suffix() -> str:
    return secrets.token_hex(4)


def open_directory(path: str | os.PathLike[str], *, dir_fd: int | None = None, what: str = "an image") -> int:
    """A descriptor of the directory, which the caller owns; NotFoundError, or BadImageError for what is none."""
    try:
        return os.open(path, DIRECTORY_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        raise NotFoundError(f"there is no {os.fspath(path)}") from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise BadImageError(
                f"{os.fspath(path)} is a symbolic link or no directory",
                advice=f"{what} is a plain directory: give its real path",
            ) from error
        raise


def open_below(path: str, *, dir_fd: int) -> int:
    """A file below `dir_fd` for reading, opened component by component; OSError as of open(2). The caller owns it."""
    *parents, name = path.split("/")
    current = dir_fd
    try:
        for parent in parents:
            following = os.open(parent, DIRECTORY_FLAGS, dir_fd=current)
            if current != dir_fd:
                os.close(current)
            current = following
        return os.open(name, FILE_FLAGS, dir_fd=current)
    finally:
        if current != dir_fd:
            os.close(current)


def names_in(dir_fd: int) -> list[str]:
    """Names in an open directory, sorted."""
    return sorted(os.listdir(dir_fd))


def list_files(dir_fd: int, prefix: str = "") -> list[str]:
    """Paths of everything below the directory that is not a directory itself, sorted; `dir_fd` stays the caller's."""
    found: list[str] = []
    with os.scandir(dir_fd) as entries:
        names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_directory in names:
        path = f"{prefix}{name}"
        if not is_directory:
            found.append(path)
            continue
        child = os.open(name, DIRECTORY_FLAGS, dir_fd=dir_fd)
        try:
            found.extend(list_files(child, f"{path}/"))
        finally:
            os.close(child)
    return found


def make_directory(name: str, *, dir_fd: int) -> int:
    """A new directory, 0700 whatever the umask, as a descriptor that the caller owns."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=dir_fd)
    os.fchmod(descriptor, 0o700)
    return descriptor


def ensure_directory(name: str, *, dir_fd: int) -> int:
    """That directory, made 0700 if it was not there, as a descriptor that the caller owns."""
    with suppress(FileExistsError):  # ours already, or something else: O_NOFOLLOW | O_DIRECTORY tells
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    return os.open(name, DIRECTORY_FLAGS, dir_fd=dir_fd)


def create_file(name: str, *, dir_fd: int) -> int:
    """A new, empty file, 0600 whatever the umask, for reading and writing; the caller owns the descriptor."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    os.fchmod(descriptor, 0o600)
    return descriptor


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def rename_no_replace(source: str, source_dir: int, target: str, target_dir: int) -> None:
    """Atomic rename; FileExistsError when the target is there, whatever it is. The caller holds the store's lock."""
    result = _libc.renameat2(
        ctypes.c_int(source_dir),
        os.fsencode(source),
        ctypes.c_int(target_dir),
        os.fsencode(target),
        ctypes.c_uint(RENAME_NOREPLACE),
    )
    if result == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), target)
    # A file system without the flag (some network ones). Writers hold the store's lock here, so looking first is safe.
    if exists(target, dir_fd=target_dir):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)


def sync_tree(dir_fd: int, prefix: str = "") -> None:
    """Everything below the directory durable and its owner's alone, files before the directory that names them.

    BadImageError for anything but regular files and directories. The directory itself is left to the caller.
    """
    for name in names_in(dir_fd):
        path = f"{prefix}{name}"
        try:
            descriptor = os.open(name, FILE_FLAGS, dir_fd=dir_fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _not_plain(path) from error
            raise
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                sync_tree(descriptor, f"{path}/")
            elif not stat.S_ISREG(mode):
                raise _not_plain(path)
            private = 0o700 if stat.S_ISDIR(mode) else 0o600
            if stat.S_IMODE(mode) != private:
                os.fchmod(descriptor, private)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _not_plain(path: str) -> BadImageError:
    return BadImageError(f"{path} is a symbolic link or no regular file: only plain files can be in an image")


def exists(name: str, *, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def try_lock(descriptor: int) -> bool:
    """Take the exclusive flock of an open file or directory if nobody has it; it ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_shared(descriptor: int) -> bool:
    """Take the shared flock of an open directory unless somebody has it exclusively; it ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(name: str, *, dir_fd: int) -> Iterator[None]:
    """Hold the exclusive flock of that file (made if need be), waiting for it."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a file or a directory with all that is in it; links are removed, never followed. Missing is fine."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=dir_fd)
        return
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=dir_fd)
    try:
        for entry in names_in(descriptor):
            remove_tree(entry, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=dir_fd)
