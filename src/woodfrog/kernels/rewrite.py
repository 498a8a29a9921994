"""Replacing atoms throughout symbolic values: how the values at loop heads are put in place of what stood for them."""

from __future__ import annotations

from collections.abc import Callable

from woodfrog.kernels import limits
from woodfrog.kernels.atoms import Atoms
from woodfrog.kernels.values import ZERO, Atom, Compare, Condition, Poly, const, join_conditions


class Rewriter:
    """Replaces atoms throughout polynomials and conditions, once each.

    `keep_gates` False: what an `either` depends on is forgotten; for values that are moved to another iteration.
    """

    def __init__(self, atoms: Atoms, replace: Callable[[Atom], Poly | None], *, keep_gates: bool = True) -> None:
        self._atoms = atoms
        self._keep_gates = keep_gates
        self._replace = replace
        self._done: dict[Atom, Poly] = {}

    def poly(self, value: Poly) -> Poly:
        result: Poly | None = None
        for monomial in value.terms:
            if all(self._atom(atom).terms == {(atom,): 1} for atom in monomial):
                continue
            result = ZERO
            break
        if result is None:
            return value
        for monomial, coefficient in value.terms.items():
            term = const(coefficient)
            for atom in monomial:
                term = term * self._atom(atom)
                if len(term.terms) > 4 * limits.POLYNOMIAL_TERMS:
                    return self._atoms.unknown(0, (1 << 64) - 1, "too large an expression", value.loops | term.loops)
            result = result + term
        return self._atoms.limited(result, 128)

    def _atom(self, atom: Atom) -> Poly:
        found = self._done.get(atom)
        if found is not None:
            return found
        replaced = self._replace(atom)
        if replaced is not None:
            result = replaced
        else:
            args = tuple(self._arg(arg) for arg in atom.args)
            has_gates = atom.kind == "either" and atom.args[1] is not None
            if args == atom.args and (self._keep_gates or not has_gates):
                result = Poly({(atom,): 1})
            elif atom.kind == "ext":
                result = self._atoms.ext(*args)  # type: ignore[arg-type]
            elif atom.kind == "floordiv":
                result = self._atoms.floordiv(*args)  # type: ignore[arg-type]
            elif atom.kind == "truncdiv":
                result = self._atoms.truncdiv(*args)  # type: ignore[arg-type]
            elif atom.kind in ("or", "xor"):
                result = self._atoms.bitwise(atom.kind, *args)  # type: ignore[arg-type]
            elif atom.kind == "either":
                gates = args[1] if self._keep_gates else None
                result = self._atoms.either(args[0], atom.loops, gates)  # type: ignore[arg-type]
            else:
                # A choice may change with loops that its parts do not mention.
                loops = atom.loops if atom.kind in ("select", "upto", "load") else frozenset()
                result = self._atoms.atom(atom.kind, *args, loops=loops)
        self._done[atom] = result
        return result

    def _arg(self, arg: object) -> object:
        if isinstance(arg, Poly):
            return self.poly(arg)
        if isinstance(arg, Condition):
            return self.condition(arg)
        if isinstance(arg, tuple) and arg and isinstance(arg[0], Poly):
            return tuple(self.poly(piece) for piece in arg)
        return arg

    def condition(self, value: Condition) -> Condition:
        if value.op in ("and", "or"):
            return join_conditions(value.op, (self.condition(c) for c in value.args))  # type: ignore[arg-type]
        if value.op == "cmp":
            c: Compare = value.args[0]  # type: ignore[assignment]
            return Condition("cmp", (c._replace(left=self.poly(c.left), right=self.poly(c.right)),))
        return value
