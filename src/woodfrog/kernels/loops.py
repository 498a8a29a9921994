"""Solves the values at loop heads: a phi becomes an expression of the loop's counter, or an unknown.

A phi that grows by an amount that does not change in the loop is `first + amount * counter`. Others keep as much as is
certain: that they stay near a base pointer, or below where they began.
"""

from __future__ import annotations

from woodfrog.kernels.atoms import Atoms
from woodfrog.kernels.execution import Execution, Phi
from woodfrog.kernels.rewrite import Rewriter
from woodfrog.kernels.values import Atom, Poly, const, static_bounds


class PhiSolutions:
    """Solutions of all phis of an execution, and the rewriting of values with them."""

    def __init__(self, execution: Execution) -> None:
        self._flow = execution.flow
        self._atoms: Atoms = execution.atoms
        self._solved: dict[Atom, Poly] = {}
        self._phis: dict[Atom, Phi] = {_atom(poly): phi for poly, phi in execution.phis.items()}
        # Inner loops first: what they do to a value is a step of the loop around them.
        depth = {loop.number: len(self._flow.chain(loop.number)) for loop in self._flow.loops}
        by_loop: dict[int, list[Atom]] = {}
        for atom, phi in self._phis.items():
            by_loop.setdefault(phi.loop, []).append(atom)
        for number in sorted(by_loop, key=lambda n: -depth[n]):
            self._solve_loop(number, by_loop[number])
        self._final = Rewriter(self._atoms, self._replacement)

    def counter(self, loop: int) -> Poly:
        return self._atoms.atom("loop", loop, loops=self._flow.chain(loop))

    @property
    def rewriter(self) -> Rewriter:
        """Replaces all phis by their solutions."""
        return self._final

    def _replacement(self, atom: Atom) -> Poly | None:
        if atom.kind != "phi":
            return None
        solution = self._solved[atom]
        # Outer phis inside the solution of an inner one are solved by now.
        return solution if not _has_phi(solution) else self._final.poly(solution)

    def _solve_loop(self, number: int, atoms: list[Atom]) -> None:
        waiting = list(atoms)
        progress = True
        while waiting and progress:
            progress = False
            rewriter = Rewriter(self._atoms, self._solved.get)
            for atom in list(waiting):
                solution = self._induction(number, atom, rewriter)
                if solution is not None:
                    self._solved[atom] = solution
                    waiting.remove(atom)
                    progress = True
        for atom in waiting:
            rewriter = Rewriter(self._atoms, self._solved.get)
            self._solved[atom] = self._fallback(number, atom, rewriter)

    def _next_values(self, phi: Phi, rewriter: Rewriter) -> list[Poly] | None:
        """The values at the ways back, alternatives taken apart; None when one of them is not followed."""
        found: list[Poly] = []
        for value in phi.next:
            if value is None:
                return None
            for alternative in alternatives(rewriter.poly(value)):
                if alternative not in found:
                    found.append(alternative)
        return found

    def _induction(self, number: int, atom: Atom, rewriter: Rewriter) -> Poly | None:
        phi = self._phis[atom]
        values = self._next_values(phi, rewriter)
        if values is None or phi.first is None:
            return None
        here = Poly({(atom,): 1})
        counter, chain = self.counter(number), self._flow.chain(number)
        if all(value == here for value in values):
            return phi.first  # never changes
        amounts = [value - here for value in values]
        if len(amounts) == 1 and number not in amounts[0].loops:
            return phi.first + amounts[0] * counter
        doubled = self._doublings(phi, values, here)
        if doubled is not None:
            return phi.first * self._atoms.atom("pow2", counter.scaled(doubled), 0)
        steps = [amount.constant for amount in amounts]
        known = [amount for amount in steps if amount is not None]
        if len(known) == len(steps):
            # One amount or another in each iteration.
            least, most = min(known), max(known)
            return phi.first + counter.scaled(least) + self._atoms.upto(counter.scaled(most - least), chain)
        # The value of the iteration before, of something that is known in each iteration.
        if len(values) == 1 and not _mentions(values[0], atom) and _only_counters(values[0], number):
            back = Rewriter(
                self._atoms,
                lambda a: counter - const(1) if a.kind == "loop" and a.args[0] == number else None,
                keep_gates=False,
            )
            return self._atoms.either((phi.first, back.poly(values[0])), chain)
        if all(number not in value.loops for value in values):
            return self._atoms.either((phi.first, *values), chain)
        return None

    def _doublings(self, phi: Phi, values: list[Poly], here: Poly) -> int | None:
        """How often each iteration doubles the value, if that is all that it does."""
        first = phi.first.constant if phi.first is not None else None
        factor = values[0].terms.get(next(iter(here.terms)), 0) if len(values) == 1 else 0
        if first is None or first < 1 or factor < 2 or factor & (factor - 1) or values[0] != here.scaled(factor):
            return None
        return factor.bit_length() - 1

    def _fallback(self, number: int, atom: Atom, rewriter: Rewriter) -> Poly:
        phi = self._phis[atom]
        loops = self._flow.chain(number)
        values = self._next_values(phi, rewriter)
        everything = self._atoms.unknown(0, (1 << 64) - 1, "a value that a loop changes in no regular way", loops)
        if values is None or phi.first is None:
            return everything
        here = Poly({(atom,): 1})
        if all(value.terms.get((atom,)) == 1 and not _mentions(value - here, atom) for value in values):
            # It moves by amounts that are not followed, but it stays an offset from where it began.
            offset = self._atoms.unknown(
                -(1 << 63), (1 << 63) - 1, "an offset that a loop changes in no regular way", loops
            )
            return phi.first + offset
        shrinking = self._shrinking(phi, values, here)
        return shrinking if shrinking is not None else everything

    def _shrinking(self, phi: Phi, values: list[Poly], here: Poly) -> Poly | None:
        """`x >> n` or `x / n` in each iteration: between 0 and where it began, if that is not negative."""
        assert phi.first is not None
        for value in values:
            if value == here:
                continue
            outer = _atom(value) if len(value.terms) == 1 and _single(value) else None
            if outer is None or outer.kind not in ("floordiv", "truncdiv"):
                return None
            dividend, divisor = outer.args
            number = divisor.constant if isinstance(divisor, Poly) else None
            if number is None or number < 1 or not isinstance(dividend, Poly):
                return None
            inner = _atom(dividend) if _single(dividend) else None
            if inner is None or inner.kind != "ext" or inner.args[0] != here or inner.args[1] != 32:
                return None
            bounds = static_bounds(phi.first)
            if inner.args[2] and not (bounds and bounds[0] >= 0 and bounds[1] < 1 << 31):
                return None  # a negative number grows towards zero
        return self._atoms.upto(self._atoms.ext(phi.first, 32, False), self._flow.chain(phi.loop))


