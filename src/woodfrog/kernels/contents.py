"""Templates evaluated with the contents of memory: page tables, slot lists, tables of pointers.

A load is taken to give what memory holds when the kernel begins to run. That is right if nobody writes there before
the load does: others do not, that is the caller's promise, and the kernel itself does not, which is checked here.
The writes are evaluated with the loaded values put in; if none of them may hit a byte that a load was made from, no
load ever gave anything else, because the first write that did would have been made with addresses from loads before
it, and would be among those that were checked. Loads from places that are written to are left unknown.

What comes out is never called exact: a loaded value and an index beside it are taken to be independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from woodfrog.kernels import limits
from woodfrog.kernels.evaluate import Evaluation
from woodfrog.kernels.footprint import merged
from woodfrog.kernels.template import Access, Exactness, Kind, Launch, Range, Reader, Template
from woodfrog.kernels.values import Atom, Condition, Poly, const

Values = dict[Atom, tuple[int, int]]


def loads_of(access: Access) -> list[Atom]:
    """The loads that an access's address and size depend on, each after those that its own address depends on."""
    found: dict[Atom, None] = {}
    for value in (access.address, access.size):
        if value is not None:
            _collect(value, found)
    return list(found)


def _collect(value: object, found: dict[Atom, None]) -> None:
    if isinstance(value, Poly):
        for monomial in value.terms:
            for atom in monomial:
                if atom not in found:
                    for arg in atom.args:
                        _collect(arg, found)
                    if atom.kind == "load":
                        found[atom] = None
    elif isinstance(value, tuple) and not isinstance(value, Condition):
        for part in value:
            _collect(part, found)


def evaluate_each_with_contents(
    template: Template, launch: Launch, kinds: Sequence[Kind], read: Reader
) -> list[tuple[Access, list[Range]]]:
    """Like evaluate.evaluate_each, with Launch.contents."""
    unsafe: set[Atom] = set()
    while True:
        run = _Run(template, launch, read, unsafe)
        found = [(a, run.ranges(a)) for a in template.combined if a.kind.stores or a.kind in kinds]
        written = merged([one for access, ranges in found if access.kind.stores for one in ranges])
        hit = {atom for atom, places in run.places.items() if _overlap(merged(places), written)}
        if not hit:
            return [(access, ranges) for access, ranges in found if access.kind in kinds]
        unsafe |= hit


class _Run:
    """One evaluation; `places` is where the loads were made from whose values were used."""

    def __init__(self, template: Template, launch: Launch, read: Reader, unsafe: set[Atom]) -> None:
        self._template = template
        self._launch = launch
        self._read = read
        self._unsafe = unsafe
        self._plain = Evaluation(template, launch)
        self.places: dict[Atom, list[Range]] = {}

    def ranges(self, access: Access) -> list[Range]:
        loads = [atom for atom in loads_of(access) if atom not in self._unsafe]
        return merged(self._cases(access, loads, {}, limits.LOADED_VALUES))

    def _cases(self, access: Access, loads: list[Atom], known: Values, budget: int) -> list[Range]:
        """The ranges for all values of `loads`, of which `known` has those before."""
        evaluation = Evaluation(self._template, self._launch, known) if known else self._plain
        if not loads:
            return evaluation.ranges(access)
        atom, rest = loads[0], loads[1:]
        values = self._values(access, atom, evaluation, budget)
        if values is None:
            return self._cases(access, rest, known, budget)
        result: list[Range] = []
        for one in values:
            result += self._cases(access, rest, {**known, atom: one}, max(budget // len(values), 1))
        return result

    def _values(self, access: Access, atom: Atom, evaluation: Evaluation, budget: int) -> list[tuple[int, int]] | None:
        """All values that a load gives, as runs from least to greatest; None when that is not known."""
        address, size, signed = cast(Poly, atom.args[0]), cast(int, atom.args[1]), bool(atom.args[2])
        load = Access(Kind.LOAD, address, const(size), access.steps, False, access.position, access.line, (0, 0))
        places = evaluation.ranges(load)
        if any(one.exactness is Exactness.EVERYTHING for one in places):
            return None
        if sum(one.size_bytes for one in places) > limits.LOADED_BYTES:
            return None
        found: set[int] = set()
        for place in places:
            # A load's address is a multiple of its size (PTX ISA, "Alignment"); any other ends the program.
            first, end = -(-place.address // size) * size, place.address + place.size_bytes
            count = (end - first) // size
            if count < 1:
                continue
            data = self._read(first, count * size)
            if data is None or len(data) != count * size:
                return None
            found.update(
                int.from_bytes(data[at : at + size], "little", signed=signed) for at in range(0, len(data), size)
            )
        self.places.setdefault(atom, []).extend(places)
        runs = [(value, value) for value in sorted(found)]
        return runs if len(runs) <= budget else _joined(runs, budget)


def _joined(runs: list[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
    """Neighbouring values as runs; all as one where that leaves too many."""
    result = runs[:1]
    for low, high in runs[1:]:
        if low == result[-1][1] + 1:
            result[-1] = (result[-1][0], high)
        else:
            result.append((low, high))
    return result if len(result) <= budget else [(runs[0][0], runs[-1][1])]


def _overlap(left: list[Range], right: list[Range]) -> bool:
    """Whether two sorted lists of ranges have a byte in common."""
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        if a.address + a.size_bytes <= b.address:
            i += 1
        elif b.address + b.size_bytes <= a.address:
            j += 1
        else:
            return True
    return False
