"""Accesses that lie side by side as one: what an unrolled or vectorised loop stores at x, x + 4, x + 8.

Where all happen together and touch they become one larger access. Where their addresses and conditions differ by
amounts that grow evenly (x < n, x + 128 < n, …), as Triton's tiles and masks have, they become one access with a
variable more, the lane: 4 * (x + 128 * lane) where x + 128 * lane < n. The amounts may depend on the launch, as the
length of a row does. Lanes are found among what has lanes already, as tiles of tiles.

The points of such an access are those of its parts together, so it is a superset like any other. Where the launch does
not make it exact its parts may be, and evaluate.py looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from woodfrog.kernels import limits
from woodfrog.kernels.template import Access, LoopFact, Step
from woodfrog.kernels.values import Atom, Compare, Condition, Monomial, Poly, const

# Functions whose arguments may have lanes in them, and how many of these.
_FOLLOWED = {"ext": 1, "floordiv": 1, "truncdiv": 1, "or": 2, "xor": 2, "min": 2, "max": 2}
_UNIFORM = ("ext", "floordiv", "truncdiv", "and", "or", "xor", "min", "max")
_Amounts = tuple[Poly, ...]
_Vector = tuple[int, ...]


def combined(accesses: Sequence[Access]) -> tuple[Access, ...]:
    """The same bytes by fewer accesses. One that stands for several has the position and the reason of the first."""
    found: Sequence[Access] = _joined([_plain(access) for access in accesses])
    lanes = _Lanes()
    for level in range(limits.LANE_LEVELS):
        fewer = lanes.combined(found, level)
        if len(fewer) == len(found):
            break
        found = fewer
    return tuple(found)


def _plain(access: Access) -> Access:
    return replace(access, steps=tuple(_plain_step(one) for one in access.steps))


def _plain_step(step: Step) -> Step:
    return _plain_condition(step) if isinstance(step, Condition) else step


def _plain_condition(condition: Condition) -> Condition:
    """Without readings of bits that the comparison does itself."""
    if condition.op == "cmp":
        c = cast(Compare, condition.args[0])
        return Condition("cmp", (c._replace(left=_bits(c.left, c.width), right=_bits(c.right, c.width)),))
    return Condition(condition.op, tuple(_plain_condition(cast(Condition, one)) for one in condition.args))


def _bits(value: Poly, width: int) -> Poly:
    """A value with the same bits below `width`."""
    for monomial, coefficient in value.terms.items():
        if len(monomial) == 1 and monomial[0].kind == "ext" and cast(int, monomial[0].args[1]) >= width:
            inner = cast(Poly, monomial[0].args[0])
            return _bits((value - Poly({monomial: coefficient}) + inner.scaled(coefficient)).reduced(width), width)
    return value


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


@dataclass(frozen=True)
class _Shape:
    """What is left of a value without what is the same in a whole launch.

    Values with equal numbers differ in the latter alone. `amounts` is what was left out: of the value itself, then of
    what its terms are made of, in their order.
    """

    number: int
    amounts: _Amounts
    terms: tuple[tuple[tuple[Atom, ...], int], ...]


class _Lanes:
    def __init__(self) -> None:
        self._shapes: dict[Poly, _Shape] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._made: dict[tuple[object, ...], Atom] = {}
        self._uniform: dict[Atom, bool] = {}

    def combined(self, accesses: Sequence[Access], level: int) -> list[Access]:
        """Runs of accesses whose amounts grow evenly as one each; `level` tells their lanes from others."""
        groups: dict[tuple[object, ...], list[tuple[_Amounts, Access]]] = {}
        for access in accesses:
            size = None if access.size is None else access.size.constant
            if access.address is None or size is None or size <= 0:
                groups.setdefault((id(access),), []).append(((), access))
                continue
            address = self._shape(access.address)
            amounts = list(address.amounts)
            steps = tuple(self._step_shape(step, amounts) for step in access.steps)
            key = (access.kind, size, access.steps_complete, address.number, steps)
            groups.setdefault(key, []).append((tuple(amounts), access))
        result: list[Access] = []
        for group in groups.values():
            monomials = _monomials([amounts for amounts, _ in group])
            ordered = sorted(((_vector(one, monomials), access) for one, access in group), key=lambda one: one[0])
            at = 0
            while at < len(ordered):
                count = _run(ordered, at)
                parts = [access for _, access in ordered[at : at + count]]
                if count > 1:
                    lane = self._atom("lane", (count, level), frozenset(), 0)
                    steps = _difference(ordered[at][0], ordered[at + 1][0])
                    result.append(self._laned(parts, lane, _amounts(steps, monomials)))
                else:
                    result += parts
                at += count
        return result

    def _number(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _is_uniform(self, atom: Atom) -> bool:
        """Whether it has one value in a whole launch."""
        found = self._uniform.get(atom)
        if found is None:
            if atom.kind == "special":
                found = str(atom.args[0]).startswith("n")
            elif atom.kind in _UNIFORM:
                values = [arg for arg in atom.args if isinstance(arg, Poly)]
                found = all(self._is_uniform(one) for value in values for monomial in value.terms for one in monomial)
            else:
                found = atom.kind == "param"
            self._uniform[atom] = found
        return found

    def _is_amount(self, monomial: Monomial, coefficient: int) -> bool:
        if len(monomial) == 1 and monomial[0].kind == "param" and monomial[0].args[1] == 8 and coefficient == 1:
            return False  # a pointer: each names an allocation of its own
        return all(self._is_uniform(atom) for atom in monomial)

    def _shape(self, value: Poly) -> _Shape:
        found = self._shapes.get(value)
        if found is not None:
            return found
        own: dict[Monomial, int] = {}
        terms: list[tuple[tuple[int, ...], int, int, _Amounts, Monomial]] = []
        for monomial, coefficient in value.terms.items():
            if self._is_amount(monomial, coefficient):
                own[monomial] = coefficient
                continue
            factors = sorted(
                ((*self._atom_shape(atom), atom) for atom in monomial), key=lambda one: (one[0], one[2].number)
            )
            amounts = tuple(one for factor in factors for one in factor[1])
            numbers = tuple(factor[0] for factor in factors)
            terms.append((numbers, coefficient, len(terms), amounts, tuple(factor[2] for factor in factors)))
        terms.sort(key=lambda one: one[:3])
        number = self._number("sum", *(one[:2] for one in terms))
        amounts = (Poly(own), *(amount for one in terms for amount in one[3]))
        found = _Shape(number, amounts, tuple((one[4], one[1]) for one in terms))
        self._shapes[value] = found
        return found

    def _followed(self, atom: Atom) -> int:
        """How many of an atom's arguments are followed."""
        count = _FOLLOWED.get(atom.kind, 0)
        amounts = sum(len(self._shape(cast(Poly, arg)).amounts) for arg in atom.args[:count])
        return count if amounts <= limits.LANE_AMOUNTS else 0

    def _atom_shape(self, atom: Atom) -> tuple[int, _Amounts]:
        count = self._followed(atom)
        if count == 0:
            return self._number("atom", atom), ()
        shapes = [self._shape(cast(Poly, arg)) for arg in atom.args[:count]]
        number = self._number(atom.kind, *(shape.number for shape in shapes), *atom.args[count:])
        return number, tuple(one for shape in shapes for one in shape.amounts)

    def _step_shape(self, step: Step | Condition, amounts: list[Poly]) -> object:
        """A step without the amounts of what it compares, which are appended to `amounts`."""
        if isinstance(step, LoopFact):
            return step
        if step.op != "cmp":
            return step.op, *(self._step_shape(cast(Condition, part), amounts) for part in step.args)
        c = cast(Compare, step.args[0])
        left, right = self._shape(c.left), self._shape(c.right)
        amounts += [*left.amounts, *right.amounts]
        return c.relation, c.width, c.signed, left.number, right.number

    # Putting the lane in: the amounts are met in the same order as above.

    def _laned(self, parts: Sequence[Access], lane: Atom, differences: _Amounts) -> Access:
        remaining = iter(differences)
        first = parts[0]
        address = self._poly(cast(Poly, first.address), lane, remaining)
        steps = tuple(self._step(step, lane, remaining) for step in first.steps)
        return replace(first, address=address, steps=steps, parts=tuple(parts))

    def _poly(self, value: Poly, lane: Atom, remaining: Iterator[Poly]) -> Poly:
        own = next(remaining)
        result = value + own * Poly({(lane,): 1}) if own.terms else value
        for factors, coefficient in self._shape(value).terms:
            changed = [self._with_lane(atom, lane, remaining) for atom in factors]
            if any(new is not atom for new, atom in zip(changed, factors, strict=True)):
                term = const(coefficient)
                for atom in changed:
                    term = term * Poly({(atom,): 1})
                before = tuple(sorted(factors, key=lambda atom: atom.number))
                result = result - Poly({before: coefficient}) + term
        return result

    def _with_lane(self, atom: Atom, lane: Atom, remaining: Iterator[Poly]) -> Atom:
        count = self._followed(atom)
        if count == 0:
            return atom
        arguments = [self._poly(cast(Poly, arg), lane, remaining) for arg in atom.args[:count]]
        if all(new == old for new, old in zip(arguments, atom.args[:count], strict=True)):
            return atom
        return self._atom(atom.kind, (*arguments, *atom.args[count:]), atom.loops, atom.depth)

    def _atom(self, kind: str, args: tuple[object, ...], loops: frozenset[int], depth: int) -> Atom:
        """Numbered from -1 downwards: the analysis numbers from 0 upwards."""
        key = (kind, *args)
        if key not in self._made:
            self._made[key] = Atom(-1 - len(self._made), kind, args, loops, depth + 1)
        return self._made[key]

    def _step(self, step: Step, lane: Atom, remaining: Iterator[Poly]) -> Step:
        return self._condition(step, lane, remaining) if isinstance(step, Condition) else step

    def _condition(self, condition: Condition, lane: Atom, remaining: Iterator[Poly]) -> Condition:
        if condition.op == "cmp":
            c = cast(Compare, condition.args[0])
            left = self._poly(c.left, lane, remaining)
            return Condition("cmp", (c._replace(left=left, right=self._poly(c.right, lane, remaining)),))
        parts = (self._condition(cast(Condition, part), lane, remaining) for part in condition.args)
        return Condition(condition.op, tuple(parts))


