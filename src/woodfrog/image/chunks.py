"""Handles and files cut into chunks: how many, how long, which are of what; as the packed columns that the store takes.

An image has up to millions of chunks, so these are byte strings and arrays, never objects. Positions number chunks
through all pieces of a list. Nothing here reads data; it must never guess a size that the pieces do not say.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from blake3 import blake3

from woodfrog._native.transfer import ChunkIndex
from woodfrog.image.manifest import DIGEST_BYTES, Amounts, FileRecord, Manifest, chunk_count
from woodfrog.store.records import chunk_table as chunk_table
from woodfrog.store.records import made_up_records, pack_column, running_offsets, select_rows
from woodfrog.store.records import packed as packed
from woodfrog.store.records import positions_of as positions_of


class Cut:
    """Pieces (handles, files) cut into chunks: `sizes` has one entry a chunk, `first[k]` is piece k's first chunk.
    Pieces are cut at multiples of `chunk_bytes`, but those in `own` (piece → packed u32) into chunks of these sizes,
    which must make up the piece."""

    def __init__(self, piece_sizes: Sequence[int], chunk_bytes: int, own: Mapping[int, bytes] | None = None) -> None:
        self.chunk_bytes = chunk_bytes
        self.piece_sizes = list(piece_sizes)
        self._own = {piece: positions_of(sizes) for piece, sizes in (own or {}).items()}
        self.first = [0, *accumulate(map(self._count, range(len(self.piece_sizes))))]
        self.sizes = array("I", [chunk_bytes]) * self.first[-1]
        for piece, size in enumerate(self.piece_sizes):
            if piece in self._own:
                self.sizes[self.first[piece] : self.first[piece + 1]] = self._own[piece]
            elif size % chunk_bytes:
                self.sizes[self.first[piece + 1] - 1] = size % chunk_bytes

    @classmethod
    def of_files(cls, records: Sequence[FileRecord], chunk_bytes: int) -> Cut:
        """CRIU's files as an image's manifest describes them."""
        own = {number: record.sizes for number, record in enumerate(records) if record.sizes}
        return cls([record.size_bytes for record in records], chunk_bytes, own)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        return sum(self.piece_sizes)

    def bytes_at(self, positions: Sequence[int]) -> int:
        """How many bytes the chunks at these ascending positions have."""
        if self._own:
            return sum(self.sizes[at] for at in positions)
        short = self.short_among(positions)
        return len(positions) * self.chunk_bytes - sum(self.chunk_bytes - self.sizes[positions[at]] for at in short)

    def sizes_at(self, positions: Sequence[int]) -> array[int]:
        """The sizes of the chunks at these ascending positions."""
        if self._own:
            return array("I", [self.sizes[at] for at in positions])
        sizes = array("I", [self.chunk_bytes]) * len(positions)
        for at in self.short_among(positions):
            sizes[at] = self.sizes[positions[at]]
        return sizes

    def short_among(self, positions: Sequence[int]) -> list[int]:
        """Which of these ascending positions are of short chunks, as indices into `positions`; of pieces cut at
        `chunk_bytes`."""
        found = []
        for size, end in zip(self.piece_sizes, self.first[1:], strict=True):
            if size % self.chunk_bytes:
                at = bisect_left(positions, end - 1)
                if at < len(positions) and positions[at] == end - 1:
                    found.append(at)
        return found

    def ranges(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Chunks first … end-1 as (piece, offset in it, bytes), one for each piece; of pieces cut at `chunk_bytes`."""
        for piece, size in enumerate(self.piece_sizes):
            low, high = max(first, self.first[piece]), min(end, self.first[piece + 1])
            if low < high:
                offset = (low - self.first[piece]) * self.chunk_bytes
                yield piece, offset, min((high - self.first[piece]) * self.chunk_bytes, size) - offset

    def usual_sizes(self) -> set[int]:
        """Sizes that many chunks have: not those of the last chunks of pieces."""
        return {self.chunk_bytes}.union(*self._own.values())

    def offsets(self) -> array[int]:
        """Where each chunk begins in its piece."""
        offsets = array("Q")
        for piece, size in enumerate(self.piece_sizes):
            if piece in self._own:
                offsets.extend(running_offsets(self._own[piece]))
            else:
                offsets.extend(range(0, size, self.chunk_bytes))
        return offsets

    def pieces(self) -> array[int]:
        """Which piece each chunk is of."""
        numbers = array("I")
        for number in range(len(self.piece_sizes)):
            numbers.extend(array("I", [number]) * self._count(number))
        return numbers

    def _count(self, piece: int) -> int:
        own = self._own.get(piece)
        return len(own) if own is not None else chunk_count(self.piece_sizes[piece], self.chunk_bytes)


def select_digests(digests: bytes, positions: Iterable[int]) -> bytes:
    """The digests at these positions, in their order."""
    return select_rows(digests, positions, DIGEST_BYTES)


def select(column: array[int], positions: Iterable[int]) -> array[int]:
    """The entries of `column` at these positions, in their order."""
    return array(column.typecode, [column[at] for at in positions])


def named_by(manifest: Manifest) -> Iterator[tuple[bytes, bytes]]:
    """Every chunk that an image needs, as the store asks: 32-byte digests back to back, and the chunks' sizes (packed
    u32); first the handles', then CRIU's files'."""
    handles = Cut([handle.size for handle in manifest.handles], manifest.chunk_bytes)
    yield manifest.digests, packed(handles.sizes)
    if manifest.cpu is not None:
        files = Cut.of_files(manifest.cpu.files, manifest.chunk_bytes)
        yield manifest.cpu_digests, packed(files.sizes)


def bytes_named(manifest: Manifest, chunks: Iterable[tuple[bytes, array[int]]]) -> int:
    """How many bytes those of these chunks (different ones; digests and sizes) have that the image's handles name."""
    named = ChunkIndex(manifest.chunk_bytes)
    named.add(0, made_up_records(manifest.digests))
    total = 0
    for digests, sizes in chunks:
        packs = pack_column(named.find(digests))
        total += sum(size for size, pack in zip(sizes, packs, strict=True) if pack == 0)
    return total


@lru_cache(maxsize=64)
def zero_digest(size_bytes: int) -> bytes:
    """The digest of that many zeros."""
    return blake3(bytes(size_bytes)).digest()


def digests_of(digests: bytes, first: int, end: int) -> bytes:
    """The digests of chunks first … end-1."""
    return digests[first * DIGEST_BYTES : end * DIGEST_BYTES]


def amounts(digests: bytes, cut: Cut, new: Sequence[int]) -> Amounts:
    """What kinds of chunks there are, in bytes; `stored` is left 0. `new`: positions of those that the store lacks."""
    raw_bytes = cut.size_bytes
    # A digest found at an odd place by chance would need 2^128 bytes of digests.
    zero_bytes = sum(digests.count(zero_digest(size)) * size for size in cut.usual_sizes())
    new_bytes = cut.bytes_at(new)
    return Amounts(raw=raw_bytes, zero=zero_bytes, known=raw_bytes - zero_bytes - new_bytes, new=new_bytes)
