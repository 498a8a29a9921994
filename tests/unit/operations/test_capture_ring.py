"""The ring that captured chunks wait in, and runs seen as one; without memory of a GPU."""

from __future__ import annotations

from collections import deque
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from woodfrog.operations.copy_on_write import Ring, joined
from woodfrog.operations.staging import Staging


class Slots:
    """As much of a Staging as the ring looks at."""

    def __init__(self, slots: int) -> None:
        self.slots = slots


@given(slots=st.integers(1, 20), steps=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=60))
def test_no_slot_is_given_twice_and_the_oldest_comes_out_first(slots: int, steps: list[tuple[bool, int]]) -> None:
    ring = Ring(cast(Staging, Slots(slots)))
    held: deque[tuple[int, int, int]] = deque()
    first = 0
    for push, count in steps:
        if push:
            slot, room = ring.room(count)
            used = {slot for _, n, begin in held for slot in range(begin, begin + n)}
            assert room <= count
            assert (room > 0) == (len(used) < slots)
            if room:
                assert not used & set(range(slot, slot + room))
                assert slot + room <= slots
                ring.push(first, room, slot)
                held.append((first, room, slot))
                first += room
        elif held:
            assert ring.oldest() == held.popleft()
            ring.pop()
        assert ring.empty == (not held)
        assert (ring.oldest(only_when_half_full=True) is not None) == (
            bool(held) and 2 * sum(n for _, n, _ in held) >= slots
        )


def test_a_ring_without_memory_has_no_room() -> None:
    ring = Ring(None)
    assert ring.room(5)[1] == 0
    assert ring.empty
    ring.release()


def test_runs_whose_chunks_follow_each_other_are_one() -> None:
    assert list(joined([])) == []
    assert list(joined([(0, 3, 0, 1), (3, 2, 4, 1), (9, 1, 9, 1), (10, 4, 10, 2)])) == [(0, 5), (9, 5)]
    assert list(joined([(7, 2, 0, 1)])) == [(7, 2)]
