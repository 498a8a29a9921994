"""Chunks that lie in the arenas: their digests, wherever they lie."""

from __future__ import annotations

import mmap
import random
from array import array
from types import SimpleNamespace

from woodfrog._native import transfer
from woodfrog.operations.kept import Kept

CHUNK = 64 << 10
SLOTS = 12


def test_digests_are_in_the_order_of_the_chunks_whatever_lies_between_them() -> None:
    chosen = random.Random(1)
    arenas = {node: transfer.Arena(SLOTS * CHUNK) for node in (0, 1)}
    contents = {node: chosen.randbytes(SLOTS * CHUNK) for node in arenas}
    for node, arena in arenas.items():
        with mmap.mmap(arena.fd, SLOTS * CHUNK) as mapped:
            mapped[:] = contents[node]
    # Neighbours, a gap, a short one with a neighbour behind its slot, back again, the other arena and the first again.
    chunks = [
        (0, 0, CHUNK),
        (0, 1, CHUNK),
        (0, 3, 100),
        (0, 4, CHUNK),
        (0, 2, CHUNK),
        (1, 5, CHUNK),
        (1, 6, 4097),
        (0, 7, CHUNK),
    ]
    kept = Kept(
        range(len(chunks)),
        array("I", [size for _, _, size in chunks]),
        array("Q", [slot * CHUNK for _, slot, _ in chunks]),
        array("i", [node for node, _, _ in chunks]),
    )
    lying = SimpleNamespace(arena=arenas.__getitem__)
    expected = [transfer.blake3(contents[node][slot * CHUNK : slot * CHUNK + size]) for node, slot, size in chunks]
    for threads in (0, 1, 3):
        assert kept.hash(lying, CHUNK, threads) == b"".join(expected)  # type: ignore[arg-type]
    assert kept.select([]).hash(lying, CHUNK) == b""  # type: ignore[arg-type]
