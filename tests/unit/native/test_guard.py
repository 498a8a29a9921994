"""The account of what a snapshot by copy-on-write has captured, and the page that tells a target of it."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

CHUNK = 64 << 10
UNIT = 2 << 20
# native/wire/guard.h
HEAD = struct.Struct("<QIIQIIIIQQ")
CALLS_AT, STATES_AT = 24, 4096
FREE, KEPT, WANTED = 0, 1, 2


class Page:
    """The page as a target sees it."""

    def __init__(self, guard: transfer.Guard) -> None:
        self.bytes = mmap.mmap(guard.fd, os.fstat(guard.fd).st_size)
        _, _, self.units, self.unit_bytes, *_ = HEAD.unpack_from(self.bytes)

    @property
    def over(self) -> bool:
        return bool(HEAD.unpack_from(self.bytes)[6])

    def states(self) -> list[int]:
        return list(struct.unpack_from(f"<{self.units}I", self.bytes, STATES_AT))

    def want(self, unit: int) -> None:
        struct.pack_into("<I", self.bytes, STATES_AT + 4 * unit, WANTED)


def packed(positions: list[int]) -> bytes:
    return array("I", positions).tobytes()


PARTS = st.lists(
    st.lists(st.tuples(st.integers(1, 5 * UNIT), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=3
)


@settings(deadline=None, max_examples=60)
@given(parts=PARTS, data=st.data(), most=st.integers(1, 200))
def test_each_chunk_is_handed_out_once_and_its_unit_freed_with_it(
    parts: list[list[tuple[int, bool]]], data: st.DataObject, most: int
) -> None:
    sizes = [[size for size, _ in part] for part in parts]
    counts = [[-(-size // CHUNK) for size in part] for part in sizes]
    chosen = [
        sorted(data.draw(st.sets(st.integers(0, sum(part) - 1), max_size=40), label="positions")) for part in counts
    ]
    guard = transfer.Guard(
        [(part, packed(positions)) for part, positions in zip(sizes, chosen, strict=True)], chunk_bytes=CHUNK
    )
    page = Page(guard)
    assert guard.unit_bytes == page.unit_bytes == UNIT
    unit_of: list[list[int]] = []  # of each position
    for number, part in enumerate(counts):
        units = [
            first + chunk * CHUNK // UNIT
            for (first, _), chunks in zip(guard.places(number), part, strict=True)
            for chunk in range(chunks)
        ]
        unit_of.append([units[position] for position in chosen[number]])
    kept = {unit for units in unit_of for unit in units}
    assert page.states() == [KEPT if unit in kept else FREE for unit in range(page.units)]
    for number, positions in enumerate(chosen):
        seen: list[int] = []
        while guard.left(number):
            wanted = data.draw(st.booleans(), label="wanted")
            left = [unit for unit in unit_of[number] if page.states()[unit] == KEPT]
            if wanted and left:
                unit = data.draw(st.sampled_from(left), label="unit")
                page.want(unit)
                runs = guard.take_wanted(number, most)
                assert [run[2:] for run in runs] == [(unit, 1)]
            else:
                runs = guard.take(number, most)
            for first, count, unit, units in runs:
                chunks = range(first, first + count)
                assert {unit_of[number][at] for at in chunks} <= set(range(unit, unit + units))
                seen.extend(chunks)
            assert sum(count for _, count, _, _ in runs) <= max(most, UNIT // CHUNK)
            guard.captured(number, runs)
        assert sorted(seen) == list(range(len(positions)))
        assert guard.take(number, most) == []
    assert page.states() == [FREE] * page.units


def test_what_is_wanted_is_waited_for_until_it_is_over() -> None:
    guard = transfer.Guard([([4 * UNIT], packed([0, 40, 100]))], chunk_bytes=CHUNK)
    page = Page(guard)
    taken: list[list[tuple[int, int, int, int]]] = []
    thread = threading.Thread(target=lambda: taken.append(guard.take_wanted(0, 100)))
    thread.start()
    guard.finish()
    thread.join(30)
    assert taken == [[]]
    assert page.over
    assert guard.left(0) == 3


def test_a_target_that_scribbles_over_the_page_changes_nothing_in_the_account() -> None:
    guard = transfer.Guard([([2 * UNIT], packed([0, 33]))], chunk_bytes=CHUNK)
    page = Page(guard)
    page.bytes[:] = b"\xff" * len(page.bytes)
    assert guard.left(0) == 2
    assert guard.take(0, 1000) == [(0, 2, 0, 2)]
    guard.captured(0, [(0, 2, 0, 2)])
    assert guard.left(0) == 0
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(guard.fd, 0)  # it would pull the page from under the daemon


@pytest.mark.parametrize(
    ("sizes", "positions"), [([UNIT], [5, 5]), ([UNIT], [6, 5]), ([UNIT], [32]), ([0], []), ([UNIT, CHUNK], [33])]
)
def test_what_makes_no_sense_is_refused(sizes: list[int], positions: list[int]) -> None:
    with pytest.raises(transfer.TransferError) as refused:
        transfer.Guard([(sizes, packed(positions))], chunk_bytes=CHUNK)
    assert refused.value.code < 0


def test_runs_that_were_not_taken_are_refused() -> None:
    guard = transfer.Guard([([UNIT], packed([0]))], chunk_bytes=CHUNK)
    with pytest.raises(transfer.TransferError):
        guard.captured(0, [(0, 1, 5, 1)])
    with pytest.raises(transfer.TransferError):
        guard.take(1, 10)
