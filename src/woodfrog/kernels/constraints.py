"""Conditions and loops as constraints on the points of a launch.

A condition that cannot be expressed is left out and noted; that only ever adds points.
"""

from __future__ import annotations

from typing import cast

from woodfrog.kernels.numbers import Numbers
from woodfrog.kernels.space import _FAR, Form, InfeasibleError
from woodfrog.kernels.template import LoopFact, Step
from woodfrog.kernels.values import Compare, Condition, Poly

_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class Constraints:
    """Puts conditions on the space of some numbers."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def step(self, step: Step) -> None:
        """Keep only points where a step of an access holds."""
        if isinstance(step, LoopFact):
            self.loop(step)
        else:
            self.require(step)

    def require(self, condition: Condition) -> None:
        """Keep only points where a condition holds. Raises InfeasibleError when there are none."""
        space = self._numbers.space
        if condition.op == "true":
            return
        if condition.op == "false":
            raise InfeasibleError
        if condition.op == "and":
            for part in condition.args:
                self.require(cast(Condition, part))
        elif condition.op == "or":
            parts = [(part, self.decided(part)) for part in cast("tuple[Condition, ...]", condition.args)]
            if any(known for _, known in parts):
                return
            open_parts = [part for part, known in parts if known is None]
            if not open_parts:
                raise InfeasibleError
            if len(open_parts) == 1:
                self.require(open_parts[0])
            else:
                space.loose = True
        elif condition.op == "cmp":
            self._compare(cast(Compare, condition.args[0]))
        else:
            space.loose = True

    def decided(self, condition: Condition) -> bool | None:
        """True or False where a condition is the same at all points, else None."""
        if condition.op in ("true", "false"):
            return condition.op == "true"
        if condition.op in ("and", "or"):
            known = [self.decided(part) for part in cast("tuple[Condition, ...]", condition.args)]
            deciding = condition.op == "or"
            if deciding in known:
                return deciding
            return None if None in known else not deciding
        if condition.op != "cmp":
            return None
        c = cast(Compare, condition.args[0])
        numbers = self._numbers
        left = numbers.read_as(numbers.form(c.left), c.width, c.signed)
        right = numbers.read_as(numbers.form(c.right), c.width, c.signed)
        low, high = numbers.space.bounds(numbers.space.reduced(left.plus(right, -1)))
        always, never = {
            "lt": (high < 0, low >= 0),
            "le": (high <= 0, low > 0),
            "gt": (low > 0, high <= 0),
            "ge": (low >= 0, high < 0),
            "eq": (low == high == 0, low > 0 or high < 0),
            "ne": (low > 0 or high < 0, low == high == 0),
        }[c.relation]
        return True if always else False if never else None

    def _compare(self, c: Compare) -> None:
        numbers, space = self._numbers, self._numbers.space
        relation, left_poly, right_poly = c.relation, c.left, c.right
        if relation in ("gt", "ge"):
            relation, left_poly, right_poly = _SWAPPED[relation], right_poly, left_poly
        raw = space.reduced(numbers.form(left_poly))
        right = numbers.read_as(numbers.form(right_poly), c.width, c.signed)
        if not c.signed and relation in ("lt", "le"):
            # x - a < n of unsigned numbers means 0 <= x - a < n, when x - a cannot come round to be below n again.
            low, high = space.bounds(raw)
            most = space.bounds(space.reduced(right))[1]
            if low < 0 and low + (1 << c.width) > most and high < 1 << c.width:
                space.require_nonpositive(raw.scaled(-1))
                space.require_nonpositive(raw.plus(right, -1).shifted(1 if relation == "lt" else 0))
                return
        left = numbers.read_as(raw, c.width, c.signed)
        difference = left.plus(right, -1)
        if relation == "lt":
            space.require_nonpositive(difference.shifted(1))
        elif relation == "le":
            space.require_nonpositive(difference)
        elif relation == "eq":
            space.require_nonpositive(difference)
            space.require_nonpositive(difference.scaled(-1))
        else:
            self._unequal(difference)

    def _unequal(self, difference: Form) -> None:
        space = self._numbers.space
        difference = space.reduced(difference)
        low, high = space.bounds(difference)
        if low > 0 or high < 0:
            return
        if low == high == 0:
            raise InfeasibleError
        if low == 0:
            space.require_nonpositive(difference.scaled(-1).shifted(1))
        elif high == 0:
            space.require_nonpositive(difference.shifted(1))
        elif len(difference.terms) == 1 and difference.constant % next(iter(difference.terms.values())):
            return  # never equal
        else:
            space.loose = True

    def bound_counter(self, fact: LoopFact, counter: int) -> None:
        """Bound a loop's counter and nothing else: right for any thread that the loop has run in."""
        for condition in fact.again:
            if condition.op == "cmp" and not self._bound_doublings(condition, fact.loop, counter):
                self._bound(condition, counter)

    def _bound_doublings(self, condition: Condition, loop: int, counter: int) -> bool:
        """Bound a counter k by a * 2**(j * (k - 1)) < n, where that cannot wrap around before it fails."""
        numbers, space = self._numbers, self._numbers.space
        c = cast(Compare, condition.args[0])
        for growing, fixed, relation in ((c.left, c.right, c.relation), (c.right, c.left, _SWAPPED[c.relation])):
            found = _doubling(growing, loop)
            if found is None or relation not in ("lt", "le"):
                continue
            factor, each = found
            _, limit = space.bounds(space.reduced(numbers.read_as(numbers.form(fixed), c.width, c.signed)))
            limit -= relation == "lt"
            top = (1 << (c.width - c.signed)) - 1
            if factor > top or each > 64 or limit << each > top:
                return False
            most = ((limit // factor).bit_length() - 1) // each + 1 if limit >= factor else 0
            space.high[counter] = min(space.high[counter], most)
            return True
        return False

    def loop(self, fact: LoopFact) -> None:
        """The counter of a loop: 0, or the condition to go on held in the iteration before."""
        numbers, space = self._numbers, self._numbers.space
        counter = numbers.loop_counter(fact.loop)
        if space.high[counter] == 0:
            return  # it runs once at most, whatever its conditions are
        if not fact.complete:
            space.loose = True
        exact: list[Form] = []
        for condition in fact.again:
            form = self._bound(condition, counter) if condition.op == "cmp" else None
            if form is None:
                space.loose = True
            else:
                exact.append(form)
        for form in exact:
            # It need not hold when the counter is 0; where it does anyway, it holds for all values.
            at_zero = Form(form.constant, {v: c for v, c in form.terms.items() if v != counter})
            reduced = space.reduced(at_zero)
            if space.bounds(reduced)[1] <= 0:
                space.require_nonpositive(form)
            else:
                space.loose = True

    def _bound(self, condition: Condition, counter: int) -> Form | None:
        """Bound the counter by a condition that held for its value less one; the condition as a form that is <= 0.

        None when the condition says nothing. Values that are compared may not wrap around before the loop ends: that
        is proven from where they begin, how they step, and what they are compared with.
        """
        numbers, space = self._numbers, self._numbers.space
        c = cast(Compare, condition.args[0])
        relation, moving_poly, fixed_poly = c.relation, c.left, c.right
        moving = space.reduced(numbers.form(moving_poly))
        if counter not in moving.terms:
            relation, moving_poly, fixed_poly = _SWAPPED[relation], fixed_poly, moving_poly
            moving = space.reduced(numbers.form(moving_poly))
        fixed = space.reduced(numbers.read_as(numbers.form(fixed_poly), c.width, c.signed))
        stride = moving.terms.get(counter, 0)
        if stride == 0 or counter in fixed.terms:
            return None
        least = -(1 << (c.width - 1)) if c.signed else 0
        whole = 1 << c.width
        # What is compared the first time, when the counter's value less one is 0.
        first = Form(moving.constant + stride, {v: k for v, k in moving.terms.items() if v != counter})
        low, high = space.bounds(space.reduced(first))
        turns = (low - least) // whole
        if high - turns * whole >= least + whole:
            return None
        first, moving = first.shifted(-turns * whole), moving.shifted(-turns * whole)
        top = least + whole - 1
        if stride < 0:
            first, moving, fixed, stride = first.scaled(-1), moving.scaled(-1), fixed.scaled(-1), -stride
            relation, top = _SWAPPED[relation], -least
        low, _ = space.bounds(space.reduced(first))
        _, limit = space.bounds(fixed)
        if relation in ("lt", "le"):
            limit -= relation == "lt"
            if limit + stride > top:
                return None
            form = moving.plus(fixed, -1).shifted(1 if relation == "lt" else 0)
        elif relation == "ne":
            gap = space.reduced(first.plus(fixed, -1))
            if space.bounds(gap)[1] > 0 or (
                stride != 1 and (gap.constant % stride or any(k % stride for k in gap.terms.values()))
            ):
                return None
            limit -= stride
            form = moving.plus(fixed, -1).shifted(stride)
        else:
            return None
        if low < -_FAR:
            return None
        space.high[counter] = min(space.high[counter], max(0, (limit - low) // stride + 1))
        return form


def _doubling(value: Poly, loop: int) -> tuple[int, int] | None:
    """(a, j) of a value a * 2**(j * (k - 1)), where k is a loop's counter."""
    if len(value.terms) != 1:
        return None
    ((monomial, factor),) = value.terms.items()
    if factor < 1 or len(monomial) != 1 or monomial[0].kind != "pow2" or monomial[0].args[1] != 0:
        return None
    exponent = cast(Poly, monomial[0].args[0])
    counters = [m for m in exponent.terms if len(m) == 1 and m[0].kind == "loop" and m[0].args[0] == loop]
    if len(exponent.terms) != 2 or len(counters) != 1:
        return None
    each = exponent.terms[counters[0]]
    return (factor, each) if each >= 1 and exponent.terms.get((), 0) == -each else None
