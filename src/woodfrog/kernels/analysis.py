"""From a PTX kernel to its access template: runs the parts of this package in order.

Whatever goes wrong with one kernel's analysis ends as a template that says the kernel touches everything, with the
reason; only text that is no PTX is an error.
"""

from __future__ import annotations

from woodfrog.kernels import limits
from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.execution import Execution, FoundAccess, Slots
from woodfrog.kernels.flow import Flow, Loop
from woodfrog.kernels.inline import inlined
from woodfrog.kernels.instructions import step
from woodfrog.kernels.loops import PhiSolutions, alternatives
from woodfrog.kernels.ptx import Function, Module, parse
from woodfrog.kernels.rewrite import Rewriter
from woodfrog.kernels.template import Access, Kind, LoopFact, ParameterLayout, Step, Template
from woodfrog.kernels.values import ZERO, Atom, Condition, Poly, condition_loops, const, join_conditions

_PASSES = 4


def templates(text: str | bytes) -> list[Template]:
    """The access templates of all kernels of a PTX text, in its order. Raises PtxError for text that is no PTX."""
    module = parse(text)
    return [template_of(kernel, module) for kernel in module.kernels]


def template_of(kernel: Function, module: Module) -> Template:
    """The access template of one kernel; never fails, see Template.fallback."""
    parameters = tuple(ParameterLayout(p.name, p.offset_bytes, p.size_bytes) for p in kernel.parameters)
    fallback = ""
    loops: tuple[LoopFact, ...] = ()
    gates: dict[tuple[int, int], tuple[tuple[Step, ...], bool]] = {}
    try:
        analysis = _Analysis(kernel, module)
        accesses, loops, gates = analysis.accesses(), analysis.facts(), analysis.gates()
    except AnalysisLimitError as error:
        fallback = error.reason
    except RecursionError:
        fallback = "its expressions are nested too deeply"
    if fallback:
        line = module.line_of(kernel.position)
        accesses = tuple(
            Access(kind, None, None, (), False, kernel.position, line, (0, 0), fallback)
            for kind in (Kind.LOAD, Kind.ATOMIC)
        )
    symbols: dict[str, None] = {}
    for access in accesses:
        if access.address is not None:
            _symbols(access.address, symbols)
    block = required_block(kernel)
    return Template(kernel.name, parameters, accesses, fallback, loops, gates, tuple(symbols), module.files, block)


def required_block(kernel: Function) -> tuple[int, int, int] | None:
    """The dimensions that blocks must have (.reqntid; any others fail at launch), None where any will do."""
    extents = (*kernel.directives.get("reqntid", ()), 1, 1)[:3]
    if "reqntid" not in kernel.directives or not all(1 <= extent <= limits.BLOCK_THREADS for extent in extents):
        return None
    return extents[0], extents[1], extents[2]


def _symbols(value: Poly, found: dict[str, None]) -> None:
    for monomial in value.terms:
        for atom in monomial:
            if atom.kind == "symbol":
                found[str(atom.args[0])] = None
            for arg in atom.args:
                for part in arg if isinstance(arg, tuple) else (arg,):
                    if isinstance(part, Poly):
                        _symbols(part, found)


