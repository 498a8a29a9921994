"""Evaluates templates: from a launch's dimensions and parameters to the ranges it touches.

Parameters and dimensions are numbers here, indices and loop counters are variables with bounds. Every step keeps a
superset of the truth; a step that may have added something is noted, and the answer is then not called exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from woodfrog.errors import UsageError
from woodfrog.kernels import limits
from woodfrog.kernels.constraints import Constraints
from woodfrog.kernels.footprint import merged, pieces
from woodfrog.kernels.numbers import Choice, Numbers
from woodfrog.kernels.space import InfeasibleError, Space
from woodfrog.kernels.template import Access, Exactness, Kind, Launch, Range, Step, Template
from woodfrog.kernels.values import Atom, Poly

_ADDRESSES = 1 << 64
_SMALLEST_POINTER = 1 << 16  # no driver maps memory in the first pages


def evaluate(template: Template, launch: Launch, kinds: Sequence[Kind] = tuple(Kind)) -> list[Range]:
    """See Template.ranges."""
    return merged([piece for one in evaluate_each(template, launch, kinds) for piece in one[1]])


def evaluate_each(
    template: Template, launch: Launch, kinds: Sequence[Kind] = tuple(Kind)
) -> list[tuple[Access, list[Range]]]:
    """The ranges of each of Template.combined by itself."""
    if len(launch.parameters) < template.parameters_bytes:
        raise UsageError(
            f"{template.kernel} takes {template.parameters_bytes} bytes of parameters, the launch has "
            f"{len(launch.parameters)}"
        )
    if min(*launch.grid, *launch.block) < 1:
        raise UsageError("every dimension of a grid and of a block is at least 1")
    if template.block is not None and tuple(launch.block) != template.block:
        raise UsageError(
            f"{template.kernel} demands blocks of {template.block} threads, the launch has {tuple(launch.block)}: no "
            "driver starts it"
        )
    if launch.contents is not None:
        from woodfrog.kernels.contents import evaluate_each_with_contents

        return evaluate_each_with_contents(template, launch, kinds, launch.contents)
    evaluation = Evaluation(template, launch)
    return [(access, evaluation.ranges(access)) for access in template.combined if access.kind in kinds]


class Evaluation:
    """One launch: spaces are kept for steps that several accesses share."""

    def __init__(
        self, template: Template, launch: Launch, loaded: Mapping[Atom, tuple[int, int]] | None = None
    ) -> None:
        self._loaded = loaded or {}
        self._ranges_each = template.ranges_each
        self._allocations = sorted(one for one in launch.allocations if one[1] > 0)
        self._starts = [start for start, _ in self._allocations]
        self._spaces: dict[tuple[Step, ...], Numbers | None] = {(): Numbers(template, launch, Space(), self._loaded)}
        self._everything = [Range(a, s, Exactness.EVERYTHING) for a, s in self._allocations] or [
            Range(0, _ADDRESSES, Exactness.EVERYTHING)
        ]

    def ranges(self, access: Access, most: int | None = None) -> list[Range]:
        """The ranges of an access; `most` is into how many it may be split.

        Where an access that stands for several is not exact, these are looked at. Not at all of them where the first
        and the last alone, which are among them, name nearly as many bytes.
        """
        most = self._ranges_each if most is None else most
        found = self._ranges(access, most)
        if not access.parts or all(one.exactness is Exactness.EXACT for one in found):
            return found
        each = max(most // len(access.parts), limits.BOUNDED_RANGES)
        ends = merged([*self.ranges(access.parts[0], each), *self.ranges(access.parts[-1], each)])
        if any(one.exactness is not Exactness.EXACT for one in ends):
            named_bytes, least_bytes = (sum(one.size_bytes for one in ranges) for ranges in (found, ends))
            if named_bytes * (limits.NEARLY - 1) <= least_bytes * limits.NEARLY:
                return found
        return merged([*ends, *(one for part in access.parts[1:-1] for one in self.ranges(part, each))])

    def _ranges(self, access: Access, most: int) -> list[Range]:
        numbers = self._numbers_of(access.steps)
        if numbers is None:
            return []
        if access.address is None or access.size is None:
            return self._everything
        found: list[Range] = []
        pending: list[Numbers] = [numbers.copy()]
        cases = 0
        while pending:
            case = pending.pop()
            cases += 1
            try:
                found += self._case(access, access.address, access.size, case, most, splits=True)
            except Choice as choice:
                if cases + len(pending) + choice.count > limits.CASES:
                    return self._joined(access, access.address, access.size, numbers.copy(), most)
                for index in range(choice.count):
                    branch = numbers.copy()
                    branch.chosen = dict(case.chosen)
                    branch.conditions = list(case.conditions)
                    branch.choose(choice, index)
                    pending.append(branch)
            except InfeasibleError:
                continue
        return merged(found)

    def _joined(self, access: Access, address: Poly, size: Poly, numbers: Numbers, most: int) -> list[Range]:
        """The ranges with alternatives joined into bounds: there are too many to look at each."""
        try:
            return self._case(access, address, size, numbers, most, splits=False)
        except Choice:
            return self._everything
        except InfeasibleError:
            return []

    def _numbers_of(self, steps: tuple[Step, ...]) -> Numbers | None:
        """The numbers of points where the steps hold; None when there are no such points."""
        if steps in self._spaces:
            return self._spaces[steps]
        before = self._numbers_of(steps[:-1])
        numbers: Numbers | None = None
        if before is not None:
            numbers = before.copy()
            try:
                Constraints(numbers).step(steps[-1])
            except InfeasibleError:
                numbers = None
        self._spaces[steps] = numbers
        return numbers

    def _case(
        self, access: Access, address: Poly, size: Poly, numbers: Numbers, most: int, *, splits: bool
    ) -> list[Range]:
        """The ranges of one combination of alternatives; of all together where `splits` is False."""
        constraints = Constraints(numbers)
        for step in numbers.conditions:
            constraints.step(step)
        numbers.splits = splits
        bases: list[int] = []
        form = numbers.address(address, bases)
        numbers.splits = False
        space = numbers.space
        form = space.reduced(form)
        length_low, length = space.bounds(space.reduced(numbers.form(size)))
        if length <= 0:
            return []
        in_hull = any(v in space.hull for v in form.terms)
        exact = (
            access.steps_complete
            and not self._loaded
            and not space.loose
            and not in_hull
            and not numbers.inexact
            and not space.is_entangled(form)
            and length_low == length
        )
        low, high = space.bounds(form)
        if high + length - low >= _ADDRESSES:
            return self._whole(bases)
        shift = low - low % _ADDRESSES
        if high - shift + length > _ADDRESSES:
            return self._whole(bases)
        found, exact = pieces(form.shifted(-shift), space, length, exact=exact, most=most)
        exactness = Exactness.EXACT if exact else Exactness.BOUNDED
        ranges = [Range(start, size_bytes, exactness) for start, size_bytes in found]
        return ranges if exactness is Exactness.EXACT else self._clipped(ranges, bases)

    def _clipped(self, ranges: list[Range], bases: list[int]) -> list[Range]:
        """Bounded ranges cut at the end of the allocation that the base points into: a program stays inside it."""
        allocations = self._allocations_of(bases)
        if not allocations:
            return ranges
        result: list[Range] = []
        for one in ranges:
            end = one.address + one.size_bytes
            inside = [(a, s) for a, s in allocations if a < end and one.address < a + s]
            if not inside or len(allocations) > 1:
                result.append(one)
                continue
            a, s = inside[0]
            if a <= one.address and end <= a + s:
                result.append(one)
                continue
            start, stop = max(a, one.address), min(end, a + s)
            whole = (start, stop) == (a, a + s)
            result.append(Range(start, stop - start, Exactness.WHOLE if whole else one.exactness))
        return result

    def _whole(self, bases: list[int]) -> list[Range]:
        allocations = self._allocations_of(bases)
        if not allocations:
            return self._everything
        return [Range(a, s, Exactness.WHOLE) for a, s in allocations]

    def _allocations_of(self, bases: list[int]) -> list[tuple[int, int]]:
        """The allocations that base pointers may point into; one past the end is still a pointer into it."""
        found: list[tuple[int, int]] = []
        for base in bases:
            if base < _SMALLEST_POINTER:
                continue
            index = bisect_right(self._starts, base) - 1
            for one in self._allocations[max(index - 1, 0) : index + 1]:
                if one[0] <= base <= one[0] + one[1] and one not in found:
                    found.append(one)
        return found
