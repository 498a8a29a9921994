"""Marking: which stored chunks the images need. What prune may sweep, and what verify and repair find missing.

It must never answer for a manifest that could not be read: what such an image needs is not known, so it raises. Images
share most of their chunks and have millions, so all sets are native ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from woodfrog._native.transfer import ChunkIndex
from woodfrog.errors import BadImageError
from woodfrog.store import images, keys
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import (
    ABSENT,
    DIGEST_BYTES,
    digests_of,
    made_up_records,
    pack_column,
    positions_of,
    select_rows,
)
from woodfrog.store.tiers.protocol import Digests, Tier


@dataclass
class Marked:
    """`packs` in an order of their own, which numbers them. `lacking`: how many of its chunks each image does not find,
    where any."""

    packs: list[IndexedPack]
    index: ChunkIndex  # of those packs
    needed: ChunkIndex  # what the images name
    images: int = 0
    lacking: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # only where the caller bears them: reference and reason

    def is_live(self, number: int) -> list[bool]:
        """For each record of `packs[number]`, whether an image needs it: a chunk that several packs hold is needed from
        one of them only."""
        digests = digests_of(self.packs[number].records)
        if not digests:
            return []
        found, named = pack_column(self.index.find(digests)), pack_column(self.needed.find(digests))
        return [place == number and name != ABSENT for place, name in zip(found, named, strict=True)]


def mark(
    tier: Tier, packs: Iterable[IndexedPack], digests: Digests, chunk_bytes: int, *, bear_unreadable: bool = False
) -> Marked:
    """Reads every manifest. BadImageError for one that cannot be read, unless `bear_unreadable`."""
    # The fullest packs first, so that of chunks stored twice the copies in small packs are the ones that go.
    ordered = sorted(packs, key=lambda pack: (-pack.chunks, pack.name))
    marked = Marked(ordered, ChunkIndex(chunk_bytes), ChunkIndex(chunk_bytes))
    for number, pack in enumerate(ordered):
        marked.index.add(number, pack.records)
    for entry in images.entries(tier):
        try:
            absent = _mark_one(tier, entry.reference, digests, marked)
        except BadImageError as error:
            if not bear_unreadable:
                raise BadImageError(
                    f"the manifest of {entry.reference} cannot be read, so nobody knows what it needs: {error.reason}",
                    advice=f"put it back from a copy, or give the image up: `woodfrog rm {entry.reference}`",
                ) from error
            marked.unreadable[entry.reference] = error.reason
            continue
        marked.images += 1
        if absent:
            marked.lacking[entry.reference] = absent
    return marked


def _mark_one(tier: Tier, reference: str, digests: Digests, marked: Marked) -> int:
    """How many of its chunks are not found."""
    data = tier.get(keys.manifest_of(reference), keys.MANIFEST_MAX_BYTES)
    if data is None:
        raise BadImageError("it is gone")  # only the exclusive lock's holder removes: someone did it by hand
    absent = 0
    for some, sizes in digests(data):
        if not some:
            continue
        places = pack_column(marked.index.find(some, sizes))
        if max(places) == ABSENT:  # the largest there is
            absent += sum(1 for place in places if place == ABSENT)
        new = positions_of(marked.needed.missing(some, sizes))
        if new:
            marked.needed.add(0, made_up_records(select_rows(some, new, DIGEST_BYTES)))
    return absent
