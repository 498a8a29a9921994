"""Reading chunks: where they are, with the packs open. Holds the shared lock, so that what was found stays.

It must never answer with a place whose pack is not there: what cannot be found is an error with a number.
"""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from woodfrog._native.transfer import Progress
from woodfrog.errors import BadImageError, UsageError
from woodfrog.store import keys, limits, records
from woodfrog.store.arriving import BATCH_BYTES, Arriving, Fetch
from woodfrog.store.catalogue import View
from woodfrog.store.entries import Hold, Located
from woodfrog.store.records import ABSENT, LOCATION, LOCATION_BYTES, ZERO, pack_column
from woodfrog.store.tiers.protocol import OpenPack, Tier

_PACKS_AT_ONCE = 4  # on a remote tier, which has its own limit of requests in flight


class Reader:
    """Made by `Store.reader`. Owns the packs' descriptors until `close`; not for several threads at once."""

    def __init__(self, tier: Tier, view: View, hold: Hold) -> None:
        self._tier = tier
        self._view = view
        self._hold = hold
        self._packs: dict[int, OpenPack] = {}
        self._arriving: list[Arriving] = []
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
        locations, numbers = self._open_for(digests, sizes)
        if not self._tier.local:
            self._fetch(locations, progress)
        return Located(locations, self._descriptors(numbers))

    def locate_ahead(self, digests: bytes, sizes: bytes | None = None) -> Arriving:
        """As `locate`, without waiting for what has to be fetched: the caller reads each batch when it is there."""
        locations, numbers = self._open_for(digests, sizes)
        fetches: list[list[Fetch]] | None = None
        batches = [(0, len(digests) // keys.DIGEST_BYTES)]
        if not self._tier.local:
            raw = [row[2] for row in struct.iter_unpack(LOCATION, locations)]
            batches = [(some[0], some[-1] + 1) for some in records.batches(range(len(raw)), raw, BATCH_BYTES)]
            fetches = []
            for first, end in batches:
                wanted = _ranges(locations[first * LOCATION_BYTES : end * LOCATION_BYTES])
                fetches.append([(self._packs[number], sorted(ranges)) for number, ranges in sorted(wanted.items())])
        arriving = Arriving(locations, self._descriptors(numbers), batches, fetches)
        self._arriving.append(arriving)
        return arriving

    def close(self) -> None:
        """Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(self._hold.release)
                for pack in self._packs.values():
                    stack.callback(pack.close)
                for arriving in self._arriving:  # before the files go that they are fetched into
                    stack.callback(arriving.close)
            self._packs.clear()
            self._arriving.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_for(self, digests: bytes, sizes: bytes | None) -> tuple[bytes, set[int]]:
        """Locations of chunks that are all here, and the numbers of their packs, which are open; BadImageError."""
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
        if self._tier.local:
            for number in sorted(numbers):
                self._open(number)
        else:  # each costs a request
            with ThreadPoolExecutor(_PACKS_AT_ONCE, thread_name_prefix="woodfrog-open") as pool:
                list(pool.map(self._open, sorted(numbers)))
        return locations, numbers

    def _descriptors(self, numbers: set[int]) -> dict[int, int]:
        return {number: self._packs[number].fd for number in numbers}

    def _fetch(self, locations: bytes, progress: Progress | None) -> None:
        wanted = _ranges(locations)

        def fetch(number: int) -> None:
            self._packs[number].fetch(sorted(wanted[number]), progress)

        # Several packs side by side: the link must not stand idle while the last range of one is on its way.
        with ThreadPoolExecutor(_PACKS_AT_ONCE, thread_name_prefix="woodfrog-fetch") as pool:
            fetching = [pool.submit(fetch, number) for number in sorted(wanted)]
            try:
                for future in fetching:
                    future.result()
            except BaseException:
                for future in fetching:
                    future.cancel()
                raise

    def _open(self, number: int) -> None:
        if number not in self._packs:
            pack = self._view.pack(number)
            self._packs[number] = self._tier.open_pack(keys.pack_key(pack.name), pack.size_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this reader has been closed already")


def _ranges(locations: bytes) -> dict[int, set[tuple[int, int]]]:
    """Of each pack, the ranges that these chunks are in."""
    wanted: dict[int, set[tuple[int, int]]] = {}
    for offset, stored, _, _, number, _ in struct.iter_unpack(LOCATION, locations):
        if number != ZERO:
            wanted.setdefault(number, set()).add((offset, stored))
    return wanted
