"""Arena memory as an operation uses it: extents seen as one linear run of bytes, and their coming and going.

A `Space` is taken before the target is touched, so that the target never waits for memory to be populated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from woodfrog.operations.context import Arenas, ExtentLike

ALIGNMENT_BYTES = 2 << 20  # of every extent: a huge page, and the granularity of device memory


class Piece(NamedTuple):
    """A part of an extent."""

    node: int
    offset: int
    size: int


class Space:
    """Extents of the arenas, owned until `free`. Linear offsets run through them in their order."""

    def __init__(self, arenas: Arenas, extents: Sequence[ExtentLike], user: int) -> None:
        self._arenas = arenas
        self.extents: list[ExtentLike] = list(extents)
        self.user = user

    @classmethod
    def take(cls, arenas: Arenas, size_bytes: int, user: int, *, node: int = -1, contiguous: bool = False) -> Space:
        """New space, populated, registered and cleared of others' data; NoSpaceError leaves nothing taken."""
        space = cls(arenas, arenas.allocate(size_bytes, node=node, contiguous=contiguous), user)
        try:
            arenas.prepare(space.extents, user)
        except BaseException:
            space.free()
            raise
        return space

    @property
    def size_bytes(self) -> int:
        return sum(extent.size for extent in self.extents)

    def extend(self, size_bytes: int) -> None:
        """Make the space at least this large."""
        missing = size_bytes - self.size_bytes
        if missing > 0:
            more = self._arenas.allocate(missing)
            self.extents.extend(more)
            self._arenas.prepare(more, self.user)

    def slots(self, chunk_bytes: int) -> int:
        """How many chunks fit, none across two extents."""
        return sum(extent.size // chunk_bytes for extent in self.extents)

    def extend_slots(self, count: int, chunk_bytes: int) -> None:
        """Make room for at least `count` chunks. NoSpaceError takes nothing more."""
        missing = (count - self.slots(chunk_bytes)) * chunk_bytes
        if missing > 0:
            # In several extents chunks larger than the arena's alignment would lose what is left over at their ends.
            more = self._arenas.allocate(missing, contiguous=chunk_bytes > ALIGNMENT_BYTES)
            self.extents.extend(more)
            self._arenas.prepare(more, self.user)

    def slot_runs(self, first: int, count: int, chunk_bytes: int) -> list[tuple[int, int, int]]:
        """Slots first … first+count-1 as (NUMA node, offset in its arena, number of slots back to back), in order."""
        runs = []
        begin = 0
        for extent in self.extents:
            end = begin + extent.size // chunk_bytes
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                runs.append((extent.node, extent.offset + (low - begin) * chunk_bytes, high - low))
            begin = end
        if first + count > begin:
            raise ValueError(f"slots up to {first + count} in a space of {begin}")
        return runs

    def pieces(self, begin: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """[begin, begin+size) of the linear run as (NUMA node, offset in its arena, size), in order."""
        position = 0
        end = begin + size_bytes
        for extent in self.extents:
            low, high = max(begin, position), min(end, position + extent.size)
            if low < high:
                yield extent.node, extent.offset + low - position, high - low
            position += extent.size
        if end > position:
            raise ValueError(f"[{begin}, {end}) reaches past a space of {position} bytes")

    def trim(self, size_bytes: int) -> None:
        """Give back whole aligned pieces behind the first `size_bytes`."""
        kept, surplus, begin = [], [], 0
        for extent in self.extents:
            keep = min(extent.size, max(0, -(-(size_bytes - begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES))
            begin += extent.size
            if keep:
                kept.append(Piece(extent.node, extent.offset, keep))
            if keep < extent.size:
                surplus.append(Piece(extent.node, extent.offset + keep, extent.size - keep))
        self.extents = list(kept)
        if surplus:
            self._arenas.free(surplus, self.user)

    def free(self) -> None:
        """Give the memory back. Nothing happens a second time."""
        extents, self.extents = self.extents, []
        if extents:
            self._arenas.free(extents, self.user)
