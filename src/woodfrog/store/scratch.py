"""A directory for files and directories in the making, each locked by the process that makes it, so that what dead
processes left can be told and removed. It never removes what has not its own form."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from woodfrog.store import files

_NAME = re.compile(r"[0-9a-f]{32}\.(file|dir)")


class ScratchFile:
    """A new file; see TemporaryFile. `name` is None once it has another name, or none."""

    def __init__(self, scratch: Scratch, name: str, fd: int) -> None:
        self._scratch = scratch
        self.name: str | None = name
        self._fd = fd
        self._synced = False

    @property
    def fd(self) -> int:
        return self._fd

    def sync(self) -> None:
        if not self._synced:
            files.sync(self._fd)
            self._synced = True

    def close(self) -> None:
        if self.name is not None:
            files.unlink(self.name, dir_fd=self._scratch.dir_fd)
            self.name = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Scratch:
    """Owns a descriptor of the directory until `close`. Safe to use from several threads."""

    def __init__(self, path: Path, dir_fd: int) -> None:
        self.path = path
        self.dir_fd = dir_fd
        self._directories: dict[Path, int] = {}  # those that this process made, with the lock that says that it lives

    def new_file(self) -> ScratchFile:
        while True:
            name = f"{secrets.token_hex(16)}.file"
            fd = files.create_file(name, dir_fd=self.dir_fd)
            # Between the two calls another process may have found it unlocked and removed it.
            if files.try_lock(fd) and files.is_same(name, fd, dir_fd=self.dir_fd):
                return ScratchFile(self, name, fd)
            os.close(fd)

    def make_directory(self) -> Path:
        """A new, empty directory (0700)."""
        while True:
            name = f"{secrets.token_hex(16)}.dir"
            try:
                fd = files.make_directory(name, dir_fd=self.dir_fd)
            except FileNotFoundError:
                continue  # removed between its two calls
            if files.try_lock(fd) and files.is_same(name, fd, dir_fd=self.dir_fd):
                self._directories[self.path / name] = fd
                return self.path / name
            os.close(fd)

    def remove_directory(self, path: Path) -> None:
        """One that `make_directory` gave out."""
        fd = self._directories.pop(path)
        try:
            files.remove_tree(path.name, dir_fd=self.dir_fd)
        finally:
            os.close(fd)

    def clean(self) -> list[str]:
        """Removes what nobody holds; returns the names."""
        removed = []
        for name in files.names_in(self.dir_fd):
            match = _NAME.fullmatch(name)
            if match is None:
                continue  # put there by someone, and theirs to remove
            flags = files.DIRECTORY_FLAGS if match[1] == "dir" else files.FILE_FLAGS
            try:
                fd = os.open(name, flags, dir_fd=self.dir_fd)
            except OSError:
                continue  # gone meanwhile, or a link: not made by us
            try:
                if files.try_lock(fd):
                    files.remove_tree(name, dir_fd=self.dir_fd)
                    removed.append(name)
            finally:
                os.close(fd)
        return removed

    def close(self) -> None:
        for path in list(self._directories):
            self.remove_directory(path)
        if self.dir_fd >= 0:
            os.close(self.dir_fd)
            self.dir_fd = -1


def default_scratch() -> Scratch:
    """The place for stores that are elsewhere: `$XDG_CACHE_HOME/woodfrog`, else `~/.cache/woodfrog` (0700)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "woodfrog"
    path.mkdir(0o700, parents=True, exist_ok=True)
    fd = files.open_directory(path, what="a cache")
    try:
        files.make_private(path, fd, "the cache")
        scratch = Scratch(path / "tmp", files.ensure_directory("tmp", dir_fd=fd))
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # leftovers cost room only; what needs the room will say so
        scratch.clean()
    return scratch
