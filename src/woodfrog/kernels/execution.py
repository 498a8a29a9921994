"""Symbolic execution of one kernel over its control-flow graph: each register at each point as a Value.

Blocks are visited once, in reverse postorder. Where ways join, differing values become `either`; at a loop's head they
become `phi`, which loops.py solves afterwards. What the instructions mean is in instructions.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from woodfrog.kernels import limits
from woodfrog.kernels.atoms import Atoms
from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.flow import Edge, Flow
from woodfrog.kernels.opcodes import destinations, registers
from woodfrog.kernels.template import Kind
from woodfrog.kernels.values import (
    FALSE,
    TRUE,
    UNKNOWN,
    Condition,
    Poly,
    Value,
    condition_depth,
    join_conditions,
    negate,
)

Slot = tuple[str, int, int]  # a variable of .local or .param space, offset and size in bytes
Key = str | Slot


@dataclass
class FoundAccess:
    """An access as the execution met it; phis are not yet solved in it."""

    block: int
    kind: Kind
    address: Poly | None
    size: Poly | None
    guard: Condition
    position: int
    reason: str = ""


@dataclass
class Phi:
    """A value at a loop's head: `first` on entry, `next` at each way back (None: not followed)."""

    loop: int
    key: Key
    width: int
    first: Poly | None
    next: list[Poly | None] = field(default_factory=list)


@dataclass
class Slots:
    """What a first execution found out about variables in local and parameter memory."""

    touched: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    stored: dict[int, set[Slot]] = field(default_factory=dict)  # by block
    lost: set[str] = field(default_factory=set)  # variables whose address is not followed, or stored to by an index

    def good(self) -> set[Slot]:
        """Slots that no other slot overlaps, of variables that are only touched by known offsets."""
        found: set[Slot] = set()
        for name, places in self.touched.items():
            if name in self.lost:
                continue
            ordered = sorted(places)
            for index, (offset, size) in enumerate(ordered):
                before = max((o + s for o, s in ordered[:index]), default=0)
                after = ordered[index + 1][0] if index + 1 < len(ordered) else offset + size
                if before <= offset and offset + size <= after:
                    found.add((name, offset, size))
        return found


