"""Arithmetic on lists of (address, size_bytes), for comparing what was named with what was touched."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = list[tuple[int, int]]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and disjoint."""
    result: Ranges = []
    for address, size in sorted(ranges):
        if result and address <= result[-1][0] + result[-1][1]:
            end = max(result[-1][0] + result[-1][1], address + size)
            result[-1] = (result[-1][0], end - result[-1][0])
        else:
            result.append((address, size))
    return result


def without(ranges: Iterable[tuple[int, int]], removed: Iterable[tuple[int, int]]) -> Ranges:
    """What is left of `ranges` without `removed`."""
    left: Ranges = []
    holes = joined(removed)
    index = 0
    for address, size in joined(ranges):
        end = address + size
        while index and holes[index - 1][0] + holes[index - 1][1] > address:
            index -= 1
        while index < len(holes) and holes[index][0] + holes[index][1] <= address:
            index += 1
        at = index
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > address:
                left.append((address, holes[at][0] - address))
            address = max(address, holes[at][0] + holes[at][1])
            at += 1
        if address < end:
            left.append((address, end - address))
    return left


def size_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(size for _, size in joined(ranges))
