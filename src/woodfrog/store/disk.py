"""Directories under a name and a number on a local disk (docs/format.md, "Layout of a store").

Numbers are given out, and abandoned parts removed, under the store's lock; a part is abandoned when nobody holds the
flock of its directory. It must never follow a symbolic link below the store's own path, or remove what it cannot name.
"""

from __future__ import annotations

import builtins
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import files, names, space
from woodfrog.store.protocol import Entry, OpenEntry
from woodfrog.store.writer import DiskWriter


def default_path() -> Path:
    """$WOODFROG_STORE, else the user's own data directory."""
    if configured := os.environ.get("WOODFROG_STORE"):
        return Path(configured)
    return Path.home() / ".local" / "share" / "woodfrog" / "images"


class DiskStore:
    """See Store. Holds two directory descriptors until `close`; safe to use from several threads and processes."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Makes the directory (0700) if need be, and removes what dead writers left.

        RefusedError when it belongs to someone else, BadImageError when it is no directory.
        """
        self._path = Path(path if path is not None else default_path()).absolute()
        self.dir_fd = self.tmp_fd = -1
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            self.dir_fd = files.open_directory(self.path, what="a store")
            _check_private(self.path, self.dir_fd)
            self.tmp_fd = files.ensure_directory(names.TMP, dir_fd=self.dir_fd)
            # Where nobody can write there is nothing to remove, and reading must still be possible.
            if not os.statvfs(self.dir_fd).f_flag & os.ST_RDONLY:
                self.clean()
        except OSError as error:
            self.close()
            raise RefusedError(
                f"the store {self.path} cannot be used: {error.strerror}",
                advice="choose another place with --store or WOODFROG_STORE",
            ) from error
        except WoodfrogError:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def lock(self) -> AbstractContextManager[None]:
        """The store's lock, held for moments. Not for callers outside this package."""
        return files.locked(names.LOCK, dir_fd=self.dir_fd)

    def next_number(self, name: str) -> int:
        names.check_name(name)
        taken = [self._mark(name)]
        for directory in (self.dir_fd, self.tmp_fd):
            for entry in files.names_in(directory):
                # In .tmp a random suffix follows the number: NAME@NUMBER-xxxxxxxx.
                whole = entry.rpartition("-")[0] if directory == self.tmp_fd else entry
                match = names.REFERENCE.fullmatch(whole)
                if match and match[1] == name:
                    taken.append(int(match[2]))
        return max(taken) + 1

    def list(self, name: str | None = None) -> builtins.list[Entry]:
        return [
            Entry(f"{found}@{number}", found, number, self.path / f"{found}@{number}")
            for found, number in self._numbered()
            if name is None or found == name
        ]

    def open(self, reference: str, *, hold: bool = True) -> OpenEntry:
        exact = self._resolve(reference)
        path = self.path / exact
        try:
            # Relative to the descriptor: the path cannot be switched; absolute only for messages and CRIU.
            descriptor = os.open(exact, files.DIRECTORY_FLAGS, dir_fd=self.dir_fd)
        except FileNotFoundError:
            raise self._no(exact) from None
        except NotADirectoryError:  # a symbolic link too
            raise BadImageError(
                f"{path} is a symbolic link or no directory", advice="an image is a plain directory: give its real path"
            ) from None
        if hold and not files.try_lock_shared(descriptor):
            os.close(descriptor)  # it is being removed
            raise self._no(exact)
        return OpenEntry(exact, path, descriptor)

    def remove(self, reference: str, before_delete: Callable[[Path], None] | None = None) -> str:
        name, number = names.parse_reference(reference)
        if number is None and len([found for found, _ in self._numbered() if found == name]) > 1:
            raise UsageError(f"{name} has several images", advice=f"say which: {name}@NUMBER")
        exact = self._resolve(reference)
        name, number = names.parse_reference(exact)
        assert number is not None
        trash = f"{names.REMOVED}{files.random_suffix()}"
        held = self._hold_exclusively(exact)
        try:
            with self.lock():
                if number > self._mark(name):
                    self._write_mark(name, number)
                try:
                    files.rename_no_replace(exact, self.dir_fd, trash, self.tmp_fd)
                except FileNotFoundError:
                    raise self._no(exact) from None
                fault_point("store.remove.renamed")
                os.fsync(self.dir_fd)
            # The lock on the directory itself keeps `clean` away from it meanwhile.
            try:
                if before_delete is not None:
                    before_delete(self.path / names.TMP / trash)
            finally:
                files.remove_tree(trash, dir_fd=self.tmp_fd)
        finally:
            os.close(held)
        return exact

    def begin(self, name: str, directories: Sequence[str] = ()) -> DiskWriter:
        names.check_name(name)
        with self.lock():
            self._clean_locked()
            number = self.next_number(name)
            temporary = f"{name}@{number}-{files.random_suffix()}"
            try:
                dir_fd = files.make_directory(temporary, dir_fd=self.tmp_fd)
            except OSError as error:
                if error.errno in space.FULL:
                    raise space.full(self.path, error) from error
                raise
            files.try_lock(dir_fd)  # cannot fail: nobody has seen this directory, and the store is locked
        writer = DiskWriter(self, name, number, temporary, dir_fd)
        try:
            for directory in directories:
                os.close(files.make_directory(directory, dir_fd=dir_fd))
            fault_point("store.begin")
        except OSError as error:
            writer.abort()
            if error.errno in space.FULL:
                raise space.full(self.path, error) from error
            raise
        except BaseException:
            writer.abort()
            raise
        return writer

    def free_bytes(self) -> int:
        return space.free_bytes(self.path)

    def is_current(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.dir_fd))
        except OSError:
            return False

    def clean(self) -> builtins.list[str]:
        """Remove what dead writers and interrupted removals left; returns the names removed."""
        with self.lock():
            return self._clean_locked()

    def close(self) -> None:
        """Calling it again does nothing."""
        for descriptor in (self.dir_fd, self.tmp_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.dir_fd = self.tmp_fd = -1

    def _clean_locked(self) -> builtins.list[str]:
        removed = []
        for entry in files.names_in(self.tmp_fd):
            # Only what has our own form; anything else was put there by someone and is theirs to remove.
            if not entry.startswith(names.REMOVED) and not names.REFERENCE.fullmatch(entry.rpartition("-")[0]):
                continue
            try:
                descriptor = os.open(entry, files.DIRECTORY_FLAGS, dir_fd=self.tmp_fd)
            except OSError:
                continue  # a file or a link: not made by us
            try:
                if files.try_lock(descriptor):
                    files.remove_tree(entry, dir_fd=self.tmp_fd)
                    removed.append(entry)
            finally:
                os.close(descriptor)
        return removed

    def _resolve(self, reference: str) -> str:
        name, number = names.parse_reference(reference)
        if number is None:
            numbers = [found_number for found, found_number in self._numbered() if found == name]
            if not numbers:
                raise self._no(f"of {name}")
            number = max(numbers)
        return f"{name}@{number}"

    def _hold_exclusively(self, reference: str) -> int:
        """The image's directory with its exclusive lock, as a descriptor that the caller owns."""
        try:
            descriptor = os.open(reference, files.DIRECTORY_FLAGS, dir_fd=self.dir_fd)
        except FileNotFoundError:
            raise self._no(reference) from None
        except NotADirectoryError:
            raise BadImageError(
                f"{self.path / reference} is no directory", advice="it was not made by woodfrog: remove it by hand"
            ) from None
        if not files.try_lock(descriptor):
            os.close(descriptor)
            raise RefusedError(f"{reference} is in use", advice="wait for the restore or verify that reads it to end")
        return descriptor

    def _no(self, what: str) -> NotFoundError:
        return NotFoundError(f"there is no image {what} in {self.path}", advice="`woodfrog images` lists what there is")

    def _numbered(self) -> Iterator[tuple[str, int]]:
        found = []
        for entry in files.names_in(self.dir_fd):
            if match := names.REFERENCE.fullmatch(entry):
                found.append((match[1], int(match[2])))
        return iter(sorted(found))

    def _mark(self, name: str) -> int:
        try:
            descriptor = os.open(f"{names.MARKS}/{name}", files.FILE_FLAGS, dir_fd=self.dir_fd)
        except FileNotFoundError:
            return 0
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(16).strip()
        if not text.isdigit():
            raise BadImageError(
                f"{self.path}/{names.MARKS}/{name} does not hold a number",
                advice=f"write into it the highest number that {name} ever had, or remove the file",
            )
        return int(text)

    def _write_mark(self, name: str, number: int) -> None:
        marks = files.ensure_directory(names.MARKS, dir_fd=self.dir_fd)
        try:
            # A name never begins with a dot, so this cannot meet another mark.
            temporary = f".{name}-{files.random_suffix()}"
            descriptor = files.create_file(temporary, dir_fd=marks)
            try:
                files.write_all(descriptor, b"%d\n" % number)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, name, src_dir_fd=marks, dst_dir_fd=marks)
            os.fsync(marks)
        except OSError as error:
            if error.errno in space.FULL:
                raise space.full(self.path, error) from error
            raise
        finally:
            os.close(marks)


def _check_private(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise RefusedError(
            f"the store {path} belongs to user {status.st_uid}",
            advice="choose another place with --store or WOODFROG_STORE",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(descriptor, 0o700)
