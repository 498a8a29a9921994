"""The file-system steps that publishing, reading and removing are made of, each with its durability said.

Everything works on directory descriptors, one component of a path at a time, and never follows a symbolic link.
Nothing here decides an order: tiers/disk.py does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from woodfrog.errors import BadImageError, NotFoundError, RefusedError

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a planted FIFO must not hang us
RENAME_NOREPLACE = 1  # linux/fs.h
_libc = ctypes.CDLL(None, use_errno=True)


def is_in_memory(path: Path) -> bool:
    """Whether it lies on a tmpfs: by the file system's name in the mount table, as Python has no statfs."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] == "tmpfs"
    return False


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


def name_if_absent(source: str, source_dir: int, target: str, target_dir: int) -> bool:
    """Give a regular file the name `target` in place of `source`, atomically, unless that name is taken: False."""
    try:
        if _rename_no_replace(source, source_dir, target, target_dir):
            return True
        # A file system without the flag (some network ones). A second name is put-if-absent on all of them.
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)
    except FileExistsError:
        return False
    os.unlink(source, dir_fd=source_dir)
    return True


def _rename_no_replace(source: str, source_dir: int, target: str, target_dir: int) -> bool:
    """False where the file system cannot do it."""
    result = _libc.renameat2(
        ctypes.c_int(source_dir),
        os.fsencode(source),
        ctypes.c_int(target_dir),
        os.fsencode(target),
        ctypes.c_uint(RENAME_NOREPLACE),
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), target)


def sync(descriptor: int) -> None:
    """An open file or directory durable, as far as the disk is honest."""
    os.fsync(descriptor)


def sync_path(path: os.PathLike[str]) -> None:
    """A directory that may be someone else's, durable; one that may not be opened is left to its owner."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def unlink(name: str, *, dir_fd: int) -> None:
    """Missing is fine."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def is_same(name: str, descriptor: int, *, dir_fd: int) -> bool:
    """Whether that name still leads to the open file or directory."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def read_whole(descriptor: int, size_bytes: int) -> bytes:
    """That many bytes from the beginning, or fewer where the file ends."""
    parts: list[bytes] = []
    at = 0
    while at < size_bytes and (part := os.pread(descriptor, size_bytes - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def make_private(path: os.PathLike[str], descriptor: int, what: str) -> None:
    """A directory closed to others (0700). RefusedError if it belongs to someone else, or if there is something in it
    that others may have written: whoever restores that runs it."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise RefusedError(
            f"{what} {os.fspath(path)} belongs to user {status.st_uid}",
            advice="choose another place with --store or WOODFROG_STORE",
        )
    if stat.S_IMODE(status.st_mode) & 0o022 and names_in(descriptor):
        raise RefusedError(
            f"{what} {os.fspath(path)} may be written by others (mode {stat.S_IMODE(status.st_mode):o})",
            advice="if you trust what is in it: chmod -R go-rwx; else choose another place",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(descriptor, 0o700)


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
