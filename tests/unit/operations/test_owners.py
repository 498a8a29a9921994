"""Handles that share memory have one of them stand for it, the one that knows of all of it."""

from __future__ import annotations

from woodfrog.operations.data import plan_owners, plan_parts
from woodfrog.operations.notes import HandleNote

MIB = 1 << 20


def note(number: int, mib: int, memory: int = 0, device: int = 0) -> HandleNote:
    return HandleNote(number, mib * MIB, device, "virtual_handle", memory)


def test_each_handle_of_its_own_stands_for_itself() -> None:
    assert plan_owners([note(1, 2), note(2, 2)]) == [0, 1]


def test_the_largest_of_those_that_share_stands_for_all_and_is_planned_once() -> None:
    handles = [
        note(1, 2, 1),
        note(2, 6),
        note(3, 4, 1),
        note(4, 4, 1),
        note(5, 2, 2, device=1),
        note(6, 2, 2, device=1),
    ]
    assert plan_owners(handles) == [2, 1, 2, 2, 4, 4]
    parts = plan_parts(handles, [0, 1])
    assert [part.indices for part in parts] == [(1, 2), (4,)]
    assert [part.size_bytes for part in parts] == [10 * MIB, 2 * MIB]