class _Analysis:
    def __init__(self, kernel: Function, module: Module) -> None:
        if kernel.body is None:
            raise AnalysisLimitError("it is declared only, not defined")
        statements, variables = inlined(kernel, module)
        self._module = module
        self._flow = Flow(statements)
        self._block = required_block(kernel)
        parameters = {p.name: (p.offset_bytes, p.size_bytes) for p in kernel.parameters}
        module_variables = {v.name: v.space for v in module.variables.values() if v.space in ("global", "const")}
        self._execution = self._execute(variables, parameters, module_variables)
        self._solutions = PhiSolutions(self._execution)
        self._steps: dict[int, tuple[tuple[Step, ...], bool]] = {}
        self._facts: dict[int, LoopFact] = {}

    def _execute(
        self, variables: dict[str, str], parameters: dict[str, tuple[int, int]], module_variables: dict[str, str]
    ) -> Execution:
        """The first pass finds the variables of local memory, the next ones follow them, until none is lost."""
        execution = Execution(self._flow, variables, parameters, module_variables, None, self._block)
        execution.run(step)
        slots = execution.slots
        for _ in range(_PASSES):
            if not slots.good():
                return execution if not slots.touched else self._last(execution, slots)
            lost = set(slots.lost)
            again = Execution(self._flow, variables, parameters, module_variables, slots, self._block)
            again.run(step)
            if slots.lost == lost:
                return again
        return self._last(execution, Slots(slots.touched, slots.stored, set(slots.touched) | slots.lost))

    def _last(self, first: Execution, slots: Slots) -> Execution:
        """A pass in which no variable of local memory is followed."""
        everything_lost = Slots(slots.touched, slots.stored, set(slots.touched) | slots.lost)
        last = Execution(
            self._flow, first.variables, first.parameters, first.module_variables, everything_lost, self._block
        )
        last.run(step)
        return last

    def accesses(self) -> tuple[Access, ...]:
        rewriter = self._solutions.rewriter
        result: dict[tuple[object, ...], Access] = {}
        line_starts = _LineCounter(self._module.text)
        for found in self._execution.found:
            steps, complete = self._steps_to(found.block)
            guard = rewriter.condition(found.guard)
            if guard.op == "false":
                continue
            if guard.op != "true":
                steps = (*steps, guard)
            address = None if found.address is None else rewriter.poly(found.address)
            size = None if found.size is None else rewriter.poly(found.size)
            if address is not None and _only_windows(address, self._execution):
                continue
            if address is not None and (not complete or any(_depends_on_memory(one) for one in steps)):
                address = self._around_one_place(address)
            key = (found.kind, address, size, steps, complete)
            if key not in result:
                result[key] = Access(
                    found.kind, address, size, steps, complete, found.position, line_starts.line(found.position),
                    self._flow.source_lines.get(found.position, (0, 0)), found.reason or _unknown_in(address),
                )  # fmt: skip
        return tuple(result.values())

    def _around_one_place(self, address: Poly) -> Poly:
        """Alternatives that differ by constants as one value with bounds each.

        For accesses that cannot be exact: to look at each alternative by itself would only take time.
        """
        found = alternatives(address, limits.JOINED_ALTERNATIVES)
        places: dict[Poly, tuple[int, int]] = {}
        for one in found:
            offset = one.terms.get((), 0)
            least, most = places.get(one - const(offset), (offset, offset))
            places[one - const(offset)] = (min(least, offset), max(most, offset))
        if len(places) == len(found):
            return address
        atoms, loops = self._execution.atoms, address.loops
        joined = [
            base + const(least) + (atoms.upto(const(most - least), loops) if most > least else ZERO)
            for base, (least, most) in places.items()
        ]
        return atoms.either(joined, loops)

    def facts(self) -> tuple[LoopFact, ...]:
        """What is known of the counter of each loop."""
        return tuple(self._fact(loop) for loop in self._flow.loops)

    def gates(self) -> dict[tuple[int, int], tuple[tuple[Step, ...], bool]]:
        """What holds on each forward way into a block where ways join."""
        found = {}
        for block in self._flow.blocks:
            sources = [p for p in block.predecessors if p < block.number]
            if len(sources) < 2:
                continue
            shared = len(self._steps_to(self._flow.dominator[block.number])[0])
            for source in sources:
                steps, complete = self._steps_to(source)
                edge = next(e for e in self._flow.blocks[source].edges if e.target == block.number)
                raw = self._execution.branch_conditions[source, block.number]
                condition = self._solutions.rewriter.condition(raw)
                steps = steps[shared:] if condition.op == "true" else (*steps[shared:], condition)
                only_way = len(self._flow.blocks[source].edges) == 1
                found[block.number, source] = (steps, complete and (only_way or bool(edge.predicate)))
        return found

    def _steps_to(self, number: int) -> tuple[tuple[Step, ...], bool]:
        """What holds when a block runs, outermost first, and whether nothing else decides that it runs."""
        found = self._steps.get(number)
        if found is not None:
            return found
        pending = []
        at = number
        while at not in self._steps and at != 0:
            pending.append(at)
            at = self._flow.dominator[at]
        if at == 0 and 0 not in self._steps:
            self._steps[0] = ((self._fact(self._flow.loop_at[0]),), False) if 0 in self._flow.loop_at else ((), True)
        for block in reversed(pending):
            steps, complete = self._steps[self._flow.dominator[block]]
            condition, known = self._condition_between(self._flow.dominator[block], block)
            if condition.op != "true":
                steps = (*steps, condition)
            complete = complete and known
            loop = self._flow.loop_at.get(block)
            if loop is not None:
                fact = self._fact(loop)
                steps = (*steps, fact)
                complete = complete and fact.complete
            self._steps[block] = (steps, complete)
        return self._steps[number]

    def _condition_between(self, dominator: int, block: int) -> tuple[Condition, bool]:
        """The condition under which `block` runs after its immediate dominator, and whether that is all there is."""
        flow = self._flow
        if flow.postdominates(block, dominator):
            return join_conditions("and", ()), True
        edges = [edge for edge in flow.blocks[dominator].edges if edge.target == block]
        others = [p for p in flow.blocks[block].predecessors if p != dominator and not flow.dominates(block, p)]
        if len(edges) == 1 and not others:
            raw = self._execution.branch_conditions[dominator, block]
            return self._solutions.rewriter.condition(raw), bool(edges[0].predicate)
        return join_conditions("and", ()), False

    def _fact(self, loop: Loop) -> LoopFact:
        fact = self._facts.get(loop.number)
        if fact is not None:
            return fact
        self._facts[loop.number] = LoopFact(loop.number, (), False)  # for a loop met again on the way
        flow = self._flow
        last = loop.latches[0]
        for latch in loop.latches[1:]:
            while not flow.dominates(last, latch):
                last = flow.dominator[last]
        complete = True
        raw: list[Condition] = []
        deciders: set[int] = set()
        at = last
        while at != loop.header:
            condition, known = self._condition_between(flow.dominator[at], at)
            complete = complete and known
            if condition.op != "true":
                raw.append(condition)
                deciders.add(flow.dominator[at])
            at = flow.dominator[at]
        if len(loop.latches) == 1:
            edge = self._execution.branch_conditions[last, loop.header]
            condition = self._solutions.rewriter.condition(edge)
            if condition.op != "true":
                raw.append(condition)
                deciders.add(last)
        else:
            complete = False
        for number in loop.blocks:
            if number not in deciders and any(edge.target not in loop.blocks for edge in flow.blocks[number].edges):
                complete = False
            last_instruction = flow.blocks[number].instructions[-1:]
            if last_instruction and last_instruction[0].opcode in ("ret", "exit", "trap"):
                complete = complete and number in deciders
        counter = self._solutions.counter(loop.number)
        before = Rewriter(
            self._execution.atoms,
            lambda atom: counter - const(1) if atom.kind == "loop" and atom.args[0] == loop.number else None,
            keep_gates=False,
        )
        inner = {other.number for other in flow.loops if loop.number in flow.chain(other.number)} - {loop.number}
        again = []
        for condition in raw:
            pieces = condition.args if condition.op == "and" else (condition,)
            for piece in pieces:
                assert isinstance(piece, Condition)
                if condition_loops(piece) & inner or not _follows(piece, loop.number):
                    complete = False  # it speaks of values that the iteration before had, not of the counter
                    continue
                again.append(before.condition(piece))
        fact = LoopFact(loop.number, tuple(again), complete)
        self._facts[loop.number] = fact
        return fact


