"""Chunks that lie in the arena until they are stored: where each is, as columns. Owns no memory, moves none itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from woodfrog.image import chunks
from woodfrog.image.chunks import Cut
from woodfrog.image.writer import ImageWriter
from woodfrog.operations.context import Arenas
from woodfrog.operations.space import Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Arena, Progress


@dataclass(frozen=True)
class Kept:
    """One entry a chunk. `offsets` are in the arenas of `nodes`."""

    positions: Sequence[int]  # in the memory that they are of
    sizes: array[int]
    offsets: array[int]
    nodes: array[int]

    @classmethod
    def in_slots(cls, positions: Sequence[int], cut: Cut, space: Space, first_slot: int) -> Kept:
        """These chunks (ascending), in the slots of `space` from `first_slot` on."""
        chunk_bytes = cut.chunk_bytes
        offsets, nodes = array("Q"), array("i")
        for node, offset, run in space.slot_runs(first_slot, len(positions), chunk_bytes):
            offsets.extend(range(offset, offset + run * chunk_bytes, chunk_bytes))
            nodes.extend(array("i", [node]) * run)
        return cls(positions, cut.sizes_at(positions), offsets, nodes)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    def select(self, at: Sequence[int]) -> Kept:
        """Some of them."""
        return Kept(
            [self.positions[one] for one in at],
            chunks.select(self.sizes, at),
            chunks.select(self.offsets, at),
            chunks.select(self.nodes, at),
        )

    def hash(self, arenas: Arenas, chunk_bytes: int, threads: int = 0) -> bytes:
        """Their digests, as they lie there. `threads`: as of ImageWriter."""
        from woodfrog._native import transfer

        found = bytearray()
        ranges: list[tuple[int, int]] = []  # of one arena, a call for all of them: its threads share them
        whole = False  # the last one ends with a whole chunk: the next chunk may belong to it
        for at, (node, offset, size) in enumerate(zip(self.nodes, self.offsets, self.sizes, strict=True)):
            if whole and ranges and offset == sum(ranges[-1]):
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
            else:
                ranges.append((offset, size))
            whole = size == chunk_bytes
            if at + 1 == len(self) or self.nodes[at + 1] != node:
                found += transfer.hash_arena(arenas.arena(node), ranges, chunk_bytes=chunk_bytes, threads=threads)
                ranges = []
        return bytes(found)

    def store(self, digests: bytes, writer: ImageWriter, arenas: Arenas, progress: Progress) -> None:
        """To the store: each must have its digest (32 bytes a chunk, in order), and the store must lack it."""
        if not len(self):
            return
        used = sorted(set(self.nodes))
        source_of = {node: number for number, node in enumerate(used)}
        sources = array("I", [source_of[node] for node in self.nodes])
        sources_used: list[Arena | int] = [arenas.arena(node) for node in used]
        table = chunks.chunk_table(digests, self.offsets, self.sizes, sources)
        writer.write_gpu(table, sources_used, progress)