class Execution:
    """One pass over a kernel. `slots` is None for the first pass, which finds out about local memory.

    For `block`, see Atoms.
    """

    def __init__(
        self,
        flow: Flow,
        variables: dict[str, str],
        parameters: dict[str, tuple[int, int]],
        module_variables: dict[str, str],
        slots: Slots | None,
        block: tuple[int, int, int] | None = None,
    ) -> None:
        self.flow = flow
        self.atoms = Atoms(block)
        self.variables = variables  # shared, local and .param variables → space
        self.parameters = parameters  # kernel parameters → offset, size
        self.module_variables = module_variables  # .global and .const variables → space
        self.slots = slots or Slots()
        self.good_slots = self.slots.good() if slots is not None else set()
        self.is_first_pass = slots is None
        self.found: list[FoundAccess] = []
        self.phis: dict[Poly, Phi] = {}
        self.branch_conditions: dict[tuple[int, int], Condition] = {}  # by edge
        self.environment: dict[Key, Value] = {}
        self.block = 0
        self.block_loops: frozenset[int] = frozenset()
        self._out: list[dict[Key, Value] | None] = [None] * len(flow.blocks)
        self._entries = 0
        self._shared_keys = _keys_of_several_blocks(flow)
        self._written = [
            {name for one in block.instructions for name in destinations(one)} for block in flow.blocks
        ]  # fmt: skip

    def run(self, step: object) -> None:
        """Execute all blocks; `step(execution, instruction)` executes one instruction."""
        for block in self.flow.blocks:
            self.block = block.number
            self.block_loops = self.flow.chain(self.flow.loop_of[block.number])
            self.environment = self._entry_of(block.number)
            for instruction in block.instructions:
                step(self, instruction)  # type: ignore[operator]
            for edge in block.edges:
                self.branch_conditions[block.number, edge.target] = self._edge_condition(edge)
            kept: dict[Key, Value] = {
                key: value
                for key, value in self.environment.items()
                if value is not None and (isinstance(key, tuple) or key in self._shared_keys)
            }
            self._entries += len(kept)
            if self._entries > limits.ENVIRONMENT_ENTRIES:
                raise AnalysisLimitError("it keeps too many values alive over too many blocks")
            self._out[block.number] = kept
            self._close_loops(block.number)

    def unknown(self, width: int, reason: str, low: int = 0, high: int | None = None) -> Poly:
        return self.atoms.unknown(low, (1 << width) - 1 if high is None else high, reason, self.block_loops)

    def select(self, condition: Condition, first: Poly, second: Poly) -> Poly:
        """`first` where the condition holds, else `second`; the condition may change in every iteration."""
        return self.atoms.atom("select", condition, first, second, loops=self.block_loops)

    def condition_of(self, name: str) -> Condition:
        value = self.environment.get(name)
        return value if isinstance(value, Condition) else UNKNOWN

    def lose(self, value: Value) -> None:
        """The address of a local variable goes where it is not followed: its contents are unknown from the start."""
        if isinstance(value, Poly):
            self.slots.lost.update(self.windows(value))

    def windows(self, value: Poly) -> set[str]:
        """The local and .param variables whose address `value` may be."""
        found: set[str] = set()
        for monomial in value.terms:
            for atom in monomial:
                if atom.kind == "window":
                    name = str(atom.args[0])
                    if self.variables.get(name) in ("local", "param"):
                        found.add(name)
                elif atom.kind in ("either", "select"):
                    for part in atom.args[0] if atom.kind == "either" else atom.args[1:]:  # type: ignore[attr-defined]
                        found |= self.windows(part)
        return found

    def _edge_condition(self, edge: Edge) -> Condition:
        if not edge.predicate:
            return TRUE
        condition = self.condition_of(edge.predicate)
        return negate(condition) if edge.negated else condition

    def _entry_of(self, number: int) -> dict[Key, Value]:
        block = self.flow.blocks[number]
        loop = self.flow.loop_at.get(number)
        sources = [p for p in block.predecessors if p < number and self._out[p] is not None]
        if number == 0:
            merged: dict[Key, Value] = {}
        else:
            merged = self._merged(sources)
        if loop is None:
            return merged
        written: set[Key] = set()
        for inside in loop.blocks:
            written |= self._written[inside]
            written |= self.slots.stored.get(inside, set()) if not self.is_first_pass else set()
        chain = self.flow.chain(loop.number)
        for key in written & merged.keys():
            value = merged[key]
            if isinstance(value, Condition):
                merged[key] = UNKNOWN
                continue
            if value is None:
                continue
            width = key[2] * 8 if isinstance(key, tuple) else 64
            phi = self.atoms.atom("phi", loop.number, key, width, loops=chain)
            self.phis[phi] = Phi(loop.number, key, width, value)
            merged[key] = phi
            self._lose_merged((value,))
        return merged

    def _merged(self, sources: list[int]) -> dict[Key, Value]:
        first = self._out[sources[0]] or {}
        if len(sources) == 1:
            return dict(first)
        others = [self._out[source] or {} for source in sources[1:]]
        merged: dict[Key, Value] = {}
        for key, value in first.items():
            values = [value]
            for other in others:
                found = other.get(key)
                if found is None:
                    break
                values.append(found)
            else:
                same = all(found is value or found == value for found in values)
                merged[key] = value if same else self._joined(values, sources)
        return merged

    def _joined(self, values: list[Value], sources: list[int]) -> Value:
        polynomials = [value for value in values if isinstance(value, Poly)]
        self._lose_merged(polynomials)
        if not polynomials:
            return self._joined_predicate(values, sources)
        if len(polynomials) != len(values):
            return UNKNOWN
        return self.atoms.either(polynomials, self.block_loops, (self.block, tuple(sources)))

    def _joined_predicate(self, values: list[Value], sources: list[int]) -> Condition:
        """What a compiler makes of `a && b`: the predicate holds if one way was taken and its value there holds."""
        parts = []
        for value, source in zip(values, sources, strict=True):
            assert isinstance(value, Condition)
            parts.append(join_conditions("and", (*self._way(source), value)))
        joined = join_conditions("or", parts)
        return joined if condition_depth(joined) < limits.EXPRESSION_DEPTH // 4 else UNKNOWN

    def _way(self, source: int) -> list[Condition]:
        """What decides that the present block is reached through `source`, after the last block all ways share."""
        shared = self.flow.dominator[self.block]
        conditions = [self.branch_conditions[source, self.block]]
        at = source
        while at != shared:
            predecessors = self.flow.blocks[at].predecessors
            if len(predecessors) != 1:
                return [*conditions, UNKNOWN]
            conditions.append(self.branch_conditions[predecessors[0], at])
            at = predecessors[0]
        return conditions

    def _lose_merged(self, values: Iterable[Value]) -> None:
        for value in values:
            self.lose(value)

    def _close_loops(self, number: int) -> None:
        """At a way back, note what the phis of the loop's head become."""
        for edge in self.flow.blocks[number].edges:
            loop = self.flow.loop_at.get(edge.target)
            if loop is None or edge.target > number:
                continue
            out = self._out[number] or {}
            for phi in self.phis.values():
                if phi.loop == loop.number:
                    value = out.get(phi.key)
                    phi.next.append(value if isinstance(value, Poly) else None)
                    self.lose(value)


def _keys_of_several_blocks(flow: Flow) -> set[str]:
    seen: dict[str, int] = {}
    several: set[str] = set()
    for block in flow.blocks:
        for instruction in block.instructions:
            names = [name for operand in instruction.operands for name in registers(operand)]
            if instruction.predicate:
                names.append(instruction.predicate)
            for name in names:
                if seen.setdefault(name, block.number) != block.number:
                    several.add(name)
    return several


def under_guard(execution: Execution, guard: Condition, new: Value, old: Value) -> Value:
    """A register's value after an instruction that ran only where `guard` holds."""
    if guard.op == "true":
        return new
    if guard.op == "false":
        return old
    if isinstance(new, Condition):
        previous = old if isinstance(old, Condition) else UNKNOWN
        return join_conditions(
            "or", (join_conditions("and", (guard, new)), join_conditions("and", (negate(guard), previous)))
        )
    if isinstance(new, Poly) and isinstance(old, Poly):
        execution.lose(new if new != old else None)
        execution.lose(old if new != old else None)
        return new if new == old else execution.select(guard, new, old)
    return None


__all__ = ["FALSE", "Execution", "FoundAccess", "Key", "Phi", "Slot", "Slots", "under_guard"]
