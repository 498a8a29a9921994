"""What really changed between two images, 64 bytes at a time, read from the store: the truth that increments are
compared with, and what other chunk sizes would have cost.

Chunks with equal digests are equal; of the others both versions are read and compared. Nothing here measures time.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LINE_BYTES = 64
SWEEP_BYTES = tuple(1 << shift for shift in range(14, 22))  # 16 KiB … 2 MiB
# Per chunk: a manifest names every chunk of an image, an index every chunk that is stored (docs/format.md).
MANIFEST_BYTES_PER_CHUNK = 32
INDEX_BYTES_PER_CHUNK = 56
BATCH_CHUNKS = 2048


@dataclass(frozen=True)
class Changes:
    """Between two images of one target; `sampled`: the fraction of the changed chunks that was read (sums are of all,
    extrapolated). `sweep`: for each chunk size the bytes of the chunks with a change."""

    gpu_bytes: int
    changed_chunk_bytes: int
    changed_line_bytes: int
    new_handle_bytes: int  # of memory that was not there before: all of it counts as changed
    sampled: float
    sweep: dict[int, int]

    def sweep_rows(self) -> Iterator[dict[str, Any]]:
        """A row a chunk size: bytes that cross the bus and are stored, against those that changed; and metadata."""
        for chunk_bytes, stored in self.sweep.items():
            manifest = self.gpu_bytes // chunk_bytes * MANIFEST_BYTES_PER_CHUNK
            index = stored // chunk_bytes * INDEX_BYTES_PER_CHUNK
            yield {
                "chunk_bytes": chunk_bytes,
                "changed_chunk_bytes": stored,
                "amplification": stored / self.changed_line_bytes if self.changed_line_bytes else None,
                "manifest_bytes": manifest,
                "index_bytes": index,
                "with_metadata": (stored + manifest + index) / self.changed_line_bytes
                if self.changed_line_bytes
                else None,
            }


def changes(repository: Any, before: str, after: str, *, most_bytes: int) -> Changes:
    """Compare two images; at most `most_bytes` of each are read (a regular sample of the changed chunks)."""
    import numpy

    old, new = repository.manifest(before), repository.manifest(after)
    chunk_bytes = new.chunk_bytes
    pairs, new_handle_bytes = changed_pairs(old, new)
    step = max(1, -(-len(pairs) * chunk_bytes // most_bytes))
    chosen = pairs[::step]
    factor = len(pairs) / len(chosen) if chosen else 1.0
    small = [size for size in SWEEP_BYTES if size < chunk_bytes]
    lines = 0
    blocks = dict.fromkeys(small, 0)
    with repository.store.reader() as reader:
        for at in range(0, len(chosen), BATCH_CHUNKS):
            batch = chosen[at : at + BATCH_CHUNKS]
            sizes = [size for _, _, size, _ in batch]
            was = contents(reader, [digest for digest, _, _, _ in batch], sizes, chunk_bytes)
            now = contents(reader, [digest for _, digest, _, _ in batch], sizes, chunk_bytes)
            differ = (was != now).reshape(len(batch), chunk_bytes // LINE_BYTES, LINE_BYTES).any(axis=2)
            lines += int(differ.sum())
            for size in small:
                per_block = differ.reshape(len(batch), chunk_bytes // size, size // LINE_BYTES).any(axis=2)
                blocks[size] += int(numpy.count_nonzero(per_block)) * size
    sweep = {size: int(blocks[size] * factor) + new_handle_bytes for size in small}
    for size in (size for size in SWEEP_BYTES if size >= chunk_bytes):
        groups = {(handle, place * chunk_bytes // size) for _, _, _, (handle, place) in pairs}
        sweep[size] = len(groups) * size + new_handle_bytes
    return Changes(
        gpu_bytes=new.gpu_bytes,
        changed_chunk_bytes=sum(size for _, _, size, _ in pairs) + new_handle_bytes,
        changed_line_bytes=int(lines * LINE_BYTES * factor) + new_handle_bytes,
        new_handle_bytes=new_handle_bytes,
        sampled=len(chosen) / len(pairs) if pairs else 1.0,
        sweep=sweep,
    )


Pair = tuple[bytes, bytes, int, tuple[int, int]]  # digest before and after, size, (handle, chunk in it)


def changed_pairs(old: Any, new: Any) -> tuple[list[Pair], int]:
    """The chunks of handles in both images that differ; and the bytes of handles that the first does not have."""
    columns: dict[tuple[int, int], bytes] = {}
    at = 0
    for handle in old.handles:
        length = -(-handle.size // old.chunk_bytes) * 32
        columns[handle.id, handle.size] = old.digests[at : at + length]
        at += length
    pairs: list[Pair] = []
    new_handle_bytes = at = 0
    for handle in new.handles:
        count = -(-handle.size // new.chunk_bytes)
        column = new.digests[at : at + count * 32]
        at += count * 32
        was = columns.get((handle.id, handle.size))
        if was is None:
            new_handle_bytes += handle.size
        elif was != column:
            for place in range(count):
                before, after = was[place * 32 : place * 32 + 32], column[place * 32 : place * 32 + 32]
                if before != after:
                    size = min(new.chunk_bytes, handle.size - place * new.chunk_bytes)
                    pairs.append((before, after, size, (handle.id, place)))
    return pairs, new_handle_bytes


def contents(reader: Any, digests: Sequence[bytes], sizes: Sequence[int], chunk_bytes: int) -> Any:
    """The chunks' bytes as a numpy array of rows of `chunk_bytes`; short chunks are followed by zeros."""
    import numpy

    from woodfrog._native import transfer
    from woodfrog.image.chunks import packed

    joined = b"".join(digests)
    located = reader.locate(joined, packed(sizes))
    descriptor = os.memfd_create("chunks")
    try:
        os.truncate(descriptor, len(digests) * chunk_bytes)
        pieces = [(descriptor, number * chunk_bytes, size) for number, size in enumerate(sizes)]
        transfer.extract_from_packs(pieces, joined, located.locations, located.packs, chunk_bytes=chunk_bytes)
        mapped = mmap.mmap(descriptor, len(digests) * chunk_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return numpy.frombuffer(mapped, dtype=numpy.uint8).reshape(len(digests), chunk_bytes)