def _depends_on_memory(part: object) -> bool:
    """Whether a step, or a part of one, has a value in it that is not known from the launch."""
    if isinstance(part, Condition):
        return part.op == "unknown" or any(_depends_on_memory(one) for one in part.args)
    if isinstance(part, LoopFact):
        return False
    if isinstance(part, Poly):
        return any(_atom_depends_on_memory(atom) for monomial in part.terms for atom in monomial)
    return isinstance(part, tuple) and any(_depends_on_memory(one) for one in part)


def _atom_depends_on_memory(atom: Atom) -> bool:
    return atom.kind in ("unknown", "load") or any(_depends_on_memory(arg) for arg in atom.args)


def _follows(condition: Condition, loop: int) -> bool:
    """Whether the loop changes what a condition depends on through its counter alone."""
    return all(_value_follows(part, loop) for part in condition.args)


def _value_follows(part: object, loop: int) -> bool:
    if isinstance(part, Poly):
        return all(_atom_follows(atom, loop) for monomial in part.terms for atom in monomial)
    if isinstance(part, tuple):  # conditions, comparisons, alternatives
        return all(_value_follows(piece, loop) for piece in part)
    return True


def _atom_follows(atom: Atom, loop: int) -> bool:
    if loop not in atom.loops or atom.kind == "loop":
        return True
    if atom.kind in ("unknown", "load", "upto", "either", "phi"):
        return False
    return all(_value_follows(arg, loop) for arg in atom.args)


def _only_windows(address: Poly, execution: Execution) -> bool:
    """Whether an address can only be one of shared, local or parameter memory."""
    for monomial, coefficient in address.terms.items():
        if len(monomial) == 1 and coefficient == 1:
            if monomial[0].kind == "window":
                return True
            if monomial[0].kind in ("either", "select"):
                atom = monomial[0]
                parts = atom.args[0] if atom.kind == "either" else atom.args[1:]
                if all(_only_windows(part, execution) for part in parts):  # type: ignore[attr-defined]
                    return True
    return False


def _unknown_in(address: Poly | None) -> str:
    """The reason of an unknown inside an address."""
    stack = [address] if address is not None else []
    visited = 0
    while stack and visited < 2000:
        value = stack.pop()
        visited += 1
        for monomial in value.terms:
            for atom in monomial:
                if atom.kind == "unknown":
                    return f"it depends on {atom.args[3]}"
                if atom.kind == "load":
                    return "it depends on a loaded value"
                for arg in atom.args:
                    stack.extend(part for part in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(part, Poly))
    return ""


class _LineCounter:
    """Lines of positions in a text, each found in logarithmic time."""

    def __init__(self, text: str) -> None:
        self._starts = [0]
        at = text.find("\n")
        while at >= 0:
            self._starts.append(at + 1)
            at = text.find("\n", at + 1)

    def line(self, position: int) -> int:
        from bisect import bisect_right

        return bisect_right(self._starts, position)


__all__ = ["FoundAccess", "limits", "template_of", "templates"]
