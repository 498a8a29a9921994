"""A store's files on a local disk. Every key is a path below one directory; a file gets its name by one atomic step
after its bytes are durable, and the directories that lead to it are made durable before anyone is told.

It must never follow a symbolic link below the store's own path, or remove what is not under one of the store's keys.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from woodfrog._native.transfer import Progress
from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import files, keys, space
from woodfrog.store.entries import Hold
from woodfrog.store.scratch import Scratch, ScratchFile
from woodfrog.store.tiers import disk_lock
from woodfrog.store.tiers.protocol import Listed, TemporaryFile

_TMP = "tmp"
_DIRECTORIES = ("packs", "index", "images", "locks", _TMP)
_RESERVE = "reserve"
RESERVE_BYTES = 1 << 20  # room for a mark and for the index of some ten thousand chunks on a disk that is full
_OWN = {*_DIRECTORIES, _RESERVE, keys.CONFIG}
_SYNCS_AT_ONCE = 16
_T = TypeVar("_T")
PACK_BYTES = 512 << 20  # few enough files for an image of hundreds of GB, small enough to be rewritten by prune


class DiskPack:
    """See OpenPack."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    def fetch(self, ranges: Iterable[tuple[int, int]], progress: Progress | None = None) -> None:
        """It is all here."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskTier:
    """See Tier. Holds a descriptor of the directory until `close`."""

    local = True
    pack_bytes = PACK_BYTES

    def __init__(self, path: Path, *, create: bool = True, url: str | None = None) -> None:
        """Makes the directory (0700) if need be, and removes what dead writers left.

        NotFoundError where there is none and `create` is false; RefusedError when it belongs to someone else;
        UsageError for a directory with something else in it; BadImageError when it is no directory."""
        self._path = path.absolute()
        self._url = url if url is not None else str(self._path)
        self._fd = self._locks_fd = -1
        self._scratch: Scratch | None = None
        try:
            self._open(create)
        except OSError as error:
            self.close()
            raise RefusedError(
                f"the store {self._path} cannot be used: {error.strerror}",
                advice="choose another place with --store or WOODFROG_STORE",
            ) from error
        except WoodfrogError:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._url

    @property
    def path(self) -> Path:
        return self._path

    def get(self, key: str, max_bytes: int) -> bytes | None:
        try:
            descriptor = files.open_below(key, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._not_plain(key) from error
        try:
            size = self._size(key, descriptor)
            if size > max_bytes:
                raise BadImageError(
                    f"{self._path / key} has {size} bytes, and at most {max_bytes} are possible",
                    advice="it was not written by woodfrog: look at it before you use the store",
                )
            return files.read_whole(descriptor, size)
        finally:
            os.close(descriptor)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._telling_full(), contextlib.ExitStack() as stack:
            file = self._write(data)
            stack.callback(file.close)
            fault_point("store.put.written")
            directory, name = self._directory_of(key)
            stack.callback(os.close, directory)
            assert file.name is not None
            if not files.name_if_absent(file.name, self._tmp.dir_fd, name, directory):
                return False
            file.name = None
            # It exists from here on: whatever fails now, it must not be taken away again.
            try:
                fault_point("store.put.named")
                self._sync_directories([key])
            except OSError as error:
                raise WoodfrogError(
                    f"{self._path / key} is complete, but its name may not survive a power cut ({error.strerror})",
                    advice="see to the disk, then `woodfrog verify`",
                    details={"key": key},
                ) from error
        return True

    def replace(self, key: str, data: bytes) -> None:
        with self._telling_full(), contextlib.ExitStack() as stack:
            file = self._write(data)
            stack.callback(file.close)
            directory, name = self._directory_of(key)
            stack.callback(os.close, directory)
            assert file.name is not None
            os.rename(file.name, name, src_dir_fd=self._tmp.dir_fd, dst_dir_fd=directory)
            file.name = None
            self._sync_directories([key])

    def new_file(self) -> ScratchFile:
        with self._telling_full():
            return self._tmp.new_file()

    def put_files(self, items: Sequence[tuple[str, TemporaryFile]]) -> None:
        with self._telling_full():
            _side_by_side(lambda file: file.sync(), [file for _, file in items])
            for key, file in items:
                assert isinstance(file, ScratchFile)
                self._put_file(key, file)
            self._sync_directories([key for key, _ in items])

    def open_pack(self, key: str, size_bytes: int) -> DiskPack:
        try:
            descriptor = files.open_below(key, dir_fd=self._fd)
        except FileNotFoundError:
            raise NotFoundError(
                f"there is no {key} in {self._url}", advice="`woodfrog verify` says what lacks"
            ) from None
        except OSError as error:
            raise self._not_plain(key) from error
        try:
            size = self._size(key, descriptor)
            if size != size_bytes:
                raise BadImageError(
                    f"{self._path / key} has {size} bytes instead of {size_bytes}",
                    advice="`woodfrog repair` saves what can be saved",
                )
        except BaseException:
            os.close(descriptor)
            raise
        return DiskPack(descriptor)

    def list(self, prefix: str) -> Iterator[Listed]:
        try:
            descriptor = self._open_directory(prefix.rstrip("/"))
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            yield from self._walk(descriptor, prefix, depth=prefix.count("/"))
        finally:
            os.close(descriptor)

    def delete(self, keys_: Sequence[str]) -> None:
        for key in keys_:
            parent, _, name = key.rpartition("/")
            try:
                directory = self._open_directory(parent)
            except FileNotFoundError:
                continue
            try:
                files.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)
        self._sync_directories(keys_)

    def acquire(self, *, exclusive: bool, purpose: str, wait_s: float) -> Hold:
        return disk_lock.acquire(self._locks_fd, self._url, exclusive=exclusive, purpose=purpose, wait_s=wait_s)

    def free_bytes(self) -> int:
        return space.free_bytes(self._path)

    def clock_s(self) -> float:
        return time.time()

    def make_directory(self) -> Path:
        with self._telling_full():
            return self._tmp.make_directory()

    def remove_directory(self, path: Path) -> None:
        self._tmp.remove_directory(path)

    def clean(self) -> builtins.list[str]:
        if self._read_only():
            return []  # reading must be possible all the same
        disk_lock.clean(self._locks_fd)
        return self._tmp.clean()

    def release_reserve(self) -> bool:
        if not files.exists(_RESERVE, dir_fd=self._fd):
            return False
        files.unlink(_RESERVE, dir_fd=self._fd)
        return True

    def restore_reserve(self) -> None:
        if files.exists(_RESERVE, dir_fd=self._fd):
            return
        # Best effort: on a disk without even this room nothing is gained by failing.
        with contextlib.suppress(OSError):
            descriptor = files.create_file(_RESERVE, dir_fd=self._fd)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            except OSError:
                files.unlink(_RESERVE, dir_fd=self._fd)
            finally:
                os.close(descriptor)

    def is_current(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        for descriptor in (self._fd, self._locks_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._locks_fd = -1
        if self._scratch is not None:
            self._scratch.close()

    @property
    def spool(self) -> Path:
        return self._path / _TMP

    @property
    def _tmp(self) -> Scratch:
        assert self._scratch is not None
        return self._scratch

    def _open(self, create: bool) -> None:
        if not create and not self._path.exists():
            raise NotFoundError(f"there is no store at {self._url}", advice="give the place of one with --store")
        new = [path for path in (self._path, *self._path.parents) if not path.exists()]
        self._path.mkdir(0o700, parents=True, exist_ok=True)
        self._fd = files.open_directory(self._path, what="a store")
        there = set(files.names_in(self._fd))
        if keys.CONFIG not in there and there - _OWN:
            raise UsageError(
                f"{self._path} is no store, and there is something else in it",
                advice="give a directory of its own with --store or WOODFROG_STORE",
            )
        files.make_private(self._path, self._fd, "the store")
        if self._read_only() and not there >= set(_DIRECTORIES):
            raise RefusedError(f"{self._path} is read-only and no complete store", advice="choose another place")
        for name in _DIRECTORIES:
            descriptor = files.ensure_directory(name, dir_fd=self._fd)
            if name == "locks":
                self._locks_fd = descriptor
            elif name == _TMP:
                self._scratch = Scratch(self._path / _TMP, descriptor)
            else:
                os.close(descriptor)
        if self._read_only():
            return
        self.clean()
        if keys.CONFIG not in there:
            files.sync(self._fd)
            for path in new or [self._path]:
                files.sync_path(path.parent)
            self.restore_reserve()

    def _read_only(self) -> bool:
        return bool(os.fstatvfs(self._fd).f_flag & os.ST_RDONLY)

    def _write(self, data: bytes) -> ScratchFile:
        file = self._tmp.new_file()
        try:
            files.write_all(file.fd, data)
            files.sync(file.fd)
        except BaseException:
            file.close()
            raise
        return file

    def _put_file(self, key: str, file: ScratchFile) -> None:
        directory, name = self._directory_of(key)
        try:
            assert file.name is not None, "a file gets a key once"
            # One that is there should have the same bytes, but may be damaged; whoever has it open keeps it.
            os.rename(file.name, name, src_dir_fd=self._tmp.dir_fd, dst_dir_fd=directory)
            file.name = None
        finally:
            os.close(directory)

    def _directory_of(self, key: str) -> tuple[int, str]:
        """The directory of a key, made if need be, as a descriptor that the caller owns; and the name in it."""
        *parents, name = key.split("/")
        current = os.dup(self._fd)
        for parent in parents:
            try:
                following = files.ensure_directory(parent, dir_fd=current)
            finally:
                os.close(current)
            current = following
        return current, name

    def _open_directory(self, path: str) -> int:
        current = os.dup(self._fd)
        for part in filter(None, path.split("/")):
            try:
                following = os.open(part, files.DIRECTORY_FLAGS, dir_fd=current)
            finally:
                os.close(current)
            current = following
        return current

    def _sync_directories(self, changed: Sequence[str]) -> None:
        """Every directory on the way to these keys, the deepest first: someone else may have made one and died."""
        paths = {""}
        for key in changed:
            parts = key.split("/")[:-1]
            paths.update("/".join(parts[: depth + 1]) for depth in range(len(parts)))
        deepest = max(map(_depth, paths))
        for depth in range(deepest, -1, -1):
            _side_by_side(self._sync_directory, [path for path in sorted(paths) if _depth(path) == depth])

    def _sync_directory(self, path: str) -> None:
        try:
            descriptor = self._open_directory(path)
        except FileNotFoundError:
            return  # nothing was deleted there
        try:
            files.sync(descriptor)
        finally:
            os.close(descriptor)

    def _walk(self, descriptor: int, prefix: str, depth: int) -> Iterator[Listed]:
        with os.scandir(descriptor) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in found:
            key = f"{prefix}{name}"
            try:
                if is_directory and depth < 2:  # no key is deeper
                    child = os.open(name, files.DIRECTORY_FLAGS, dir_fd=descriptor)
                    try:
                        yield from self._walk(child, f"{key}/", depth + 1)
                    finally:
                        os.close(child)
                elif keys.is_key(key):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Listed(key, status.st_size, status.st_mtime)
            except FileNotFoundError:
                continue  # it went away meanwhile

    def _size(self, key: str, descriptor: int) -> int:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._not_plain(key)
        return status.st_size

    def _not_plain(self, key: str) -> BadImageError:
        return BadImageError(
            f"{self._path / key} cannot be opened as a plain file of a store",
            advice="a store has no links and no special files: look at who put it there",
        )

    def _telling_full(self) -> contextlib.AbstractContextManager[None]:
        return space.telling_full(self._path)


def _depth(path: str) -> int:
    return path.count("/") + 1 if path else 0


def _side_by_side(sync: Callable[[_T], None], things: Sequence[_T]) -> None:
    """One after the other each would wait for a transaction of the file system's of its own; together they share one.
    Returns, or raises, when all have been tried."""
    if len(things) < 2:
        for thing in things:
            sync(thing)
        return
    with ThreadPoolExecutor(min(len(things), _SYNCS_AT_ONCE), thread_name_prefix="woodfrog-sync") as pool:
        tried = [pool.submit(sync, thing) for thing in things]
    for future in tried:
        future.result()
