"""Writing some chunks of old packs into new ones: what prune keeps of packs that are mostly dead, what repair can save
of damaged ones. The old packs stay until their caller deletes them."""

from __future__ import annotations

from collections.abc import Sequence

from woodfrog._native.transfer import Arena, Progress
from woodfrog.store import moving
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.packing import Packer
from woodfrog.store.records import (
    RECORD_BYTES,
    digests_of,
    locations_of,
    offsets_of,
    select_rows,
    stored_sizes_of,
)
from woodfrog.store.tiers.protocol import Tier


class Saver:
    """Owns what it wrote until `finish` or `close`."""

    def __init__(self, tier: Tier, chunk_bytes: int, progress: Progress | None = None) -> None:
        self._tier = tier
        self._chunk_bytes = chunk_bytes
        self._progress = progress
        self._packer = Packer(tier, chunk_bytes)

    def save(self, pack: IndexedPack, positions: Sequence[int]) -> None:
        """These records of a pack. IntegrityError (of woodfrog._native.transfer) if one is damaged: nothing more may be
        saved then, and what was saved is dropped by `close`."""
        records = select_rows(pack.records, positions, RECORD_BYTES)
        if not records:
            return
        opened = self._tier.open_pack(pack.key, pack.size_bytes)
        try:
            opened.fetch(zip(offsets_of(records), stored_sizes_of(records), strict=True), self._progress)

            def write(chunks: bytes, sources: Sequence[Arena | int]) -> None:
                # What was stored raw did not pay to encode before either; what was encoded is decoded again.
                compress = "none" if list(sources) == [opened.fd] else "auto"
                self._packer.write(chunks, sources, compress=compress, progress=self._progress)

            digests = digests_of(records)
            moving.move(
                digests, locations_of(records, 0), {0: opened.fd}, self._tier, self._chunk_bytes, write, self._progress
            )
        finally:
            opened.close()

    def finish(self) -> list[IndexedPack]:
        """The new packs, durable, in no index yet."""
        return self._packer.finish()

    def close(self) -> None:
        self._packer.close()
