"""Reading chunks: where they are, with the packs open. Holds the shared lock, so that what was found stays.

It must never answer with a place whose pack is not there: what cannot be found is an error with a number.
"""

from __future__ import annotations

import contextlib
import struct
from types import TracebackType

from woodfrog._native.transfer import Progress
from woodfrog.errors import BadImageError, UsageError
from woodfrog.store import keys, limits
from woodfrog.store.catalogue import View
from woodfrog.store.entries import Hold, Located
from woodfrog.store.records import ABSENT, LOCATION, ZERO, pack_column
from woodfrog.store.tiers.protocol import OpenPack, Tier


class Reader:
    """Made by `Store.reader`. Owns the packs' descriptors until `close`; not for several threads at once."""

    def __init__(self, tier: Tier, view: View, hold: Hold) -> None:
        self._tier = tier
        self._view = view
        self._hold = hold
        self._packs: dict[int, OpenPack] = {}
        self._closed = False

    def find(self, digests: bytes, sizes: bytes | None = None) -> bytes:
        """Location records of 32-byte digests back to back, in their order. Nothing is opened or fetched; the pack of a
        chunk that is not here is ABSENT, of one that is all zeros ZERO (short ones: only with `sizes`, packed u32)."""
        self._check_open()
        return self._view.index.find(digests, sizes)

    def locate(self, digests: bytes, sizes: bytes | None = None, progress: Progress | None = None) -> Located:
        """Where these chunks are, ready to be read: on a remote tier they are fetched into local files first.

        BadImageError naming how many are missing. The descriptors stay valid, and their numbers the same, until
        `close`."""
        locations = self.find(digests, sizes)
        numbers = set(pack_column(locations)) if locations else set()
        if ABSENT in numbers:
            missing = sum(1 for number in pack_column(locations) if number == ABSENT)
            raise BadImageError(
                f"{missing} of {len(digests) // keys.DIGEST_BYTES} chunks are not in the store {self._tier.url}",
                advice="`woodfrog repair` finds what can be saved; `woodfrog verify` says which images lack something",
                details={"missing": missing},
            )
        numbers.discard(ZERO)
        limits.allow_open_files(len(numbers))
        for number in sorted(numbers - self._packs.keys()):
            pack = self._view.pack(number)
            self._packs[number] = self._tier.open_pack(keys.pack_key(pack.name), pack.size_bytes)
        if not self._tier.local:
            self._fetch(locations, progress)
        return Located(locations, {number: self._packs[number].fd for number in numbers})

    def close(self) -> None:
        """Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(self._hold.release)
                for pack in self._packs.values():
                    stack.callback(pack.close)
            self._packs.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, locations: bytes, progress: Progress | None) -> None:
        wanted: dict[int, set[tuple[int, int]]] = {}
        for offset, stored, _, _, number, _ in struct.iter_unpack(LOCATION, locations):
            if number != ZERO:
                wanted.setdefault(number, set()).add((offset, stored))
        for number, ranges in sorted(wanted.items()):
            self._packs[number].fetch(sorted(ranges), progress)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this reader has been closed already")