def _atom(value: Poly) -> Atom:
    return next(iter(value.terms))[0]


def _single(value: Poly) -> bool:
    (monomial, coefficient), *more = value.terms.items() or [((), 0)]
    return not more and coefficient == 1 and len(monomial) == 1


def alternatives(value: Poly, most: int = 16) -> list[Poly]:
    """`x + either(a, b)` as `x + a`, `x + b`; the value itself where there are more than `most`."""
    for monomial, coefficient in value.terms.items():
        if len(monomial) == 1 and monomial[0].kind in ("either", "select"):
            atom = monomial[0]
            parts: tuple[Poly, ...] = atom.args[0] if atom.kind == "either" else atom.args[1:]  # type: ignore[assignment]
            rest = value - Poly({monomial: coefficient})
            if any(m and atom in m for m in rest.terms):
                return [value]
            found = []
            for part in parts:
                for alternative in alternatives(rest + part.scaled(coefficient), most):
                    found.append(alternative)
                    if len(found) > most:
                        return [value]
            return found
    return [value]


def _mentions(value: Poly, atom: Atom) -> bool:
    return any(_atom_mentions(one, atom) for monomial in value.terms for one in monomial)


def _atom_mentions(one: Atom, atom: Atom) -> bool:
    if one is atom:
        return True
    if one.kind == "load" or not one.loops & atom.loops:
        return False  # what memory holds is not computed from where it is
    return any(_arg_mentions(arg, atom) for arg in one.args)


def _arg_mentions(arg: object, atom: Atom) -> bool:
    if isinstance(arg, Poly):
        return _mentions(arg, atom)
    if isinstance(arg, tuple):
        return any(_arg_mentions(part, atom) for part in arg)
    return False


def _has_phi(value: Poly) -> bool:
    return any(_any_phi(atom) for monomial in value.terms for atom in monomial)


def _any_phi(atom: Atom) -> bool:
    return atom.kind == "phi" or any(_arg_has_phi(arg) for arg in atom.args)


def _arg_has_phi(arg: object) -> bool:
    if isinstance(arg, Poly):
        return _has_phi(arg)
    if isinstance(arg, tuple):
        return any(_arg_has_phi(part) for part in arg)
    return False


def _only_counters(value: Poly, number: int) -> bool:
    """Whether the loop changes `value` by its counter alone."""
    return all(_atom_only_counters(atom, number) for monomial in value.terms for atom in monomial)


def _atom_only_counters(atom: Atom, number: int) -> bool:
    if number not in atom.loops:
        return True
    if atom.kind == "loop":
        return atom.args[0] == number
    if atom.kind in ("phi", "unknown", "load", "upto"):
        return False
    return all(_arg_only_counters(arg, number) for arg in atom.args)


def _arg_only_counters(arg: object, number: int) -> bool:
    if isinstance(arg, Poly):
        return _only_counters(arg, number)
    if isinstance(arg, tuple):
        return all(_arg_only_counters(part, number) for part in arg)
    return True
