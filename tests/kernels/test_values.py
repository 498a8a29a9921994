"""Bounds and bits of symbolic values hold for every value that their atoms can have, and simplifying changes none."""

from __future__ import annotations

import random

import pytest

from woodfrog.kernels.atoms import Atoms
from woodfrog.kernels.values import SPECIAL_BOUNDS, Atom, Poly, const, static_bits, static_bounds

NAMES = ("tid.x", "ntid.y", "ctaid.x")


def number(value: Poly, given: dict[str, int]) -> int:
    """A polynomial's value, by the definitions of its atoms."""
    total = 0
    for monomial, coefficient in value.terms.items():
        product = coefficient
        for atom in monomial:
            product *= atom_number(atom, given)
        total += product
    return total


def atom_number(atom: Atom, given: dict[str, int]) -> int:
    if atom.kind == "special":
        return given[str(atom.args[0])]
    parts = [number(arg, given) for arg in atom.args if isinstance(arg, Poly)]
    if atom.kind == "floordiv":
        return parts[0] // parts[1]
    if atom.kind == "ext":
        width, signed = atom.args[1:]
        assert isinstance(width, int)
        value = parts[0] % (1 << width)
        return value - (1 << width) if signed and value >> (width - 1) else value
    return parts[0] | parts[1] if atom.kind == "or" else parts[0] ^ parts[1]


class Made:
    """Random values, each with the number that it is by plain arithmetic."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.atoms = Atoms()
        self.given = {name: self.r.randint(*SPECIAL_BOUNDS[name]) for name in NAMES}

    def value(self, depth: int) -> tuple[Poly, int]:
        r = self.r
        if depth == 0:
            name = r.choice(NAMES)
            return (self.atoms.atom("special", name), self.given[name]) if r.random() < 0.8 else self.constant(1024)
        kind = r.choice(("sum", "scaled", "quotient", "remainder", "read", "bits"))
        left, a = self.value(depth - 1)
        if kind == "sum":
            right, b = self.value(depth - 1)
            return left + right, a + b
        if kind == "scaled":
            factor = r.choice((2, 3, 4, 8, 100, 512, -1))
            return left.scaled(factor), a * factor
        if kind in ("quotient", "remainder"):
            divisor = r.choice((1, 2, 4, 12, 128, 512, 1 << 20))
            quotient = self.atoms.floordiv(left, const(divisor))
            return (quotient, a // divisor) if kind == "quotient" else (left - quotient.scaled(divisor), a % divisor)
        if kind == "read":
            width, signed = r.choice((8, 32, 64)), r.random() < 0.5
            b = a % (1 << width)
            return self.atoms.ext(left, width, signed), b - (1 << width) if signed and b >> (width - 1) else b
        right, b = self.value(depth - 1)
        first, second = self.atoms.ext(left, 32, False), self.atoms.ext(right, 32, False)
        word = r.choice(("or", "xor"))
        c, d = a % (1 << 32), b % (1 << 32)
        return self.atoms.bitwise(word, first, second), c | d if word == "or" else c ^ d

    def constant(self, most: int) -> tuple[Poly, int]:
        value = self.r.randrange(most)
        return const(value), value


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_simplified_values_are_right_and_within_their_bounds_and_bits(depth: int) -> None:
    known = 0
    for seed in range(1500):
        value, expected = Made(seed).value(depth)
        made = Made(seed)
        assert number(value, made.given) % (1 << 64) == expected % (1 << 64), f"seed {seed}: {value}"
        bounds, bits = static_bounds(value), static_bits(value)
        if bounds is not None:
            assert bounds[0] <= number(value, made.given) <= bounds[1], f"seed {seed}: {value}"
        if bits is not None:
            known += 1
            assert number(value, made.given) >= 0, f"seed {seed}: {value}"
            assert number(value, made.given) & ~bits == 0, f"seed {seed}: {value} has other bits than {bits:#x}"
    assert known > 100, "there was hardly a value whose bits are known"


def test_disjoint_bits_are_added_as_compilers_mean_it() -> None:
    """`tid & 127 | ctaid << 7`, which Triton writes for `ctaid * 128 + tid`."""
    atoms = Atoms()
    thread, block = atoms.atom("special", "tid.x"), atoms.atom("special", "ctaid.x")
    low = thread - atoms.floordiv(thread, const(128)).scaled(128)
    high = atoms.ext(block.scaled(128), 32, False)
    assert atoms.bitwise("or", low, high) == low + high
    assert atoms.bitwise("or", thread, high) != thread + high
