"""Symbolic values: polynomials over atoms, and conditions on them.

A register of w bits holds a polynomial p and stands for p modulo 2**w. Atoms are true integers: a parameter, an index,
a loop counter, or a function of polynomials (`ext` reads a polynomial as an integer of a type). Addition, subtraction
and multiplication are exact modulo 2**w, so wrap-around has to be thought of only where a value is *read*: by `ext`.
Nothing here knows instructions or launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

Monomial = tuple["Atom", ...]


class Atom:
    """A symbol of a polynomial. Interned by Atoms: equal atoms are the same object.

    kind      args
    param     (offset_bytes, size_bytes)          a kernel parameter as an unsigned integer
    paramat   (offset: Poly, size_bytes)          the parameter at a computed offset
    special   (name,)                             tid.x, ctaid.y, ntid.z, nctaid.x, laneid …
    loop      (loop number,)                      iterations of a loop that are complete
    phi       (loop number, key, width)           a value at a loop's head; gone once the loop is solved
    unknown   (number, low, high, reason)         decided by memory contents or by what is not modelled
    load      (address: Poly, size_bytes, signed, number)  what a load from global memory gives; the number tells loads
                                                  of the same place apart, at different times they may differ
    either    (alternatives, gates)               one of several polynomials; gates, where they are known, are the block
                                                  where ways join and, for each alternative, the block it comes from
    select    (condition, Poly, Poly)
    ext       (Poly, width, signed)               the integer that these bits are
    floordiv  (Poly, Poly)                        of integers, rounding down
    truncdiv  (Poly, Poly)                        of integers, rounding to zero
    and/or/xor (Poly, Poly)                       of non-negative integers
    min/max   (Poly, Poly)
    pow2      (Poly, width)                       2**Poly, 0 from 2**width on
    upto      (Poly, number)                      some integer from 0 to Poly; the number tells them apart
    symbol    (name,)                             address of a module variable
    lane      (count, number)                     0 to count - 1: accesses that are put together, see combine.py
    window    (name,)                             address of shared, local or parameter memory
    """

    __slots__ = ("args", "bounds", "depth", "kind", "loops", "number")

    def __init__(self, number: int, kind: str, args: tuple[object, ...], loops: frozenset[int], depth: int) -> None:
        self.number = number
        self.kind = kind
        self.args = args
        self.loops = loops  # loops in whose iterations it varies
        self.depth = depth
        self.bounds: tuple[int, int] | str | None = "not known yet"  # see atom_bounds

    def __repr__(self) -> str:
        return show_atom(self)


class Poly:
    """An integer polynomial. Immutable, hashable."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: dict[Monomial, int]) -> None:
        self.terms = terms
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset((tuple(a.number for a in m), c) for m, c in self.terms.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            total = terms.get(monomial, 0) + coefficient
            if total:
                terms[monomial] = total
            else:
                terms.pop(monomial, None)
        return Poly(terms)

    def __sub__(self, other: Poly) -> Poly:
        return self + other.scaled(-1)

    def scaled(self, factor: int) -> Poly:
        return Poly({m: c * factor for m, c in self.terms.items()}) if factor else ZERO

    def __mul__(self, other: Poly) -> Poly:
        terms: dict[Monomial, int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in other.terms.items():
                monomial = m1 + m2 if not (m1 and m2) else tuple(sorted(m1 + m2, key=_number))
                total = terms.get(monomial, 0) + c1 * c2
                if total:
                    terms[monomial] = total
                else:
                    terms.pop(monomial, None)
        return Poly(terms)

    @property
    def constant(self) -> int | None:
        """Its value when it has no atoms."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms:
            return self.terms[()]
        return None

    def reduced(self, width: int) -> Poly:
        """The same value modulo 2**width, with coefficients near zero."""
        half, whole = 1 << (width - 1), 1 << width
        if all(-half <= c < half for c in self.terms.values()):
            return self
        terms = {m: (c + half) % whole - half for m, c in self.terms.items()}
        return Poly({m: c for m, c in terms.items() if c})

    @property
    def loops(self) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for monomial in self.terms:
            for atom in monomial:
                found |= atom.loops
        return found

    @property
    def depth(self) -> int:
        return max((atom.depth for monomial in self.terms for atom in monomial), default=0)

    def __repr__(self) -> str:
        return show(self)


def _number(atom: Atom) -> int:
    return atom.number


ZERO = Poly({})


def const(value: int) -> Poly:
    return Poly({(): value}) if value else ZERO


class Condition(NamedTuple):
    """A predicate. op "and"/"or": args are conditions; "cmp": args as of Compare; "true", "false", "unknown": none."""

    op: str
    args: tuple[object, ...] = ()


class Compare(NamedTuple):
    """`left relation right` of two registers' bits read as integers of a type."""

    relation: str  # lt le gt ge eq ne
    left: Poly
    right: Poly
    width: int
    signed: bool


TRUE = Condition("true")
FALSE = Condition("false")
UNKNOWN = Condition("unknown")
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
Value = Poly | Condition | None


def negate(condition: Condition) -> Condition:
    if condition.op in ("and", "or"):
        other = "or" if condition.op == "and" else "and"
        return Condition(other, tuple(negate(c) for c in condition.args))  # type: ignore[arg-type]
    if condition.op == "cmp":
        c: Compare = condition.args[0]  # type: ignore[assignment]
        return Condition("cmp", (c._replace(relation=_OPPOSITE[c.relation]),))
    return {"true": FALSE, "false": TRUE}.get(condition.op, UNKNOWN)


def join_conditions(op: str, parts: Iterable[Condition]) -> Condition:
    """The conjunction ("and") or disjunction ("or") of conditions."""
    neutral, absorbing = (TRUE, FALSE) if op == "and" else (FALSE, TRUE)
    kept: list[Condition] = []
    for part in parts:
        if part.op == absorbing.op:
            return absorbing
        if part.op == neutral.op:
            continue
        for piece in part.args if part.op == op else (part,):
            if piece not in kept:
                kept.append(piece)  # type: ignore[arg-type]
    if not kept:
        return neutral
    return kept[0] if len(kept) == 1 else Condition(op, tuple(kept))


def condition_depth(condition: Condition) -> int:
    if condition.op in ("and", "or"):
        return 1 + max(condition_depth(c) for c in condition.args)  # type: ignore[arg-type]
    if condition.op == "cmp":
        c: Compare = condition.args[0]  # type: ignore[assignment]
        return 1 + max(c.left.depth, c.right.depth)
    return 0


def condition_loops(condition: Condition) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    for part in condition.args:
        if isinstance(part, Condition):
            found |= condition_loops(part)
        elif isinstance(part, Compare):
            found |= part.left.loops | part.right.loops
    return found


# Static bounds of special registers, from the limits in the CUDA programming guide (compute capabilities to 10.x).
SPECIAL_BOUNDS = {
    "tid.x": (0, 1023), "tid.y": (0, 1023), "tid.z": (0, 63),
    "ntid.x": (1, 1024), "ntid.y": (1, 1024), "ntid.z": (1, 64),
    "ctaid.x": (0, 2**31 - 2), "ctaid.y": (0, 65534), "ctaid.z": (0, 65534),
    "nctaid.x": (1, 2**31 - 1), "nctaid.y": (1, 65535), "nctaid.z": (1, 65535),
    "laneid": (0, 31),
}  # fmt: skip


def static_bounds(value: Poly) -> tuple[int, int] | None:
    """Bounds that hold in any launch, None when there are none worth knowing."""
    low = high = 0
    for monomial, coefficient in value.terms.items():
        least = most = coefficient
        for atom in monomial:
            bounds = atom_bounds(atom)
            if bounds is None:
                return None
            products = (least * bounds[0], least * bounds[1], most * bounds[0], most * bounds[1])
            least, most = min(products), max(products)
        low += least
        high += most
    return low, high


def static_bits(value: Poly) -> int | None:
    """A mask of all bits that a value can have set in any launch; None when it may be negative or is not known.

    A sum has the bits of its terms where these have none in common, and all from its lowest on where they have.
    """
    value, remainders = _without_remainders(value)
    masks = [mask for _, mask in remainders]
    for monomial, coefficient in value.terms.items():
        if coefficient < 0:
            return None
        mask = 1
        for atom in monomial:
            bounds = atom_bounds(atom)
            if bounds is None or bounds[0] < 0 or len(monomial) > 1:
                return None
            mask = (1 << bounds[1].bit_length()) - 1
            if atom.kind == "ext" and not atom.args[2]:
                mask &= ~(alignment(atom.args[0]) - 1)  # type: ignore[arg-type]
        masks.append(
            mask * coefficient if coefficient & (coefficient - 1) == 0 or mask == 1 else _covering(mask, coefficient)
        )
    total = 0
    for mask in masks:
        if total & mask:
            return None
        total |= mask
    return total


def _covering(mask: int, factor: int) -> int:
    """All bits from the lowest to the highest that `factor` times something within `mask` can have."""
    highest = (mask * factor).bit_length()
    return (1 << highest) - (factor & -factor)


def alignment(value: Poly) -> int:
    """A power of two that divides a value in any launch, at most 2**32."""
    common = gcd(1 << 32, *value.terms.values())
    return common & -common


def _without_remainders(value: Poly) -> tuple[Poly, list[tuple[Poly, int]]]:
    """A value without its parts of the form p - 2**k * (p // 2**k), and these with the bits that they can have."""
    found: list[tuple[Poly, int]] = []
    for monomial, coefficient in list(value.terms.items()):
        if len(monomial) != 1 or monomial[0].kind != "floordiv" or coefficient >= 0:
            continue
        dividend, divisor = monomial[0].args
        power = divisor.constant if isinstance(divisor, Poly) else None
        if not isinstance(dividend, Poly) or power is None or power < 1 or power & (power - 1):
            continue
        factor = -coefficient // power
        if factor < 1 or factor * power != -coefficient or factor & (factor - 1):
            continue
        rest = value - dividend.scaled(factor) - Poly({monomial: coefficient})
        if len(rest.terms) >= len(value.terms):
            continue
        value = rest
        found.append((dividend, ((power - 1) & ~(alignment(dividend) - 1)) * factor))
    return value, found


def atom_bounds(atom: Atom) -> tuple[int, int] | None:
    """static_bounds() of an atom, worked out once: expressions share their parts."""
    if isinstance(atom.bounds, str):
        atom.bounds = _atom_bounds(atom)
    return atom.bounds


def _atom_bounds(atom: Atom) -> tuple[int, int] | None:
    args = atom.args
    if atom.kind == "special":
        return SPECIAL_BOUNDS.get(str(args[0]))
    if atom.kind == "param":
        return 0, (1 << (8 * int(args[1]))) - 1  # type: ignore[call-overload]
    if atom.kind == "unknown":
        return int(args[1]), int(args[2])  # type: ignore[call-overload]
    if atom.kind in ("ext", "load"):
        width, signed = int(args[1]), bool(args[2])  # type: ignore[call-overload]
        width *= 8 if atom.kind == "load" else 1
        return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    if atom.kind == "and":
        pieces = [b for b in (static_bounds(args[0]), static_bounds(args[1])) if b and b[0] >= 0]  # type: ignore[arg-type]
        return (0, min(b[1] for b in pieces)) if pieces else None
    if atom.kind == "floordiv":
        divisor = args[1].constant  # type: ignore[attr-defined]
        bounds = static_bounds(args[0])  # type: ignore[arg-type]
        if divisor is not None and divisor > 0 and bounds:
            return bounds[0] // divisor, bounds[1] // divisor
    if atom.kind in ("or", "xor"):
        bits = static_bits(args[0]), static_bits(args[1])  # type: ignore[arg-type]
        if bits[0] is not None and bits[1] is not None:
            return 0, bits[0] | bits[1]
    if atom.kind == "either":
        all_bounds = [static_bounds(piece) for piece in args[0]]  # type: ignore[attr-defined]
        if all(all_bounds):
            return min(b[0] for b in all_bounds if b), max(b[1] for b in all_bounds if b)
    if atom.kind == "select":
        both = static_bounds(args[1]), static_bounds(args[2])  # type: ignore[arg-type]
        if both[0] and both[1]:
            return min(both[0][0], both[1][0]), max(both[0][1], both[1][1])
    return None


# Readable forms.

_NAMES = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def show(value: Poly) -> str:
    """A polynomial as a person writes it."""
    parts = []
    for monomial, coefficient in value.terms.items():
        factors = [show_atom(atom) for atom in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        parts.append(("- " if coefficient < 0 else "+ ") + "*".join(factors))
    text = " ".join(parts) or "0"
    return text[2:] if text.startswith("+ ") else text


def show_atom(atom: Atom) -> str:
    a = atom.args
    if atom.kind == "param":
        return f"param[{a[0]}]"
    if atom.kind == "paramat":
        return f"param[{a[0]}]"
    if atom.kind == "special":
        return str(a[0])
    if atom.kind == "loop":
        return f"k{a[0]}"
    if atom.kind == "unknown":
        return f"?{a[0]}"
    if atom.kind == "load":
        return f"load{8 * int(a[1])}[{a[0]}]"  # type: ignore[call-overload]
    if atom.kind == "ext":
        return f"{'s' if a[2] else 'u'}{a[1]}({a[0]})"
    if atom.kind == "floordiv":
        return f"({a[0]})//({a[1]})"
    if atom.kind == "select":
        return f"({show_condition(a[0])} ? {a[1]} : {a[2]})"  # type: ignore[arg-type]
    if atom.kind == "either":
        return "either(" + " | ".join(show(piece) for piece in a[0]) + ")"  # type: ignore[attr-defined]
    if atom.kind in ("symbol", "window"):
        return str(a[0])
    return f"{atom.kind}(" + ", ".join(str(arg) for arg in a) + ")"


def show_condition(condition: Condition) -> str:
    if condition.op in ("and", "or"):
        return "(" + f" {condition.op} ".join(show_condition(c) for c in condition.args) + ")"  # type: ignore[arg-type]
    if condition.op == "cmp":
        c: Compare = condition.args[0]  # type: ignore[assignment]
        return f"{c.left} {_NAMES[c.relation]} {c.right}"
    return condition.op
