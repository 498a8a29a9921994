"""Chunks of several devices told apart, and the arena's slots that they go to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from woodfrog.image.chunks import Cut
from woodfrog.operations.data import split_positions
from woodfrog.operations.space import Space

CHUNK = 64


@dataclass
class Extent:
    node: int
    offset: int
    size: int


@dataclass
class Arenas:
    """Accounting alone: extents of the sizes that the test says."""

    sizes: list[int]
    taken: list[Extent] = field(default_factory=list)

    def allocate(self, size_bytes: int, *, node: int = -1, contiguous: bool = False) -> Sequence[Extent]:
        begin = sum(extent.size for extent in self.taken)
        more = []
        while size_bytes > 0:
            size = size_bytes if contiguous else min(size_bytes, self.sizes[len(self.taken) % len(self.sizes)])
            more.append(Extent(len(self.taken) % 2, begin, size))
            self.taken.append(more[-1])
            begin += size
            size_bytes -= size
        return more

    def prepare(self, extents: Sequence[Extent], user: int) -> None:
        pass

    def free(self, extents: Sequence[Extent], user: int) -> None:
        pass


@given(st.lists(st.lists(st.integers(1, 5 * CHUNK), max_size=4), max_size=4), st.data())
def test_every_position_is_of_exactly_one_part(parts: list[list[int]], data: st.DataObject) -> None:
    cuts = [Cut(sizes, CHUNK) for sizes in parts]
    total = sum(map(len, cuts))
    chosen = sorted(data.draw(st.sets(st.integers(0, total - 1)))) if total else []
    split = split_positions(array("I", chosen), cuts)
    begins = [sum(map(len, cuts[:number])) for number in range(len(cuts))]
    assert [begin + at for begin, mine in zip(begins, split, strict=True) for at in mine] == chosen
    assert all(at < len(cut) for cut, mine in zip(cuts, split, strict=True) for at in mine)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 20), st.data())
def test_slots_lie_inside_the_extents_and_on_each_other_never(
    extents: list[int], wanted: int, data: st.DataObject
) -> None:
    arenas = Arenas([size * CHUNK for size in extents])
    space = Space(arenas, [], user=0)  # type: ignore[arg-type]
    space.extend_slots(wanted, CHUNK)
    assert space.slots(CHUNK) >= wanted
    first = data.draw(st.integers(0, wanted - 1))
    count = data.draw(st.integers(1, wanted - first))
    runs = space.slot_runs(first, count, CHUNK)
    assert sum(number for _, _, number in runs) == count
    used: set[tuple[int, int]] = set()
    for node, offset, number in runs:
        inside = [one for one in space.extents if one.node == node and one.offset <= offset < one.offset + one.size]
        assert len(inside) == 1
        assert offset + number * CHUNK <= inside[0].offset + inside[0].size
        slots = {(node, offset + at * CHUNK) for at in range(number)}
        assert not slots & used
        used |= slots
