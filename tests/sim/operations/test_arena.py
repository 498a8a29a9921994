"""Promises of the arena's accounting, over native arenas that only record what they are asked for."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from woodfrog.daemon.arena import ALIGNMENT_BYTES, BLOCK_BYTES, ArenaPool, Extent, Ranges, default_size_bytes
from woodfrog.errors import NoSpaceError

MIB = 1 << 20
SIZE = 512 * MIB


class RecordingArena:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = -1
        self.cleared: list[tuple[int, int]] = []
        self.populated: list[tuple[int, int]] = []

    def clear(self, offset: int, size: int) -> None:
        self.cleared.append((offset, size))

    def populate(self, offset: int, size: int) -> None:
        assert offset >= 0
        assert offset + size <= self.size_bytes
        self.populated.append((offset, size))

    def register(self) -> None: ...

    def unregister(self) -> None: ...

    def close(self) -> None: ...


def pool(size_bytes: int = SIZE, *, fresh: bool = True) -> tuple[ArenaPool, Any]:
    arena = RecordingArena(size_bytes)
    return ArenaPool({-1: (arena, fresh)}), arena  # type: ignore[dict-item]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60))))
def test_ranges_are_what_a_set_of_numbers_would_be(steps: list[tuple[bool, int, int]]) -> None:
    ranges, model = Ranges(), set()
    for add, first, second in steps:
        begin, end = sorted((first, second))
        if begin == end:
            continue
        if add:
            ranges.add(begin, end)
            model |= set(range(begin, end))
        else:
            ranges.remove(begin, end)
            model -= set(range(begin, end))
        assert {number for low, high in ranges for number in range(low, high)} == model
        assert ranges.total == len(model)
    listed = list(ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(listed))  # merged


@given(st.lists(st.integers(1, 200 * MIB), max_size=12), st.randoms(use_true_random=False))
def test_extents_never_overlap_and_everything_comes_back(sizes: list[int], random: Any) -> None:
    arenas, _ = pool()
    held: list[list[Extent]] = []
    for size in sizes:
        try:
            extents = arenas.allocate(size)
        except NoSpaceError:
            assert arenas.free_bytes < size + ALIGNMENT_BYTES
            if held:
                arenas.free(held.pop(random.randrange(len(held))), 0)
            continue
        assert sum(extent.size for extent in extents) >= size
        held.append(extents)
        spans = sorted((extent.offset, extent.offset + extent.size) for group in held for extent in group)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert all(begin % ALIGNMENT_BYTES == 0 and end % ALIGNMENT_BYTES == 0 for begin, end in spans)
    for extents in held:
        arenas.free(extents, 0)
    assert arenas.free_bytes == SIZE
    assert arenas.largest_free_bytes() == SIZE


def test_a_request_that_cannot_be_met_takes_nothing() -> None:
    arenas, _ = pool()
    arenas.allocate(300 * MIB)
    before = arenas.free_bytes
    with pytest.raises(NoSpaceError):
        arenas.allocate(300 * MIB)
    assert arenas.free_bytes == before


def test_memory_of_one_user_is_cleared_before_another_gets_it_and_not_before_the_same() -> None:
    arenas, arena = pool()
    extents = arenas.allocate(64 * MIB)
    arenas.prepare(extents, 1000)
    arenas.free(extents, 1000)
    again = arenas.allocate(64 * MIB)
    arenas.prepare(again, 1000)
    assert arena.cleared == []
    arenas.free(again, 1000)
    other = arenas.allocate(96 * MIB)
    arenas.prepare(other, 1001)
    assert arena.cleared == [(0, 64 * MIB)]
    arenas.free(other, 1001)
    arenas.prepare(arenas.allocate(16 * MIB), 1001)
    assert arena.cleared == [(0, 64 * MIB)]


def test_an_adopted_arena_counts_as_somebody_elses() -> None:
    arenas, arena = pool(fresh=False)
    arenas.prepare(arenas.allocate(8 * MIB), 0)
    assert arena.cleared == [(0, 8 * MIB)]


def test_memory_is_populated_once_and_only_where_it_is_used() -> None:
    arenas, arena = pool()
    extents = arenas.allocate(10 * MIB)
    arenas.prepare(extents, 0)
    arenas.prepare(extents, 0)
    assert arena.populated == [(0, BLOCK_BYTES)]
    assert arenas.prepared_bytes == BLOCK_BYTES


def test_what_a_predecessor_held_is_not_given_away() -> None:
    arenas, _ = pool(fresh=False)
    arenas.reserve([Extent(-1, 0, 256 * MIB)])
    assert all(extent.offset >= 256 * MIB for extent in arenas.allocate(200 * MIB))


def test_the_default_bound_is_half_of_the_host_and_no_more_than_the_gpus_have() -> None:
    assert default_size_bytes(100 << 30, 20 << 30) == 20 << 30
    assert default_size_bytes(20 << 30, 100 << 30) == 10 << 30
    assert default_size_bytes(20 << 30, 0) == 10 << 30


class HeldArena(RecordingArena):
    """One whose first growth does not end before it may."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.growing = threading.Event()
        self.may_go_on = threading.Event()

    def populate(self, offset: int, size: int) -> None:
        super().populate(offset, size)
        if threading.current_thread().name == "arena-grower" and not self.growing.is_set():
            self.growing.set()
            assert self.may_go_on.wait(60)


def test_an_operation_gets_its_memory_before_the_rest_of_the_arena_grows() -> None:
    arena = HeldArena(SIZE)
    arenas = ArenaPool({-1: (arena, True)})  # type: ignore[dict-item]
    arenas.grow_in_background(SIZE)
    assert arena.growing.wait(60)
    wanted = Extent(-1, SIZE - BLOCK_BYTES, BLOCK_BYTES)
    operation = threading.Thread(target=arenas.prepare, args=([wanted], 0))
    operation.start()
    deadline = time.monotonic() + 60
    while arenas._nodes[-1].waiting == 0:
        assert time.monotonic() < deadline
    arena.may_go_on.set()
    operation.join(60)
    arenas.close()
    assert arena.populated[1] == (wanted.offset, wanted.size)


def test_memory_that_is_ready_is_had_at_once_while_the_arena_grows() -> None:
    arena = HeldArena(SIZE)
    arenas = ArenaPool({-1: (arena, True)})  # type: ignore[dict-item]
    ready = arenas.allocate(BLOCK_BYTES)
    arenas.prepare(ready, 0)
    arenas.grow_in_background(SIZE)
    assert arena.growing.wait(60)
    arenas.prepare(ready, 0)  # would wait for ever: the growth is held
    arena.may_go_on.set()
    arenas.close()
