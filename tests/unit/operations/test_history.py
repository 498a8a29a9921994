"""How much room an image is expected to take: never less than what is known, never more than there is."""

from __future__ import annotations

import pytest

from woodfrog.operations.history import SLACK_BYTES, LastImage, estimate_bytes, estimate_cpu_bytes

MIB = 1 << 20


@pytest.mark.parametrize("estimate", [estimate_bytes, estimate_cpu_bytes])
def test_a_first_image_takes_all_of_it(estimate: object) -> None:
    assert estimate(1000 * MIB, None) == 1000 * MIB  # type: ignore[operator]


def test_a_further_image_takes_as_much_as_the_last_one_and_some_more() -> None:
    last = LastImage("a@1", new_bytes=100 * MIB, cpu_new_bytes=8 * MIB)
    assert estimate_bytes(1000 * MIB, last) == 125 * MIB + SLACK_BYTES
    assert estimate_cpu_bytes(1000 * MIB, last) == 10 * MIB + SLACK_BYTES
    assert estimate_cpu_bytes(20 * MIB, last) == 20 * MIB


def test_after_an_image_without_a_cpu_side_all_of_it_is_new() -> None:
    assert estimate_cpu_bytes(1000 * MIB, LastImage("a@1", new_bytes=5)) == 1000 * MIB
