"""What every tier can do: keep immutable files under keys, durably, and lock. tests/unit/store/test_conformance.py
holds each implementation to it.

A key is one of those of woodfrog.store.keys: relative, '/'-separated, already checked. A tier knows nothing of what is
in a file, and must never show a file under its key before the whole of it is durable.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from woodfrog._native.transfer import Progress
from woodfrog.store.entries import Hold


class Listed(NamedTuple):
    """One file of a tier, as a listing tells it."""

    key: str
    size_bytes: int
    modified_unix_s: float  # by the clock of whatever keeps the file: compare it with Tier.clock_s() only


class TemporaryFile(Protocol):
    """A new file on a local disk that nobody else sees, until `Tier.put_files` gives it a key."""

    @property
    def fd(self) -> int:
        """For reading and writing; it stays the file's."""

    def sync(self) -> None:
        """Its bytes are durable; nothing may be written afterwards. What was not synced, `put_files` syncs where that
        is needed."""

    def close(self) -> None:
        """Removes the file, unless it was given a key. Calling it again does nothing."""


@runtime_checkable
class OpenPack(Protocol):
    """A pack that can be read through a local descriptor."""

    @property
    def fd(self) -> int:
        """For reading; it stays the pack's. On a remote tier, a local file with only the ranges that were fetched."""

    def fetch(self, ranges: Iterable[tuple[int, int]], progress: Progress | None = None) -> None:
        """Makes these (offset, size) readable; nothing to do on a local tier. BadImageError if the pack is shorter."""

    def close(self) -> None:
        """Calling it again does nothing."""


@runtime_checkable
class Tier(Protocol):
    """A place with files under keys. Safe to use from several threads."""

    @property
    def url(self) -> str:
        """What opens this place again: a path, `ram:NAME` or `s3://BUCKET/PREFIX`."""

    @property
    def local(self) -> bool:
        """Whether packs are plain files of this machine."""

    @property
    def path(self) -> Path | None:
        """The directory, of a local tier."""

    @property
    def spool(self) -> Path:
        """The local directory that new files and directories are in: for messages and for looking at the room there."""

    @property
    def pack_bytes(self) -> int:
        """How large a pack should become here."""

    def get(self, key: str, max_bytes: int) -> bytes | None:
        """The whole file, or None if there is none. BadImageError when it is larger than `max_bytes` or not a plain
        file; nothing of it is read then."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Durable under the key when True is returned; False, and nothing is changed, if the key exists. Of any number
        of callers with the same key exactly one gets True."""

    def replace(self, key: str, data: bytes) -> None:
        """Durable under the key, in place of what was there; a crash leaves the old or the new, never a mixture."""

    def new_file(self) -> TemporaryFile:
        """A new, empty file, for what becomes a pack or needs room for a while. The caller closes it."""

    def put_files(self, files: Sequence[tuple[str, TemporaryFile]]) -> None:
        """Each file durable under its key, all or some of them on failure. The keys name the contents: what is there
        already is replaced, because it has the same bytes unless it is damaged."""

    def open_pack(self, key: str, size_bytes: int) -> OpenPack:
        """NotFoundError; BadImageError for what is no plain file of that size."""

    def list(self, prefix: str) -> Iterator[Listed]:
        """Every file whose key begins with the directory `prefix` ("packs/"), in no order. What has no proper key is
        left out."""

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are fine. Only under the exclusive lock."""

    def acquire(self, *, exclusive: bool, purpose: str, wait_s: float) -> Hold:
        """The store's lock: shared (any number of them) or exclusive (alone). RefusedError, naming who holds it, when
        it cannot be had within `wait_s`."""

    def free_bytes(self) -> int | None:
        """What can still be written; None where nobody knows."""

    def clock_s(self) -> float:
        """Now, by the clock that `Listed.modified_unix_s` is of."""

    def make_directory(self) -> Path:
        """A private, empty directory on a local disk (0700), removed by `remove_directory`, or by the next user of the
        place if this process dies."""

    def remove_directory(self, path: Path) -> None: ...

    def clean(self) -> builtins.list[str]:
        """Removes what dead processes left unfinished; returns what that was."""

    def release_reserve(self) -> bool:
        """Gives up the room that is kept for tidying a full disk, if there is any left; `restore_reserve` takes it
        again."""

    def restore_reserve(self) -> None: ...

    def is_current(self) -> bool:
        """Whether its path still leads to the place that it has open."""

    def close(self) -> None: ...


Digests = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""What chunks an image's manifest names: the manifest's bytes in; out any number of pairs of 32-byte digests back to
back and the chunks' sizes (packed u32). It raises BadImageError for a manifest that cannot be read. Given by the image
layer: a store knows nothing of manifests."""
