"""Which chunks of one image other images name, by digest: millions of look-ups without an object a chunk.

Uses the store's native index in memory, with a chunk's position in the image where a pack would have its offset.
Nothing is read from a store here.
"""

from __future__ import annotations

from array import array

from woodfrog._native.transfer import ChunkIndex
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.store.records import ABSENT, LOCATION_BYTES, RECORD_BYTES, ZERO, interleave, pack_column, positions_of

_MINE = 0  # the "pack" of everything in the index


class Lookup:
    """Of chunks given as digests back to back, with their sizes. Chunks of zeros are known as such, not looked up."""

    def __init__(self, digests: bytes, sizes: array[int], chunk_bytes: int) -> None:
        self._sizes = sizes
        self._index = ChunkIndex(chunk_bytes)
        if digests:
            self._index.add(_MINE, _records(digests, sizes))
        found = self._index.find(digests, sizes.tobytes())
        # Equal chunks have one place in the index: the first of them stands for all.
        self._places = array("Q", _places(found))
        self.zeros = bytearray(pack == ZERO for pack in pack_column(found))
        self._named = bytearray(len(sizes))

    def mark(self, digests: bytes) -> None:
        """Another image names these."""
        found = self._index.find(digests)
        for pack, place in zip(pack_column(found), _places(found), strict=True):
            if pack == _MINE:
                self._named[place] = 1

    def named(self) -> bytearray:
        """For each chunk, in order: 1 if it was marked."""
        marked = self._named
        return bytearray(marked[place] for place in self._places)

    def strange(self, digests: bytes, sizes: array[int]) -> bytearray:
        """For each of these chunks 1 if it is neither here nor zeros."""
        found = self._index.find(digests, sizes.tobytes()) if digests else b""
        return bytearray(pack == ABSENT for pack in pack_column(found)) if found else bytearray()

    def missing(self, digests: bytes, sizes: array[int]) -> list[int]:
        """Positions in `digests` of the first occurrence of each chunk that is neither here nor zeros."""
        return list(positions_of(self._index.missing(digests, sizes.tobytes()))) if digests else []


def _places(locations: bytes) -> memoryview:
    """The offsets (u64) of location records."""
    return memoryview(locations).cast("Q")[:: LOCATION_BYTES // 8]


def _records(digests: bytes, sizes: array[int]) -> bytes:
    """Pack records (layout: woodfrog._native.transfer) in which the offset is the position."""
    count = len(digests) // DIGEST_BYTES
    packed_sizes = sizes.tobytes()
    columns = (
        (0, DIGEST_BYTES, digests),
        (32, 8, array("Q", range(count)).tobytes()),
        (40, 4, packed_sizes),  # stored, as raw
        (44, 4, packed_sizes),
    )
    return interleave(count, RECORD_BYTES, columns)
