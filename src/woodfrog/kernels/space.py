"""The integer points of a launch: variables with bounds, linear forms over them, and linear constraints.

A Space describes a superset of the points that its constraints allow; `loose` says that it may be a proper superset.
Constraints on a form whose values are all the integers between two bounds (i = block * size + thread < n) are kept as
they are, as a variable of their own that replaces the form wherever it occurs; that is what makes answers exact.
"""

from __future__ import annotations

from math import gcd

# Stands for infinity. Products of a few of these stay comparable; nothing real comes near (addresses are below 2**64).
UNBOUNDED = 1 << 200
_FAR = 1 << 150


class InfeasibleError(Exception):
    """The constraints allow no point at all."""


class Form:
    """A linear form: constant + Σ coefficient * variable. Treated as immutable."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: int, terms: dict[int, int] | None = None) -> None:
        self.constant = constant
        self.terms = terms or {}

    def plus(self, other: Form, factor: int = 1) -> Form:
        if not other.terms:
            return Form(self.constant + factor * other.constant, self.terms)
        terms = dict(self.terms)
        for variable, coefficient in other.terms.items():
            total = terms.get(variable, 0) + factor * coefficient
            if total:
                terms[variable] = total
            else:
                terms.pop(variable, None)
        return Form(self.constant + factor * other.constant, terms)

    def scaled(self, factor: int) -> Form:
        if factor == 0:
            return Form(0)
        return Form(self.constant * factor, {v: c * factor for v, c in self.terms.items()})

    def shifted(self, amount: int) -> Form:
        return Form(self.constant + amount, self.terms)


class Space:
    """Variables, their bounds, and what is known of their sums."""

    __slots__ = ("_composites", "_member_of", "_replaced", "high", "hull", "loose", "low")

    def __init__(self) -> None:
        self.low: list[int] = []
        self.high: list[int] = []
        self.hull: set[int] = set()  # variables that stand for values of which only bounds are known
        self.loose = False
        self._replaced: dict[int, Form] = {}  # variables that were split: what they are now
        self._composites: list[tuple[dict[int, int], int]] = []  # a sum of variables, and the variable that is that sum
        self._member_of: dict[int, int] = {}  # in how many composites a variable is

    def copy(self) -> Space:
        new = Space()
        new.low, new.high, new.hull, new.loose = list(self.low), list(self.high), set(self.hull), self.loose
        new._replaced = dict(self._replaced)
        new._composites = list(self._composites)
        new._member_of = dict(self._member_of)
        return new

    def variable(self, low: int, high: int, *, hull: bool = False) -> Form:
        """A new variable, or a constant where there is one value only."""
        if low > high:
            raise InfeasibleError
        if low == high:
            return Form(low)
        self.low.append(low)
        self.high.append(high)
        number = len(self.low) - 1
        if hull:
            self.hull.add(number)
        return Form(0, {number: 1})

    def reduced(self, form: Form) -> Form:
        """The same form in the variables of now: split ones replaced, known sums put in place of their parts."""
        changed = True
        while changed:
            changed = False
            if self._replaced and any(v in self._replaced for v in form.terms):
                result = Form(form.constant)
                for v, c in form.terms.items():
                    replacement = self._replaced.get(v)
                    result = result.plus(replacement, c) if replacement is not None else result.plus(Form(0, {v: c}))
                form, changed = result, True
            for parts, total in self._composites:
                moving = [v for v in parts if self.low[v] != self.high[v]]
                if not moving:
                    continue
                if total in form.terms and any(v in form.terms for v in moving):
                    # A sum beside its own parts: written in parts, some may cancel out.
                    factor = form.terms[total]
                    rest = {v: c for v, c in form.terms.items() if v != total}
                    form = Form(form.constant, rest).plus(Form(0, parts), factor)
                first = moving[0]
                coefficient = form.terms.get(first)
                if coefficient is None or coefficient % parts[first]:
                    continue
                factor = coefficient // parts[first]
                if all(form.terms.get(v) == factor * parts[v] for v in moving):
                    # Parts that have one value only may be gone from the form already.
                    fixed = sum(c * self.low[v] for v, c in parts.items() if self.low[v] == self.high[v])
                    rest = {v: c for v, c in form.terms.items() if v not in moving}
                    form, changed = Form(form.constant - factor * fixed, rest).plus(Form(0, {total: factor})), True
        terms = form.terms
        constants = [v for v in terms if self.low[v] == self.high[v]]
        if constants:
            constant = form.constant + sum(terms[v] * self.low[v] for v in constants)
            form = Form(constant, {v: c for v, c in terms.items() if v not in constants})
        return form

    def bounds(self, form: Form) -> tuple[int, int]:
        """Least and greatest value of a reduced form."""
        low = high = form.constant
        for v, c in form.terms.items():
            if c > 0:
                low += c * self.low[v]
                high += c * self.high[v]
            else:
                low += c * self.high[v]
                high += c * self.low[v]
        return low, high

    def is_entangled(self, form: Form) -> bool:
        """Whether a reduced form has a variable that a constraint ties to others."""
        return any(self._member_of.get(v) for v in form.terms)

    def require_nonpositive(self, form: Form) -> None:
        """Keep only points where `form` <= 0. Raises InfeasibleError when there are none."""
        form = self.reduced(form)
        low, high = self.bounds(form)
        if high <= 0:
            return
        if low > 0:
            raise InfeasibleError
        if low < -_FAR:
            self.loose = True
            return
        if any(v in self.hull for v in form.terms):
            self.loose = True
        dense = self._dense(form) if len(form.terms) > 1 else None
        old = {v: (self.low[v], self.high[v]) for v in form.terms}
        for v, c in form.terms.items():
            if c > 0:
                # c * v <= -(the least of the rest)
                limit = -(low - c * self.low[v]) // c
                self.high[v] = min(self.high[v], limit)
            else:
                limit = -((-(low - c * self.high[v])) // -c)
                self.low[v] = max(self.low[v], limit)
            if self.low[v] > self.high[v]:
                raise InfeasibleError
        changed = [v for v in form.terms if old[v] != (self.low[v], self.high[v])]
        if any(self._member_of.get(v) for v in changed):
            self.loose = True  # sums that these are part of take fewer values now
            self._tighten_sums(changed)
        if len(form.terms) == 1 or self.bounds(form)[1] <= 0:
            return
        if dense is None or any(self._member_of.get(v) for v in form.terms):
            self.loose = True
            return
        divisor, parts, least, greatest = dense
        self._compose(parts, least, min(greatest, -form.constant // divisor))

    def _tighten_sums(self, changed: list[int]) -> None:
        """Bound the sums that variables with new bounds are part of."""
        for parts, total in self._composites:
            if any(v in parts for v in changed):
                low, high = self.bounds(Form(0, parts))
                self.low[total] = max(self.low[total], low)
                self.high[total] = min(self.high[total], high)
                if self.low[total] > self.high[total]:
                    raise InfeasibleError

    def sum_variable(self, form: Form) -> Form | None:
        """A variable for the sum of the terms of a reduced form, if it takes all values between two bounds."""
        dense = self._dense(form)
        if dense is None or any(self._member_of.get(v) for v in form.terms):
            return None
        divisor, parts, least, greatest = dense
        return Form(form.constant, {self._compose(parts, least, greatest): divisor})

    def _compose(self, parts: dict[int, int], least: int, greatest: int) -> int:
        if least > greatest:
            raise InfeasibleError
        self.low.append(least)
        self.high.append(greatest)
        total = len(self.low) - 1
        if any(v in self.hull for v in parts):
            self.hull.add(total)
        self._composites.append((parts, total))
        for v in parts:
            self._member_of[v] = self._member_of.get(v, 0) + 1
        return total

    def _dense(self, form: Form) -> tuple[int, dict[int, int], int, int] | None:
        """(divisor, parts, least, greatest): the terms are divisor * Σ parts, which takes all integers in between."""
        divisor = 0
        for c in form.terms.values():
            divisor = gcd(divisor, c)
        if divisor == 0:
            return None
        parts = {v: c // divisor for v, c in form.terms.items()}
        reach = 1
        for v, c in sorted(parts.items(), key=lambda item: abs(item[1])):
            if abs(c) > reach:
                return None
            reach += abs(c) * (self.high[v] - self.low[v])
        least, greatest = self.bounds(Form(0, parts))
        return divisor, parts, least, greatest

    def quotient(self, form: Form, divisor: int) -> Form:
        """form // divisor, rounding down, for a divisor > 0."""
        form = self.reduced(form)
        whole = {v: c // divisor for v, c in form.terms.items() if c % divisor == 0}
        rest = Form(form.constant % divisor, {v: c for v, c in form.terms.items() if c % divisor})
        base = Form(form.constant // divisor, whole)
        if not rest.terms:
            return base
        low, high = self.bounds(rest)
        if low // divisor == high // divisor:
            return base.shifted(low // divisor)
        split = self._split(rest, divisor)
        if split is not None:
            return base.plus(split)
        if high - low > _FAR:
            return base.plus(self.variable(-UNBOUNDED, UNBOUNDED, hull=True))
        return base.plus(self.variable(low // divisor, high // divisor, hull=True))

    def _split(self, rest: Form, divisor: int) -> Form | None:
        """rest // divisor where rest is a multiple of one variable: that variable becomes quotient and remainder."""
        if len(rest.terms) > 1:
            whole = self.sum_variable(rest)
            if whole is None:
                return None
            rest = whole
        ((v, c),) = rest.terms.items()
        if c < 0 or divisor % c or v in self.hull or self.high[v] > _FAR:
            return None
        step, offset = divisor // c, rest.constant // c
        if offset:
            return None
        low, high = self.low[v], self.high[v]
        if step == 1:
            return Form(0, {v: 1})
        quotient = self.variable(low // step, high // step)
        if not quotient.terms:
            return quotient
        remainder = self.variable(0, step - 1)
        self._replaced[v] = quotient.scaled(step).plus(remainder)
        (q,), (r,) = quotient.terms, remainder.terms
        for index, (parts, total) in enumerate(self._composites):
            if v in parts:
                new = {other: c for other, c in parts.items() if other != v}
                new.update({q: parts[v] * step, r: parts[v]})
                self._composites[index] = (new, total)
                self._member_of[q] = self._member_of.get(q, 0) + 1
                self._member_of[r] = self._member_of.get(r, 0) + 1
        if low % step or (high + 1) % step:
            # Not all pairs occur: their sum is known, and stays a variable of its own.
            self._compose({r: 1, q: step}, low, high)
        return quotient

    def possible_bits(self, form: Form) -> int | None:
        """A mask of all bits that a reduced, non-negative form can have set; None when it may be negative or huge."""
        low, high = self.bounds(form)
        if low < 0 or high > _FAR:
            return None
        mask, ends = form.constant, 0
        pieces: list[int] = [form.constant] if form.constant > 0 else []
        simple = form.constant >= 0
        for v, c in form.terms.items():
            if c < 0 or self.low[v] < 0:
                simple = False
                break
            shift = (c & -c).bit_length() - 1
            pieces.append((1 << (c * self.high[v]).bit_length()) - (1 << shift))
        if simple:
            mask = 0
            for piece in pieces:
                if mask & piece:
                    simple = False
                    break
                mask |= piece
        if simple:
            return mask
        ends = form.constant
        for c in form.terms.values():
            ends |= c
        lowest = (ends & -ends).bit_length() - 1 if ends else 0
        return (1 << high.bit_length()) - (1 << lowest) if high.bit_length() > lowest else 0
