"""How much of a GPU's memory copies may take, and which ways there are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from woodfrog.errors import NoSpaceError, UsageError
from woodfrog.operations.concurrent import Allowance, DeviceWay, check_way, staged_chunks

GIB = 1 << 30


@dataclass
class Device:
    """What is asked of a native Device."""

    free: int
    total_bytes: int = 128 * GIB
    ordinal: int = 0

    def free_bytes(self) -> int:
        return self.free


@pytest.mark.parametrize(
    ("before", "now", "allowed"),
    [
        (60, 60, 54),  # the control state is still on the GPU: two of what is free must not count
        (60, 62, 56),  # it has left: what it freed is not ours
        (60, 50, 44),  # somebody else came
        (5, 7, 1),
        (3, 5, 0),  # less than the reserve
    ],
)
def test_copies_take_neither_the_reserve_nor_what_the_control_state_comes_back_to(
    before: int, now: int, allowed: int
) -> None:
    allowance = Allowance({0: before * GIB}, returning_bytes=2 * GIB)
    assert allowance.of(0, Device(now * GIB)) == (now * GIB, allowed * GIB)  # type: ignore[arg-type]


def test_a_device_that_came_after_the_survey_gets_no_copies() -> None:
    assert Allowance({}, 0).of(3, Device(60 * GIB)) == (60 * GIB, 0)  # type: ignore[arg-type]


def test_as_much_is_copied_as_there_is_room_for_and_all_or_nothing_if_copies_are_demanded() -> None:
    device = Device(0)
    assert staged_chunks("auto", 100, 64, 64 * 30 + 63, device) == 30  # type: ignore[arg-type]
    assert staged_chunks("auto", 10, 64, 64 * 30, device) == 10  # type: ignore[arg-type]
    assert staged_chunks("stop", 10, 64, 64 * 30, device) == 0  # type: ignore[arg-type]
    assert staged_chunks("copy", 30, 64, 64 * 30, device) == 30  # type: ignore[arg-type]
    with pytest.raises(NoSpaceError):
        staged_chunks("copy", 31, 64, 64 * 30, device)  # type: ignore[arg-type]


def test_the_way_is_named_by_what_was_done() -> None:
    assert [DeviceWay(0, copied, drained, 0, 0).way for copied, drained in ((0, 0), (0, 1), (1, 0), (1, 1))] == [
        "stop",
        "stop",
        "copy",
        "copy and stop",
    ]


def test_ways_that_there_are_not_are_refused_before_anything_is_touched() -> None:
    for way in ("auto", "copy", "cow", "stop"):
        check_way(way, stop=False)
    check_way("auto", stop=True)
    check_way("stop", stop=True)
    for way in ("copy", "cow"):
        with pytest.raises(UsageError):
            check_way(way, stop=True)
    with pytest.raises(UsageError):
        check_way("", stop=False)
