"""What a disk may hold after power was cut: a recording of the steps that change a directory tree, and every state that
these steps allow when nothing is certain but what fsync has promised.

Recorded are the calls of this process (create, mkdir, rename, link, unlink, rmdir, fsync), whoever makes them; what is
written into files counts as of its last fsync, bytes included, so writes of native code need no recording. `Recording.
check_complete` compares a replay of everything with the real tree: a change that was not seen would show there.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from woodfrog.store import files

Entries = dict[str, int]  # name: inode


@dataclass
class Step:
    """One change. `text` of a "mark" is the test's own."""

    what: str
    directory: int = 0
    name: str = ""
    inode: int = 0
    content: bytes = b""
    text: str = ""


@dataclass
class Recording:
    """Of the tree at `root`, which is empty at the beginning."""

    root: Path
    steps: list[Step] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)  # inode: "file" or "directory"
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    _next: int = 1

    def mark(self, text: str) -> None:
        """What the program has been told at this point."""
        with self._lock:
            self.steps.append(Step("mark", text=text))

    def check_complete(self) -> None:
        """The replay of all steps is the tree, and every file that has a lasting name was synced as it is now."""
        final = State(self, len(self.steps), None)
        replayed = {path: final.contents[inode] for path, inode in final.files()}
        real = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_file():
                real[str(path.relative_to(self.root))] = path.read_bytes()
        assert set(replayed) == set(real), "a change of a name was not recorded"
        for name, content in real.items():
            if not name.startswith(("tmp/", "locks/", "reserve")):
                assert replayed[name] == content, f"{name} was written after its last fsync"

    @contextlib.contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Records while it is active, what happens below the root."""
        with monkeypatch.context() as patch:
            for name in ("open", "mkdir", "rename", "link", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            patch.setattr(files, "_rename_no_replace", self._rename_no_replace(files._rename_no_replace))
            self._number(self.root.stat())
            self.kinds[0] = "directory"
            yield

    def _number(self, status: os.stat_result) -> int:
        """Of the file system's inodes, which it uses again, a number that is not."""
        key = (status.st_dev, status.st_ino)
        if key == self._key_of_root():
            return 0
        if key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1
        number = self._numbers[key]
        self.kinds[number] = "directory" if stat.S_ISDIR(status.st_mode) else "file"
        return number

    def _key_of_root(self) -> tuple[int, int]:
        status = self.root.stat()
        return status.st_dev, status.st_ino

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """Directory (number) and name, if it is in the tree."""
        base = Path(f"/proc/self/fd/{dir_fd}").readlink() if dir_fd is not None else Path.cwd()
        whole = base / os.fspath(path)
        if not whole.is_relative_to(self.root) or whole == self.root:
            return None
        return self._number(whole.parent.stat()), whole.name

    def _add(self, what: str, place: tuple[int, str], inode: int = 0) -> None:
        self.steps.append(Step(what, place[0], place[1], inode))

    def _open(self, real: Any) -> Any:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            with self._lock:
                place = self._place(path, dir_fd) if flags & os.O_CREAT else None
                new = place is not None and not files.exists(os.fspath(path), dir_fd=dir_fd)  # type: ignore[arg-type]
                descriptor: int = real(path, flags, mode, dir_fd=dir_fd)
                if place is not None and new:
                    self._forget(os.fstat(descriptor))
                    self._add("link", place, self._number(os.fstat(descriptor)))
                return descriptor

        return call

    def _mkdir(self, real: Any) -> Any:
        def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            with self._lock:
                place = self._place(path, dir_fd)
                real(path, mode, dir_fd=dir_fd)
                if place is not None:
                    status = os.stat(path, dir_fd=dir_fd)
                    self._forget(status)
                    self._add("link", place, self._number(status))

        return call

    def _forget(self, status: os.stat_result) -> None:
        self._numbers.pop((status.st_dev, status.st_ino), None)

    def _rename(self, real: Any) -> Any:
        def call(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            with self._lock:
                self._note_rename(
                    source,
                    src_dir_fd,
                    target,
                    dst_dir_fd,
                    lambda: real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd),
                )

        return call

    def _rename_no_replace(self, real: Any) -> Any:
        def call(source: str, source_dir: int, target: str, target_dir: int) -> bool:
            with self._lock:
                self._note_rename(
                    source, source_dir, target, target_dir, lambda: real(source, source_dir, target, target_dir)
                )
                return True

        return call

    def _note_rename(self, source: Any, source_dir: int | None, target: Any, target_dir: int | None, do: Any) -> None:
        before, after = self._place(source, source_dir), self._place(target, target_dir)
        assert before is not None
        assert after is not None
        inode = self._number(os.stat(source, dir_fd=source_dir))
        assert do() is not False, "this file system lacks renameat2(RENAME_NOREPLACE)"
        self._add("link", after, inode)
        self._add("unlink", before)

    def _link(self, real: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> None:
            raise AssertionError("not expected here")

        return call

    def _unlink(self, real: Any) -> Any:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                place = self._place(path, dir_fd)
                real(path, dir_fd=dir_fd)
                if place is not None:
                    self._add("unlink", place)

        return call

    _rmdir = _unlink

    def _fsync(self, real: Any) -> Any:
        def call(descriptor: int) -> None:
            with self._lock:
                real(descriptor)
                status = os.fstat(descriptor)
                number = self._number(status)
                if stat.S_ISDIR(status.st_mode):
                    self.steps.append(Step("sync", inode=number))
                else:
                    content = os.pread(descriptor, status.st_size, 0)
                    self.steps.append(Step("sync", inode=number, content=content))

        return call


class State:
    """The tree after the first `count` steps and a power cut: with `chosen`, what was not synced is there or not by its
    choice; with None, everything has reached the disk."""

    def __init__(self, recording: Recording, count: int, chosen: random.Random | None, keep: float = 0.5) -> None:
        self.directories: dict[int, Entries] = {}
        self.contents: dict[int, bytes] = {}
        self.marks: list[str] = []
        self._recording = recording
        waiting: dict[int, list[Step]] = {}
        for step in recording.steps[:count]:
            if step.what == "mark":
                self.marks.append(step.text)
            elif step.what == "sync" and recording.kinds[step.inode] == "file":
                self.contents[step.inode] = step.content
            elif step.what == "sync":
                self._apply(step.inode, waiting.pop(step.inode, []))
            else:
                waiting.setdefault(step.directory, []).append(step)
        for directory, steps in waiting.items():
            self._apply(directory, [step for step in steps if chosen is None or chosen.random() < keep])
        for inode, kind in recording.kinds.items():
            if kind == "file" and inode not in self.contents:
                # Never synced: nothing, or as many zeros as a file system likes.
                self.contents[inode] = b"" if chosen is None or chosen.random() < 0.5 else bytes(4096)

    def files(self) -> Iterator[tuple[str, int]]:
        """Path and inode of each file that can be reached."""
        yield from self._walk(0, "")

    def build(self, root: Path) -> None:
        """As a real tree, closed to others as a store is."""
        root.mkdir(0o700)
        self._make(0, root)

    def _apply(self, directory: int, steps: list[Step]) -> None:
        entries = self.directories.setdefault(directory, {})
        for step in steps:
            if step.what == "link":
                entries[step.name] = step.inode
            else:
                entries.pop(step.name, None)

    def _walk(self, directory: int, prefix: str) -> Iterator[tuple[str, int]]:
        for name, inode in sorted(self.directories.get(directory, {}).items()):
            if self._recording.kinds[inode] == "directory":
                yield from self._walk(inode, f"{prefix}{name}/")
            else:
                yield f"{prefix}{name}", inode

    def _make(self, directory: int, path: Path) -> None:
        for name, inode in self.directories.get(directory, {}).items():
            if self._recording.kinds[inode] == "directory":
                (path / name).mkdir(0o700)
                self._make(inode, path / name)
            else:
                (path / name).write_bytes(self.contents[inode])
