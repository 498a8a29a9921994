"""Handles and files cut into chunks: numbers that everything else relies on."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from woodfrog.image import chunks
from woodfrog.image.manifest import chunk_count

CHUNK = 64
SIZES = st.lists(st.integers(0, 5 * CHUNK), max_size=8)


@given(SIZES)
def test_every_byte_of_every_piece_is_in_exactly_one_chunk(sizes: list[int]) -> None:
    cut = chunks.Cut(sizes, CHUNK)
    covered = list(zip(cut.pieces(), cut.offsets(), cut.sizes, strict=True))
    expected = [
        (piece, offset, min(CHUNK, size - offset))
        for piece, size in enumerate(sizes)
        for offset in range(0, size, CHUNK)
    ]
    assert covered == expected
    assert len(cut) == sum(chunk_count(size, CHUNK) for size in sizes)
    assert cut.size_bytes == sum(sizes) == sum(cut.sizes)


@given(SIZES, st.data())
def test_the_bytes_of_some_chunks_are_the_sum_of_their_sizes(sizes: list[int], data: st.DataObject) -> None:
    cut = chunks.Cut(sizes, CHUNK)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(cut) - 1)))) if len(cut) else []
    assert cut.bytes_at(chosen) == sum(cut.sizes[at] for at in chosen)


@given(st.lists(st.lists(st.integers(1, CHUNK), max_size=6) | st.integers(0, 5 * CHUNK), max_size=6), st.data())
def test_pieces_with_sizes_of_their_own_lie_among_others(parts: list[list[int] | int], data: st.DataObject) -> None:
    own = {at: chunks.packed(part) for at, part in enumerate(parts) if isinstance(part, list)}
    sizes = [sum(part) if isinstance(part, list) else part for part in parts]
    cut = chunks.Cut(sizes, CHUNK, own)
    expected = []
    for piece, part in enumerate(parts):
        offset = 0
        for size in part if isinstance(part, list) else chunks.Cut([part], CHUNK).sizes:
            expected.append((piece, offset, size))
            offset += size
    assert list(zip(cut.pieces(), cut.offsets(), cut.sizes, strict=True)) == expected
    chosen = sorted(data.draw(st.sets(st.integers(0, len(cut) - 1)))) if len(cut) else []
    assert cut.bytes_at(chosen) == sum(cut.sizes[at] for at in chosen)


def test_zeros_known_and_new_are_told_apart() -> None:
    zero, old, new = chunks.zero_digest(CHUNK), b"o" * 32, b"n" * 32
    cut = chunks.Cut([5 * CHUNK + 1], CHUNK)
    found = chunks.amounts(zero + old + new + zero + new + old, cut, array("I", [2]))
    assert (found.raw, found.zero, found.known, found.new) == (5 * CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, CHUNK)


def test_chunks_of_zeros_of_a_piece_with_sizes_of_its_own_are_counted() -> None:
    cut = chunks.Cut([5 * CHUNK // 2], CHUNK, {0: chunks.packed([CHUNK, CHUNK // 2, CHUNK])})
    column = chunks.zero_digest(CHUNK) + chunks.zero_digest(CHUNK // 2) + b"n" * 32
    found = chunks.amounts(column, cut, array("I", [2]))
    assert (found.zero, found.known, found.new) == (3 * CHUNK // 2, 0, CHUNK)
