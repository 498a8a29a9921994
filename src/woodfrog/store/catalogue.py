"""What is in a store, in memory: one ChunkIndex fed from the index objects, kept up to date without reading them twice.

A record counts only if its pack is listed with the size that the index says, so that an index which mentions a lost
pack makes its chunks missing (and stored again), never found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from woodfrog._native.transfer import ChunkIndex, TransferError
from woodfrog.errors import BadImageError
from woodfrog.store import indexes, keys
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.tiers.protocol import Tier


@dataclass(frozen=True)
class Pack:
    """What has to be known of a pack to open it."""

    name: bytes
    size_bytes: int


class View:
    """An index with its packs' numbers. It only ever grows: numbers that were given out stay right."""

    def __init__(self, chunk_bytes: int) -> None:
        self.index = ChunkIndex(chunk_bytes)
        self._packs: list[Pack] = []
        self._numbers: dict[bytes, int] = {}

    def pack(self, number: int) -> Pack:
        return self._packs[number]

    def sizes(self) -> dict[bytes, int]:
        return {pack.name: pack.size_bytes for pack in self._packs}

    def add(self, pack: IndexedPack) -> None:
        """Does nothing for one that is known. BadImageError for records that make no sense."""
        if pack.name in self._numbers:
            return
        number = len(self._packs)
        try:
            self.index.add(number, pack.records)
        except TransferError as error:
            raise BadImageError(f"the records of the pack {pack.name.hex()} make no sense ({error})") from error
        self._packs.append(Pack(pack.name, pack.size_bytes))
        self._numbers[pack.name] = number


class Catalogue:
    """The View of a store that everything in this process shares. Safe to use from several threads."""

    def __init__(self, tier: Tier, chunk_bytes: int) -> None:
        self._tier = tier
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._view = View(chunk_bytes)
        self._read: set[str] = set()  # index objects that are in the view
        self._absent: set[tuple[bytes, int]] = set()  # packs that those mention and that were not there
        self.damaged: dict[str, str] = {}  # index objects that could not be used: key and reason

    def refresh(self) -> View:
        """The store as it is now. The caller holds a lock, so that nothing goes away from here on."""
        with self._lock:
            # Indexes before packs: what is in an index that is listed now, is in a pack that is listed afterwards.
            objects = {listed.key for listed in self._tier.list(keys.INDEX)}
            packs = {listed.key: listed.size_bytes for listed in self._tier.list(keys.PACKS)}
            there = {(name, size) for key, size in packs.items() if (name := keys.parse_pack(key)) is not None}
            if not self._still_right(objects, there):
                self._view, self._read, self._absent = View(self._chunk_bytes), set(), set()
            self.damaged = {}  # each is tried again: it may have been mended under the same name
            for key in sorted(objects - self._read):
                self._load(key, there)
            return self._view

    def add(self, view: View, packs: Iterable[IndexedPack]) -> None:
        """Packs that are durable and in a durable index now."""
        with self._lock:
            for pack in packs:
                view.add(pack)

    def _still_right(self, objects: set[str], there: set[tuple[bytes, int]]) -> bool:
        return self._read <= objects and self._view.sizes().items() <= there and not self._absent & there

    def _load(self, key: str, there: set[tuple[bytes, int]]) -> None:
        try:
            packs = indexes.read(self._tier, key)
            for pack in packs:
                if (pack.name, pack.size_bytes) in there:
                    self._view.add(pack)
                else:
                    self._absent.add((pack.name, pack.size_bytes))
        except BadImageError as error:
            self.damaged[key] = error.reason  # `verify` tells, `repair` mends; until then its chunks count as missing
            return
        self._read.add(key)
