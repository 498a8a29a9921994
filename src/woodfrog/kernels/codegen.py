"""Templates as a small C++ library: their expressions become tables, which native/evaluate.hpp evaluates.

Makes text only; catalogue.py compiles and loads it. Both evaluators give the same ranges for the same launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from woodfrog.kernels.contents import loads_of
from woodfrog.kernels.template import Access, LoopFact, Step, Template
from woodfrog.kernels.values import Atom, Compare, Condition, Poly, atom_bounds, const

HEADERS = Path(__file__).resolve().parent / "native"
_KINDS = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor"}
_OPS = {"true": "yes", "false": "no", "unknown": "unknown", "and": "all", "or": "any", "cmp": "compare"}
_REGISTERS = ("tid", "ntid", "ctaid", "nctaid")


_ENTRIES = """\
// Generated: the evaluator, which is the same for all catalogues. See native/evaluate.hpp.
#include "contents.hpp"

namespace access_templates {
extern const Template *const kTemplates[];
extern const std::int64_t kTemplateCount;
} // namespace access_templates

using namespace access_templates;

extern "C" __attribute__((visibility("default"))) std::int64_t access_templates_evaluate(
    std::int64_t number, const Launch *launch, unsigned kinds, Range *out, std::int64_t capacity) {
  if (number < 0 || number >= kTemplateCount) return -1;
  try {
    return evaluate(*kTemplates[number], *launch, kinds, out, capacity);
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

extern "C" __attribute__((visibility("default"))) std::int64_t access_templates_evaluate_contents(
    std::int64_t number, const Launch *launch, unsigned kinds, Range *out, std::int64_t capacity, Read read,
    void *context) {
  if (number < 0 || number >= kTemplateCount) return -1;
  try {
    return evaluate_contents(*kTemplates[number], *launch, kinds, out, capacity, {read, context});
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}
"""


def evaluator_source() -> str:
    """The C++ source of what evaluates a catalogue's templates."""
    return _ENTRIES


def source(templates: Sequence[Template]) -> str:
    """The C++ source of a catalogue's tables with `templates`, numbered from 0; evaluator_source() goes with it."""
    parts = [
        "// Generated from PTX: what kernels read and write. See native/tables.hpp.",
        '#include "tables.hpp"',
        "",
        "namespace {",
        "using namespace access_templates;",
    ]
    names = []
    for number, template in enumerate(templates):
        parts.append(_Tables(template).text(f"k{number}"))
        names.append(f"kTemplate_k{number}")
    parts += [
        "} // namespace",
        "",
        "namespace access_templates {",
        "extern const Template *const kTemplates[];",
        "extern const std::int64_t kTemplateCount;",
        f"const Template *const kTemplates[] = {{{', '.join('&' + name for name in names) or 'nullptr'}}};",
        f"const std::int64_t kTemplateCount = {len(names)};",
        "} // namespace access_templates",
        "",
    ]
    return "\n".join(parts)


class _Tables:
    """The tables of one template; equal entries are one."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._symbols = {name: index for index, name in enumerate(template.symbols)}
        self._lists: list[int] = []
        self._accesses: list[str] = []
        self._monomials: list[str] = []
        self._polys: dict[Poly, int] = {}
        self._poly_texts: list[str] = []
        self._atoms: dict[Atom, int] = {}
        self._atom_texts: list[str] = []
        self._conditions: dict[Condition, int] = {}
        self._condition_texts: list[str] = []
        self._steps: list[str] = []
        self._step_runs: dict[tuple[Step, ...], int] = {}
        self._nodes: list[str] = []
        self._node_numbers: dict[tuple[Step, ...], int] = {(): -1}
        self._gates: dict[tuple[int, int], int] = {}
        self._gate_texts: list[str] = []

    def text(self, name: str) -> str:
        # What differs in its offset alone stands side by side: it is evaluated once.
        ordered: dict[tuple[object, ...], list[Access]] = {}
        for access in self._template.combined:
            offset = 0 if access.address is None else access.address.terms.get((), 0)
            place = None if access.address is None else access.address - const(offset)
            ordered.setdefault((place, access.size, access.steps, access.steps_complete), []).append(access)
        self._add_accesses([access for group in ordered.values() for access in group])
        accesses, top_count = self._accesses, len(self._template.combined)
        loops = []
        for fact in self._template.loops:
            conditions = self._list([self._condition(condition) for condition in fact.again])
            loops.append(f"{{{conditions}, {len(fact.again)}, {_bool(fact.complete)}}}")
        tables = [
            ("Atom", "Atoms", self._atom_texts),
            ("Monomial", "Monomials", self._monomials),
            ("Poly", "Polys", self._poly_texts),
            ("Condition", "Conditions", self._condition_texts),
            ("Step", "Steps", self._steps),
            ("Loop", "Loops", loops),
            ("Gate", "Gates", self._gate_texts),
            ("Node", "Nodes", self._nodes),
            ("Access", "Accesses", accesses),
            ("int", "Lists", [str(value) for value in self._lists]),
        ]
        lines = []
        for kind, table, entries in tables:
            # An empty array is not allowed; one entry that nothing refers to is.
            body = ",\n    ".join(entries) if entries else ("0" if kind == "int" else "{}")
            lines.append(f"const {kind} k{table}_{name}[] = {{\n    {body}}};")
        block = ", ".join(str(extent) for extent in self._template.block or (0, 0, 0))
        lines.append(
            f"const Template kTemplate_{name} = {{kAtoms_{name}, {len(self._atom_texts)}, kMonomials_{name}, "
            f"kPolys_{name}, kConditions_{name}, kSteps_{name}, kLoops_{name}, {len(loops)}, kGates_{name}, "
            f"kNodes_{name}, {len(self._nodes)}, kAccesses_{name}, {top_count}, kLists_{name}, "
            f"{self._template.parameters_bytes}, {self._template.ranges_each}, {{{block}}}}};"
        )
        return "\n".join(lines)

    def _add_accesses(self, accesses: Sequence[Access]) -> int:
        """The first of some accesses in their table, the parts of each further back."""
        first = len(self._accesses)
        self._accesses += [""] * len(accesses)
        for number, access in enumerate(accesses, first):
            place, size, offset, loads = -1, -1, 0, "0, 0"
            if access.address is not None and access.size is not None:
                offset = access.address.terms.get((), 0)
                place, size = self._poly(access.address - const(offset)), self._poly(access.size)
                loads = self._loads(access)
            parts = self._add_accesses(access.parts) if access.parts else 0
            self._accesses[number] = (
                f"{{{int(access.kind)}, {place}, {size}, {self._node(access.steps)}, {_bool(access.steps_complete)}, "
                f"{loads}, {_number(offset)}, {parts}, {len(access.parts)}}}"
            )
        return first

    def _list(self, values: list[int]) -> int:
        first = len(self._lists)
        self._lists += values
        return first

    def _poly(self, value: Poly) -> int:
        found = self._polys.get(value)
        if found is not None:
            return found
        monomials = []
        for monomial, coefficient in value.terms.items():
            atoms = self._list([self._atom(atom) for atom in monomial])
            monomials.append(f"{{{_number(coefficient)}, {atoms}, {len(monomial)}}}")
        self._poly_texts.append(f"{{{len(self._monomials)}, {len(monomials)}}}")
        self._monomials += monomials
        self._polys[value] = len(self._poly_texts) - 1
        return self._polys[value]

    def _atom(self, atom: Atom) -> int:
        found = self._atoms.get(atom)
        if found is not None:
            return found
        a = atom.args
        fields = [0, 0, 0]
        low = high = 0
        if atom.kind == "param":
            fields = [cast(int, a[0]), cast(int, a[1]), 0]
        elif atom.kind == "special":
            register, axis = str(a[0]).split(".")
            fields = [_REGISTERS.index(register), "xyz".index(axis), 0]
        elif atom.kind in ("lane", "loop"):
            fields = [cast(int, a[0]), 0, 0]
        elif atom.kind == "unknown":
            low, high = cast(int, a[1]), cast(int, a[2])
        elif atom.kind == "load":
            fields = [self._poly(cast(Poly, a[0])), cast(int, a[1]), int(cast(bool, a[2]))]
            low, high = atom_bounds(atom) or (0, 0)
        elif atom.kind == "either":
            fields = self._either(atom)
        elif atom.kind == "select":
            condition = self._condition(cast(Condition, a[0]))
            fields = [condition, self._poly(cast(Poly, a[1])), self._poly(cast(Poly, a[2]))]
        elif atom.kind in ("ext", "pow2", "paramat"):
            signed = int(cast(bool, a[2])) if atom.kind == "ext" else 0
            fields = [self._poly(cast(Poly, a[0])), cast(int, a[1]), signed]
        elif atom.kind == "upto":
            fields = [self._poly(cast(Poly, a[0])), 0, 0]
        elif atom.kind == "symbol":
            fields = [self._symbols[str(a[0])], 0, 0]
        elif atom.kind != "window":
            fields = [self._poly(cast(Poly, a[0])), self._poly(cast(Poly, a[1])), 0]
        kind = _KINDS.get(atom.kind, atom.kind)
        numbers = ", ".join(str(field) for field in fields)
        self._atom_texts.append(f"{{AtomKind::{kind}, {numbers}, {_number(low)}, {_number(high)}}}")
        self._atoms[atom] = len(self._atom_texts) - 1
        return self._atoms[atom]

    def _loads(self, access: Access) -> str:
        """The first in lists, and the number, of the loads that an access depends on, each with its size."""
        found = [(self._atom(atom), self._poly(const(cast(int, atom.args[1])))) for atom in loads_of(access)]
        return f"{self._list([value for pair in found for value in pair])}, {len(found)}"

    def _either(self, atom: Atom) -> list[int]:
        parts = self._list([self._poly(part) for part in cast("tuple[Poly, ...]", atom.args[0])])
        count = len(cast("tuple[Poly, ...]", atom.args[0]))
        if atom.args[1] is None:
            return [parts, count, -1]
        block, sources = cast("tuple[int, tuple[int, ...]]", atom.args[1])
        return [parts, count, self._list([self._gate(block, one) for one in sources])]

    def _gate(self, block: int, origin: int) -> int:
        """The number of a gate, -1 where nothing is known of that way."""
        gate = self._template.gates.get((block, origin))
        if gate is None:
            return -1
        if (block, origin) not in self._gates:
            first = self._run(gate[0])
            self._gate_texts.append(f"{{{first}, {len(gate[0])}, {_bool(gate[1])}}}")
            self._gates[block, origin] = len(self._gate_texts) - 1
        return self._gates[block, origin]

    def _condition(self, condition: Condition) -> int:
        found = self._conditions.get(condition)
        if found is not None:
            return found
        if condition.op == "cmp":
            c = cast(Compare, condition.args[0])
            left, right = self._poly(c.left), self._poly(c.right)
            text = f"{{Op::compare, {left}, {right}, Relation::{c.relation}, {c.width}, {_bool(c.signed)}}}"
        else:
            parts = [self._condition(cast(Condition, part)) for part in condition.args]
            text = f"{{Op::{_OPS[condition.op]}, {self._list(parts)}, {len(parts)}, Relation::lt, 0, false}}"
        self._condition_texts.append(text)
        self._conditions[condition] = len(self._condition_texts) - 1
        return self._conditions[condition]

    def _run(self, steps: tuple[Step, ...]) -> int:
        """The first of a run of steps in the table."""
        if steps not in self._step_runs:
            texts = [self._step(step) for step in steps]
            self._step_runs[steps] = len(self._steps)
            self._steps += texts
        return self._step_runs[steps]

    def _node(self, steps: tuple[Step, ...]) -> int:
        """The node of the last of some steps."""
        if steps not in self._node_numbers:
            parent = self._node(steps[:-1])
            self._nodes.append(f"{{{parent}, {self._step(steps[-1])}}}")
            self._node_numbers[steps] = len(self._nodes) - 1
        return self._node_numbers[steps]

    def _step(self, step: Step) -> str:
        return f"{{{step.loop}, -1}}" if isinstance(step, LoopFact) else f"{{-1, {self._condition(step)}}}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _number(value: int) -> str:
    if -(1 << 62) <= value < 1 << 62:
        return f"{value}LL"
    high, low = value >> 64, value & ((1 << 64) - 1)
    return f"((Number{{{high}LL}} << 64) | Number{{{low}ULL}})"