def _monomials(group: Sequence[_Amounts]) -> list[list[Monomial]]:
    """All monomials that each of the amounts has in any of a group, in one order."""
    positions: list[set[Monomial]] = [{()} for _ in group[0]]
    for amounts in group:
        for found, amount in zip(positions, amounts, strict=True):
            found.update(amount.terms)
    return [sorted(found, key=lambda monomial: [atom.number for atom in monomial]) for found in positions]


def _vector(amounts: _Amounts, monomials: Sequence[Sequence[Monomial]]) -> _Vector:
    return tuple(amount.terms.get(one, 0) for amount, found in zip(amounts, monomials, strict=True) for one in found)


def _amounts(vector: _Vector, monomials: Sequence[Sequence[Monomial]]) -> _Amounts:
    remaining = iter(vector)
    return tuple(Poly({one: c for one in found if (c := next(remaining))}) for found in monomials)


def _difference(before: _Vector, after: _Vector) -> _Vector:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def _run(group: Sequence[tuple[_Vector, Access]], at: int) -> int:
    """How many accesses from number `at` on have constants that grow evenly."""
    if at + 1 >= len(group):
        return 1
    step = _difference(group[at][0], group[at + 1][0])
    count = 2
    while at + count < len(group) and _difference(group[at + count - 1][0], group[at + count][0]) == step:
        count += 1
    return count
