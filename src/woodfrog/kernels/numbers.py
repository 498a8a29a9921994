"""Polynomials as linear forms over the variables of a launch.

Atoms that depend on parameters and dimensions alone become numbers. Others become variables, exactly where that can be
done, else a `hull` variable that runs through all integers between the value's bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from woodfrog.kernels import limits
from woodfrog.kernels.space import UNBOUNDED, Form, InfeasibleError, Space
from woodfrog.kernels.template import Launch, Step, Template
from woodfrog.kernels.values import Atom, Condition, Poly, atom_bounds

_LARGEST_SHIFT = 128


class Choice(Exception):
    """An address has alternatives; each of `count` must be evaluated by itself."""

    def __init__(self, atom: Atom, count: int) -> None:
        super().__init__()
        self.atom = atom
        self.count = count


class Numbers:
    """Turns polynomials into forms, once for each atom."""

    def __init__(
        self, template: Template, launch: Launch, space: Space, loaded: Mapping[Atom, tuple[int, int]]
    ) -> None:
        self.template = template
        self.launch = launch
        self.space = space
        self.loaded = loaded  # least and greatest value of loads that are known, see contents.py
        self.chosen: dict[Atom, int] = {}
        self.conditions: list[Step] = []  # of the alternatives that were chosen
        self.splits = False  # whether alternatives are told apart (Choice) or joined into bounds
        self.inexact = False
        self._forms: dict[Atom, Form] = {}
        self._counters: dict[int, int] = {}  # loops → the variable of their counter

    def copy(self) -> Numbers:
        new = Numbers(self.template, self.launch, self.space.copy(), self.loaded)
        new._forms = dict(self._forms)
        new._counters = dict(self._counters)
        new.inexact = self.inexact
        return new

    def choose(self, choice: Choice, index: int) -> None:
        self.chosen[choice.atom] = index
        atom = choice.atom
        if atom.kind == "select":
            from woodfrog.kernels.values import negate

            condition = cast(Condition, atom.args[0])
            self.conditions.append(negate(condition) if index else condition)
        gate = self._gate(atom, index)
        if gate is not None:
            self.conditions += gate[0]

    def _gate(self, atom: Atom, index: int) -> tuple[tuple[Step, ...], bool] | None:
        """What holds where an `either` has its alternative number `index`, if that is known."""
        if atom.kind != "either" or atom.args[1] is None:
            return None
        block, sources = cast("tuple[int, tuple[int, ...]]", atom.args[1])
        return self.template.gates.get((block, sources[index]))

    def address(self, value: Poly, bases: list[int]) -> Form:
        """The form of an address; `bases` gets what may be pointers in it."""
        result = Form(0)
        for monomial, coefficient in value.terms.items():
            if coefficient == 1 and len(monomial) == 1:
                atom = monomial[0]
                if atom.kind in ("either", "select", "paramat"):
                    part = self._alternative(atom)
                    if isinstance(part, Poly):
                        result = result.plus(self.address(part, bases))
                        continue
                    if part is not None:
                        bases.append(part)
                        result = result.shifted(part)
                        continue
                form = self.atom(atom)
                if not form.terms and atom.kind in ("param", "symbol"):
                    bases.append(form.constant)
                result = result.plus(form)
            else:
                result = result.plus(self._monomial(monomial), coefficient)
        return result

    def _alternative(self, atom: Atom) -> Poly | int | None:
        """The alternative of an atom that this case is about. None: it has too many, bounds must do."""
        if atom.kind == "select":
            from woodfrog.kernels.constraints import Constraints

            known = Constraints(self).decided(cast(Condition, atom.args[0]))
            if known is not None:
                return cast(Poly, atom.args[1 if known else 2])
        parts: list[Poly | int]
        if atom.kind == "paramat":
            values = self._parameter_values(atom)
            if values is None:
                return None
            parts = list(values)
        else:
            parts = list(cast("tuple[Poly, ...]", atom.args[0] if atom.kind == "either" else atom.args[1:]))
        if len(parts) == 1:
            return parts[0]
        if atom not in self.chosen:
            raise Choice(atom, len(parts))
        index = self.chosen[atom]
        gate = self._gate(atom, index)
        if atom.kind != "select" and not (gate is not None and gate[1]):
            self.inexact = True
        return parts[index]

    def form(self, value: Poly) -> Form:
        """A polynomial as a form; not reduced."""
        result = Form(0)
        for monomial, coefficient in value.terms.items():
            if not monomial:
                result = result.shifted(coefficient)
            elif len(monomial) == 1:
                result = result.plus(self.atom(monomial[0]), coefficient)
            else:
                result = result.plus(self._monomial(monomial), coefficient)
        return result

    def loop_counter(self, loop: int) -> int:
        """The variable of a loop's counter, bounded as far as the loop's conditions bound it."""
        if loop not in self._counters:
            self._counters[loop] = next(iter(self.space.variable(0, UNBOUNDED).terms))
            from woodfrog.kernels.constraints import Constraints

            Constraints(self).bound_counter(self.template.loops[loop], self._counters[loop])
        return self._counters[loop]

    def bounds(self, value: Poly) -> tuple[int, int]:
        return self.space.bounds(self.space.reduced(self.form(value)))

    def _monomial(self, monomial: tuple[Atom, ...]) -> Form:
        result = Form(1)
        for atom in monomial:
            result = self._product(result, self.space.reduced(self.atom(atom)))
        return result

    def _product(self, left: Form, right: Form) -> Form:
        if not left.terms:
            return right.scaled(left.constant)
        if not right.terms:
            return left.scaled(right.constant)
        a, b = self.space.bounds(self.space.reduced(left)), self.space.bounds(right)
        return self._hull([x * y for x in a for y in b])

    def _hull(self, values: list[int]) -> Form:
        if not values:
            raise InfeasibleError
        low, high = max(min(values), -UNBOUNDED), min(max(values), UNBOUNDED)
        return self.space.variable(low, high, hull=True)

    def atom(self, atom: Atom) -> Form:
        found = self._forms.get(atom)
        if found is None:
            found = self._new(atom)
            self._forms[atom] = found
        return found

    def _new(self, atom: Atom) -> Form:
        a = atom.args
        kind = atom.kind
        if kind == "param":
            offset, size = cast("tuple[int, int]", a)
            if size > 8 or offset < 0 or offset + size > len(self.launch.parameters):
                return self._hull([0, (1 << 8 * size) - 1])
            return Form(int.from_bytes(self.launch.parameters[offset : offset + size], "little"))
        if kind == "lane":
            return self.space.variable(0, cast(int, a[0]) - 1)
        if kind == "special":
            return self._special(str(a[0]))
        if kind == "loop":
            return Form(0, {self.loop_counter(cast(int, a[0])): 1})
        if kind == "ext":
            return self.read_as(self.form(cast(Poly, a[0])), cast(int, a[1]), cast(bool, a[2]))
        if kind == "floordiv":
            return self._floordiv(cast(Poly, a[0]), cast(Poly, a[1]))
        if kind == "truncdiv":
            return self._truncdiv(cast(Poly, a[0]), cast(Poly, a[1]))
        if kind in ("and", "or", "xor"):
            return self._bitwise(kind, cast(Poly, a[0]), cast(Poly, a[1]))
        if kind in ("min", "max"):
            return self._extreme(kind, cast(Poly, a[0]), cast(Poly, a[1]))
        if kind == "pow2":
            return self._power(cast(Poly, a[0]), cast(int, a[1]))
        if kind == "upto":
            return self._hull([0, max(0, self.bounds(cast(Poly, a[0]))[1])])
        if kind == "load":
            low_high = self.loaded.get(atom) or atom_bounds(atom)
            assert low_high is not None
            return self._hull(list(low_high))
        if kind == "unknown":
            return self._hull([cast(int, a[1]), cast(int, a[2])])
        if kind == "symbol":
            place = self.launch.symbols.get(str(a[0]))
            return Form(place[0]) if place else self._hull([0, (1 << 64) - 1])
        if kind in ("either", "select"):
            return self._alternatives(atom)
        if kind == "paramat":
            values = self._parameter_values(atom)
            return self._hull(values if values else [0, (1 << 8 * cast(int, a[1])) - 1])
        return self._hull([0, (1 << 64) - 1])  # an address in a window, or a kind that has no number

    def _special(self, name: str) -> Form:
        register, axis = name.split(".")
        index = "xyz".index(axis)
        size = self.launch.block[index] if register in ("tid", "ntid") else self.launch.grid[index]
        return Form(size) if register.startswith("n") else self.space.variable(0, size - 1)

    def _alternatives(self, atom: Atom) -> Form:
        if self.splits:
            part = self._alternative(atom)
            if isinstance(part, Poly):
                form = self.form(part)
                self._forms.pop(atom, None)
                return form
        elif atom.kind == "select":
            from woodfrog.kernels.constraints import Constraints

            known = Constraints(self).decided(cast(Condition, atom.args[0]))
            if known is not None:
                return self.form(cast(Poly, atom.args[1 if known else 2]))
        parts = cast("tuple[Poly, ...]", atom.args[0] if atom.kind == "either" else atom.args[1:])
        return self._hull(
            [bound for index, part in enumerate(parts) for bound in self._gated_bounds(atom, index, part)]
        )

    def _gated_bounds(self, atom: Atom, index: int, part: Poly) -> tuple[int, ...]:
        """Bounds of an alternative where it is taken; none if it never is."""
        gate = self._gate(atom, index)
        if gate is None or not gate[0]:
            return self.bounds(part)
        from woodfrog.kernels.constraints import Constraints

        there = self.copy()
        try:
            constraints = Constraints(there)
            for step in gate[0]:
                constraints.step(step)
            return there.bounds(part)
        except InfeasibleError:
            return ()

    def _parameter_values(self, atom: Atom) -> list[int] | None:
        """The values of all parameter slots that a computed offset can name; None when there are too many."""
        size = cast(int, atom.args[1])
        form = self.space.reduced(self.form(cast(Poly, atom.args[0])))
        low, high = self.space.bounds(form)
        end = len(self.launch.parameters) - size
        step = 0
        from math import gcd

        for coefficient in form.terms.values():
            step = gcd(step, coefficient)
        step = step or 1
        # An index outside the array would be an error of the program; outside the block there is nothing.
        low, high = low if low >= 0 else low % step, min(high, end)
        count = (high - low) // step + 1
        if count < 1 or count > limits.ALTERNATIVES:
            return None
        block = self.launch.parameters
        return [int.from_bytes(block[o : o + size], "little") for o in range(low, high + 1, step)]

    def read_as(self, form: Form, width: int, signed: bool) -> Form:
        """The integer that the low `width` bits of a value are."""
        form = self.space.reduced(form)
        low, high = self.space.bounds(form)
        least = -(1 << (width - 1)) if signed else 0
        whole = 1 << width
        turns = (low - least) // whole
        if high - turns * whole < least + whole:
            return form.shifted(-turns * whole)
        return self._hull([least, least + whole - 1])

    def _floordiv(self, dividend: Poly, divisor: Poly) -> Form:
        by = self.space.reduced(self.form(divisor))
        if not by.terms and by.constant > 0:
            nested = self._nested(dividend, by.constant)
            if nested is not None:
                return nested
        form = self.space.reduced(self.form(dividend))
        if not by.terms and by.constant > 0:
            return self._magic(form, by.constant) or self.space.quotient(form, by.constant)
        low, high = self.space.bounds(by)
        a = self.space.bounds(form)
        if low <= 0:
            return (
                self._hull([-UNBOUNDED, UNBOUNDED])
                if low <= 0 <= high
                else self._hull([-abs(x) - 1 for x in a] + [abs(x) for x in a])
            )
        return self._hull([x // y for x in a for y in (low, high)])

    def _nested(self, dividend: Poly, divisor: int) -> Form | None:
        """(x // p) // d as x // (p * d), also where x // p is read as a number of a type in between."""
        atom = _only_atom(dividend)
        if atom is None or atom.kind != "ext":
            return None
        inner = _only_atom(cast(Poly, atom.args[0]))
        power = cast(Poly, inner.args[1]).constant if inner is not None and inner.kind == "floordiv" else None
        if inner is None or power is None or power <= 0:
            return None
        width, signed = cast(int, atom.args[1]), cast(bool, atom.args[2])
        least = -(1 << (width - 1)) if signed else 0
        numerator = self.space.reduced(self.form(cast(Poly, inner.args[0])))
        low, high = self.space.bounds(numerator)
        if low // power < least or high // power >= least + (1 << width):
            return None
        return self._magic(numerator, power * divisor) or self.space.quotient(numerator, power * divisor)

    def _magic(self, form: Form, power: int) -> Form | None:
        """(x * m + c) // 2**t as x // d: what compilers make of a division by a constant d."""
        if power & (power - 1) or power < 1 << 31 or not form.terms:
            return None
        multiplier = 0
        from math import gcd

        for coefficient in form.terms.values():
            multiplier = gcd(multiplier, coefficient)
        if multiplier < 3 or form.constant % multiplier:
            return None
        best: int | None = None
        original = Form(form.constant // multiplier, {v: c // multiplier for v, c in form.terms.items()})
        low, high = self.space.bounds(original)
        # multiplier may hold a factor of x's own coefficients: try the common ones.
        for factor in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            if multiplier % factor:
                break
            m = multiplier // factor
            divisor = -(-power // m)  # ceil; then m * divisor >= power
            for d in (divisor, divisor - 1):
                excess = m * d - power
                top = high * factor
                if d > 1 and excess >= 0 and low >= 0 and excess * top < power:
                    best = d
                    return self.space.quotient(original.scaled(factor), best)
        return None

    def _truncdiv(self, dividend: Poly, divisor: Poly) -> Form:
        by = self.space.reduced(self.form(divisor))
        form = self.space.reduced(self.form(dividend))
        low, high = self.space.bounds(form)
        if not by.terms and by.constant > 0:
            if low >= 0:
                return self.space.quotient(form, by.constant)
            if high <= 0:
                return self.space.quotient(form.scaled(-1), by.constant).scaled(-1)
            return self._hull([-(-low // by.constant), high // by.constant])
        d_low, d_high = self.space.bounds(by)
        if d_low <= 0 <= d_high:
            return self._hull([-UNBOUNDED, UNBOUNDED])  # a division by zero gives anything
        most = max(abs(low), abs(high))
        if d_low > 0 and low >= 0:
            return self._hull([0, high // d_low])
        return self._hull([-most, most])

    def _bitwise(self, kind: str, first: Poly, second: Poly) -> Form:
        left, right = self.space.reduced(self.form(first)), self.space.reduced(self.form(second))
        if not left.terms and not right.terms:
            a, b = left.constant, right.constant
            return Form(a & b if kind == "and" else a | b if kind == "or" else a ^ b)
        bits = self.space.possible_bits(left), self.space.possible_bits(right)
        if bits[0] is None or bits[1] is None:
            highs = [self.space.bounds(left)[1], self.space.bounds(right)[1]]
            lows = [self.space.bounds(left)[0], self.space.bounds(right)[0]]
            if kind == "and" and min(lows) >= 0:
                return self._hull([0, min(highs)])
            return self._hull([0, UNBOUNDED])
        if kind == "and":
            for value, mask, other in ((left, bits[0], right), (right, bits[1], left)):
                if not other.terms and other.constant & mask == mask:
                    return value
            return self._hull([0, bits[0] & bits[1]])
        if bits[0] & bits[1] == 0:
            return left.plus(right)
        least = max(self.space.bounds(left)[0], self.space.bounds(right)[0]) if kind == "or" else 0
        return self._hull([least, bits[0] | bits[1]])

    def _extreme(self, kind: str, first: Poly, second: Poly) -> Form:
        left, right = self.space.reduced(self.form(first)), self.space.reduced(self.form(second))
        difference = self.space.bounds(self.space.reduced(left.plus(right, -1)))
        if difference[1] <= 0:
            return left if kind == "min" else right
        if difference[0] >= 0:
            return right if kind == "min" else left
        a, b = self.space.bounds(left), self.space.bounds(right)
        pick = min if kind == "min" else max
        return self._hull([pick(a[0], b[0]), pick(a[1], b[1])])

    def _power(self, exponent: Poly, width: int) -> Form:
        low, high = self.bounds(exponent)

        def power(number: int) -> int:
            if width and number >= width:
                return 0
            return 1 << max(0, min(number, _LARGEST_SHIFT))

        if low == high:
            return Form(power(low))
        least = 0 if width and high >= width else power(low)
        return self._hull([least, 1 << min(max(high, 0), width - 1 if width else _LARGEST_SHIFT)])


def _only_atom(value: Poly) -> Atom | None:
    """The atom that a polynomial consists of, if it is just one."""
    if len(value.terms) == 1:
        (monomial, coefficient) = next(iter(value.terms.items()))
        if coefficient == 1 and len(monomial) == 1:
            return monomial[0]
    return None
