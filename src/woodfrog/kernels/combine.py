"""Accesses that lie side by side as one: what an unrolled or vectorised loop stores at x, x + 4, x + 8.

Where all happen together they become one larger access. Where each has a condition of its own (x < n, x + 1 < n, …),
as Triton's masks have, they become one access with a variable more, the lane: 4 * (x + lane) where x + lane < n.
Both name the same bytes as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from woodfrog.kernels.template import Access, LoopFact, Step
from woodfrog.kernels.values import Atom, Compare, Condition, Poly, alignment, const


def combined(accesses: Sequence[Access]) -> tuple[Access, ...]:
    """The same bytes by fewer accesses. One that stands for several has the position and the reason of the first."""
    return _with_lanes(_joined(accesses))


def _joined(accesses: Sequence[Access]) -> list[Access]:
    """Accesses under the same conditions that touch or overlap as one each."""
    groups: dict[tuple[object, ...], list[tuple[int, int, Access]]] = {}
    for access in accesses:
        size = None if access.size is None else access.size.constant
        if access.address is None or size is None or size <= 0:
            groups.setdefault((id(access),), []).append((0, 0, access))
            continue
        offset = access.address.terms.get((), 0)
        key = (access.kind, access.address - const(offset), access.steps, access.steps_complete)
        groups.setdefault(key, []).append((offset, size, access))
    result: list[Access] = []
    for group in groups.values():
        group.sort(key=lambda one: one[:2])
        start, size, first = group[0]
        end = start + size
        for offset, size, access in group[1:]:
            if offset <= end:
                end = max(end, offset + size)
                continue
            result.append(_one(first, start, end))
            start, end, first = offset, offset + size, access
        result.append(_one(first, start, end))
    return result


def _one(first: Access, start: int, end: int) -> Access:
    if first.address is None or first.size is None or first.size.constant in (None, end - start):
        return first
    address: Poly = first.address + const(start - first.address.terms.get((), 0))
    return replace(first, address=address, size=const(end - start))


def _with_lanes(accesses: Sequence[Access]) -> tuple[Access, ...]:
    groups: dict[tuple[object, ...], list[tuple[list[int], Access]]] = {}
    for access in accesses:
        size = None if access.size is None else access.size.constant
        in_loop = any(isinstance(step, LoopFact) for step in access.steps)  # whose counter would have to follow
        if access.address is None or size is None or size <= 0 or not access.steps or in_loop:
            groups.setdefault((id(access),), []).append(([], access))
            continue
        constants: list[int] = []

        def removed(value: Poly, constants: list[int] = constants) -> Poly:
            constants.append(value.terms.get((), 0))
            return value - const(constants[-1])

        shape = (removed(access.address), tuple(_changed(step, removed) for step in access.steps))
        groups.setdefault((access.kind, size, access.steps_complete, shape), []).append((constants, access))
    lanes: dict[int, Atom] = {}
    result: list[Access] = []
    for group in groups.values():
        group.sort(key=lambda one: one[0])
        at = 0
        while at < len(group):
            count = _progression(group, at)
            first = group[at][1]
            if count > 1:
                lane = lanes.setdefault(count, Atom(-count, "lane", (count, 0), frozenset(), 1))
                first = _laned(first, lane, [b - a for a, b in zip(group[at][0], group[at + 1][0], strict=True)])
            result.append(first)
            at += count
    return tuple(result)


def _progression(group: list[tuple[list[int], Access]], at: int) -> int:
    """How many accesses from number `at` on lie side by side, their conditions changing evenly."""
    size = cast(Poly, group[at][1].size).constant if group[at][0] else None
    if size is None or at + 1 >= len(group):
        return 1
    steps = [b - a for a, b in zip(group[at][0], group[at + 1][0], strict=True)]
    if steps[0] != size:
        return 1
    count = 2
    while at + count < len(group):
        before, after = group[at + count - 1][0], group[at + count][0]
        if [b - a for a, b in zip(before, after, strict=True)] != steps:
            break
        count += 1
    return count if _is_dense(group[at][1], steps, count) else 1


def _is_dense(first: Access, steps: list[int], count: int) -> bool:
    """Whether lanes fill the gaps between the values that are compared, so that conditions stay exact."""
    values: list[Poly] = []

    def kept(value: Poly) -> Poly:
        values.append(value)
        return value

    kept(cast(Poly, first.address))
    for one in first.steps:
        _changed(one, kept)
    for value, step in zip(values[1:], steps[1:], strict=True):
        strides = [abs(c) * _stride(monomial) for monomial, c in value.terms.items() if monomial]
        if step and strides and min(strides) > count * abs(step):
            return False
    return True


def _stride(monomial: tuple[Atom, ...]) -> int:
    """A number that divides all values of a monomial."""
    only = monomial[0]
    is_read = len(monomial) == 1 and only.kind == "ext" and not only.args[2]
    return alignment(cast(Poly, only.args[0])) if is_read else 1


def _laned(first: Access, lane: Atom, steps: list[int]) -> Access:
    """`first` with `steps` times the lane added to its address and to each side of its conditions, in order."""
    remaining = iter(steps)

    def added(value: Poly) -> Poly:
        step = next(remaining)
        return value + Poly({(lane,): step}) if step else value

    address = added(cast(Poly, first.address))
    return replace(first, address=address, steps=tuple(_changed(one, added) for one in first.steps))


def _changed(step: Step | Condition, change: Callable[[Poly], Poly]) -> Step:
    """A step with its compared values changed; loops stay as they are."""
    if not isinstance(step, Condition):
        return step
    if step.op == "cmp":
        c = cast(Compare, step.args[0])
        return Condition("cmp", (c._replace(left=change(c.left), right=change(c.right)),))
    return Condition(step.op, tuple(_changed(cast(Condition, part), change) for part in step.args))
