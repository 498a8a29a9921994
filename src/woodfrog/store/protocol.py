"""What every store can do. tests/unit/store/test_conformance.py holds each implementation to it.

A store keeps directories under a name and a number and knows nothing of their contents; the manifest is a file of bytes
to it. woodfrog.image.repository makes a place with images of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Entry:
    """One published directory, without a look inside."""

    reference: str
    name: str
    number: int
    path: Path


@dataclass(frozen=True)
class OpenEntry:
    """A published directory, open. The caller owns `dir_fd`: reading goes through it, so that a rename cannot switch
    the directory for another; `path` is for messages and for programs that must be told one."""

    reference: str
    path: Path
    dir_fd: int


@runtime_checkable
class Writer(Protocol):
    """One directory in the making. Until `publish` returns nothing of it can be seen; used in a `with` it aborts at the
    end unless it was published."""

    @property
    def reference(self) -> str:
        """The name it will have: NAME@NUMBER."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def directory(self) -> Path:
        """A local directory of its own, for whoever must be told a path."""

    @property
    def dir_fd(self) -> int:
        """The same, open; it stays the writer's."""

    def create_file(self, filename: str) -> int:
        """A new, empty file in the directory, opened for reading and writing. The writer owns the descriptor and closes
        it at the end. UsageError once it was published or aborted."""

    def publish(self, manifest: Callable[[], bytes]) -> None:
        """Make the directory complete, durable and visible, in this order.

        `manifest` is called once, first; it may still look at the files and change them, and what it raises aborts. The
        bytes it returns become the file `manifest`, written after all others are durable. NoSpaceError when the disk is
        full, RefusedError when the number was taken from outside: then the writer has been aborted as well. An error
        after the name is there says so, and the directory stays."""

    def abort(self) -> None:
        """Remove everything written. Does nothing after publish or a first abort."""

    def __enter__(self) -> Writer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Store(Protocol):
    """A place with directories. References are NAME@NUMBER, or NAME for the newest of that name."""

    @property
    def path(self) -> Path:
        """Where it is, for messages and for looking at the room there."""

    def next_number(self, name: str) -> int:
        """The number that `begin(name)` would give now. Numbers rise and are never used again."""

    def list(self, name: str | None = None) -> list[Entry]:
        """Everything published (of that name), by name and number. Nothing is opened."""

    def open(self, reference: str, *, hold: bool = True) -> OpenEntry:
        """That directory. `hold` keeps it from being removed until its descriptor is closed. NotFoundError;
        BadImageError for what is no directory."""

    def remove(self, reference: str, before_delete: Callable[[Path], None] | None = None) -> str:
        """Remove one directory (a bare name: UsageError, unless it has just one) and return its full reference.
        RefusedError while somebody holds it.

        `before_delete` gets the path of the directory when its name is gone and its files are still there, for what
        belongs to it elsewhere; what it raises is raised once the files are deleted. Any other failure leaves the
        directory whole."""

    def begin(self, name: str, directories: Sequence[str] = ()) -> Writer:
        """Start the next directory of that name, with these empty ones in it. UsageError for a bad name."""

    def free_bytes(self) -> int:
        """What can still be written, as far as is known."""

    def is_current(self) -> bool:
        """Whether its path still leads to the place that it has open."""

    def close(self) -> None:
        """Give its descriptors up; what was opened or begun goes on by its own."""
