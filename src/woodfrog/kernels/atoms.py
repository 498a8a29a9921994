"""Making the atoms of a kernel's values: equal ones are one object, and what is simpler stands for what is not.

A simplification must be right for every launch; where it depends on one, the atom stays (woodfrog.kernels.numbers).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from woodfrog.kernels import limits
from woodfrog.kernels.values import (
    Atom,
    Condition,
    Poly,
    condition_depth,
    condition_loops,
    const,
    static_bits,
    static_bounds,
)

# From here on a divisor is most likely half of a division by a constant (x * m // 2**t), which is found by its shape.
_MULTIPLIED_QUOTIENT = 1 << 31


class Atoms:
    """Makes the atoms of one kernel, simplifying where that is always right."""

    def __init__(self, block: tuple[int, int, int] | None = None) -> None:
        """`block`: the dimensions that every launch's blocks have, where the kernel demands them."""
        self._made: dict[tuple[object, ...], Atom] = {}
        self._unknowns = 0
        self._block = block

    def atom(self, kind: str, *args: object, loops: frozenset[int] = frozenset()) -> Poly:
        key = (kind, *args)
        found = self._made.get(key)
        if found is None:
            depth = 0
            for arg in args:
                if isinstance(arg, Poly):
                    loops |= arg.loops
                    depth = max(depth, arg.depth)
                elif isinstance(arg, Condition):
                    loops |= condition_loops(arg)
                    depth = max(depth, condition_depth(arg))
                elif kind == "either" and isinstance(arg, tuple) and isinstance(arg[0], Poly):
                    for alternative in arg:
                        loops |= alternative.loops
                        depth = max(depth, alternative.depth)
            found = self._made[key] = Atom(len(self._made), kind, args, loops, depth + 1)
        return Poly({(found,): 1})

    def special(self, name: str) -> Poly:
        """A special register of SPECIAL_BOUNDS."""
        register, _, axis = name.partition(".")
        if self._block is not None and register in ("tid", "ntid"):
            extent = self._block["xyz".index(axis)]
            if register == "ntid" or extent == 1:
                return const(extent if register == "ntid" else 0)
            index = self.atom("special", name)
            next(iter(index.terms))[0].bounds = (0, extent - 1)
            return index
        return self.atom("special", name)

    def unknown(self, low: int, high: int, reason: str, loops: frozenset[int]) -> Poly:
        """A value that is not followed: anything from `low` to `high`."""
        self._unknowns += 1
        return self.atom("unknown", self._unknowns, low, high, reason, loops=loops)

    def load(self, address: Poly, size_bytes: int, signed: bool, loops: frozenset[int]) -> Poly:
        """What a load of an integer from `address` gives: known only where the contents of memory are."""
        self._unknowns += 1
        return self.atom("load", address, size_bytes, signed, self._unknowns, loops=loops)

    def upto(self, most: Poly, loops: frozenset[int]) -> Poly:
        """Some integer from 0 to `most`."""
        self._unknowns += 1
        return self.atom("upto", most, self._unknowns, loops=loops)

    def limited(self, value: Poly, width: int, reason: str = "too large an expression") -> Poly:
        """`value`, or an unknown where it has grown beyond the cap."""
        value = value.reduced(width)
        if len(value.terms) > limits.POLYNOMIAL_TERMS or value.depth > limits.EXPRESSION_DEPTH:
            return self.unknown(0, (1 << width) - 1, reason, value.loops)
        return value

    def ext(self, value: Poly, width: int, signed: bool) -> Poly:
        value = value.reduced(width)
        low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
        number = value.constant
        if number is not None:
            number %= 1 << width
            return const(number - (1 << width) if number > high else number)
        bounds = static_bounds(value)
        if bounds and low <= bounds[0] and bounds[1] <= high:
            return value
        bits = static_bits(value)
        if bits is not None and bits <= high:
            return value
        return self.atom("ext", value, width, signed)

    def bitwise(self, kind: str, left: Poly, right: Poly) -> Poly:
        """`or` or `xor` of non-negative integers: their sum where no bit can be set in both."""
        bits = static_bits(left), static_bits(right)
        if bits[0] is not None and bits[1] is not None and not bits[0] & bits[1]:
            return left + right
        return self.atom(kind, left, right)

    def floordiv(self, left: Poly, right: Poly) -> Poly:
        a, b = left.constant, right.constant
        if a is not None and b:
            return const(a // b)
        if b == 1:
            return left
        if b is not None and b > 0:
            bounds = static_bounds(left)
            if bounds is not None and bounds[0] // b == bounds[1] // b:
                return const(bounds[0] // b)
            only = _single(left)
            if only is not None and only.kind == "floordiv" and (inner := only.args[1].constant) and inner > 0:  # type: ignore[attr-defined]
                return self.atom("floordiv", only.args[0], const(inner * b))
            shared = gcd(b, *left.terms.values())
            if shared > 1 and b < _MULTIPLIED_QUOTIENT:  # (4 * x) // 512 is x // 128
                smaller = Poly({m: c // shared for m, c in left.terms.items()})
                return self.floordiv(smaller, const(b // shared))
        return self.atom("floordiv", left, right)

    def truncdiv(self, left: Poly, right: Poly) -> Poly:
        a, b = left.constant, right.constant
        if a is not None and b:
            quotient = abs(a) // abs(b)
            return const(-quotient if (a < 0) != (b < 0) else quotient)
        bounds, divisor = static_bounds(left), static_bounds(right)
        if bounds and bounds[0] >= 0 and divisor and divisor[0] > 0:
            return self.floordiv(left, right)
        return self.atom("truncdiv", left, right)

    def either(
        self,
        alternatives: Iterable[Poly],
        loops: frozenset[int],
        gates: tuple[int, tuple[int, ...]] | None = None,
    ) -> Poly:
        """One of several values; which of them may change in each iteration of `loops`."""
        alternatives = list(alternatives)
        if gates is not None and len(set(alternatives)) > 1 and len(alternatives) <= limits.GATED_ALTERNATIVES:
            return self.atom("either", tuple(alternatives), gates, loops=loops)
        flat: list[Poly] = []
        for alternative in alternatives:
            only = _single(alternative)
            parts = only.args[0] if only is not None and only.kind == "either" else (alternative,)
            if only is not None and only.kind == "either":
                loops |= only.loops
            for piece in parts:  # type: ignore[attr-defined]
                if piece not in flat:
                    flat.append(piece)
        if len(flat) == 1:
            return flat[0]
        if len(flat) > limits.ALTERNATIVES:
            return self.unknown(0, (1 << 64) - 1, "too many possible values", loops.union(*(p.loops for p in flat)))
        return self.atom("either", tuple(flat), None, loops=loops)


def _single(value: Poly) -> Atom | None:
    """The atom that `value` consists of, if it is just one."""
    if len(value.terms) == 1:
        ((monomial, coefficient),) = value.terms.items()
        if coefficient == 1 and len(monomial) == 1:
            return monomial[0]
    return None
