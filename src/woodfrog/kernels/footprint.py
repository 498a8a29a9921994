"""From a linear form to the byte ranges it covers, and the joining of ranges. No symbols here, only numbers."""

from __future__ import annotations

from collections.abc import Iterable

from woodfrog.kernels import limits
from woodfrog.kernels.space import Form, Space
from woodfrog.kernels.template import Range


def pieces(
    address: Form, space: Space, length: int, *, exact: bool, most: int = limits.RANGES
) -> tuple[list[tuple[int, int]], bool]:
    """(start, bytes) of what accesses of `length` bytes at all values of `address` cover, and whether that is exact.

    `exact`: whether all those values are known to occur; `most`: how many runs there may be then.

    Strides no longer than what is covered already join into one run. Where that leaves more runs than the cap, the
    smallest gaps are filled and the answer is no longer exact.
    """
    start = address.constant
    steps: list[tuple[int, int]] = []  # stride, count - 1
    for v, c in address.terms.items():
        low, high = space.low[v], space.high[v]
        start += c * (low if c > 0 else high)
        steps.append((abs(c), high - low))
    steps.sort()
    most = most if exact else limits.BOUNDED_RANGES
    run = length
    outer: list[tuple[int, int]] = []
    for stride, count in steps:
        if stride <= run and not outer:
            run += stride * count
        else:
            outer.append((stride, count))
    total = 1
    for _, count in outer:
        total *= count + 1
    while total > most:
        stride, count = outer.pop(0)
        total //= count + 1
        run += stride * count
        exact = False
    starts = [start]
    for stride, count in outer:
        starts = [s + stride * i for i in range(count + 1) for s in starts]
    starts.sort()
    joined: list[tuple[int, int]] = []
    for s in starts:
        if joined and s <= joined[-1][0] + joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], s + run - joined[-1][0]))
        else:
            joined.append((s, run))
    return joined, exact


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted; overlapping ranges joined, the joined one as exact as its least exact part."""
    result: list[Range] = []
    for one in sorted(ranges):
        if result:
            last = result[-1]
            end = last.address + last.size_bytes
            if one.address < end or (one.address == end and one.exactness == last.exactness):
                new_end = max(end, one.address + one.size_bytes)
                exactness = max(one.exactness, last.exactness)
                result[-1] = Range(last.address, new_end - last.address, exactness)
                continue
        result.append(one)
    return result
