"""What moves, conversions, comparisons and choices do to symbolic values."""

from __future__ import annotations

from woodfrog.kernels.execution import Execution, under_guard
from woodfrog.kernels.opcodes import integer_type
from woodfrog.kernels.operands import condition_operand, lose_operands, value_of
from woodfrog.kernels.ptx.syntax import Instruction, Vector
from woodfrog.kernels.values import (
    FALSE,
    TRUE,
    UNKNOWN,
    ZERO,
    Atom,
    Compare,
    Condition,
    Poly,
    Value,
    const,
    join_conditions,
    negate,
)

_UNSIGNED_RELATIONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_RELATIONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))


def constants_of_select(value: Poly) -> tuple[Atom, int, int] | None:
    """The atom and both constants of a value that is one constant or another."""
    if len(value.terms) == 1:
        (monomial, coefficient) = next(iter(value.terms.items()))
        if coefficient == 1 and len(monomial) == 1 and monomial[0].kind == "select":
            first, second = monomial[0].args[1].constant, monomial[0].args[2].constant  # type: ignore[attr-defined]
            if first is not None and second is not None:
                return monomial[0], first, second
    return None


def mov(execution: Execution, instruction: Instruction) -> Value:
    source = instruction.operands[1]
    if "pred" in instruction.modifiers:
        return condition_operand(execution, source)
    kind = integer_type(instruction.modifiers)
    if isinstance(source, Vector):
        parts = source.elements
        if kind is None or not parts or kind[0] % len(parts):
            return None
        each = kind[0] // len(parts)
        packed = ZERO
        for index, part in enumerate(parts):
            packed = packed + execution.atoms.ext(value_of(execution, part, each), each, False).scaled(
                1 << each * index
            )
        return packed
    if kind is None:
        return None  # a float: never part of an address
    if isinstance(source, str) and execution.environment.get(source, ZERO) is None:
        return None
    return value_of(execution, source, kind[0])


def unpack(execution: Execution, instruction: Instruction, guard: Condition) -> bool:
    """mov.b64 {low, high}, value."""
    first, kind = instruction.operands[0], integer_type(instruction.modifiers)
    if not isinstance(first, Vector) or kind is None or not first.elements or kind[0] % len(first.elements):
        return False
    each = kind[0] // len(first.elements)
    value = value_of(execution, instruction.operands[1], kind[0])
    lose_operands(execution, instruction)
    whole = execution.atoms.ext(value, kind[0], False)
    for index, name in enumerate(first.elements):
        if isinstance(name, str):
            part = value if index == 0 else execution.atoms.floordiv(whole, const(1 << each * index))
            new = part if each == 32 else execution.atoms.ext(part, each, False)
            execution.environment[name] = under_guard(execution, guard, new, execution.environment.get(name))
    return True


def cvta(execution: Execution, instruction: Instruction) -> Value:
    """Global and generic addresses are the same numbers; others are told apart by the variable they come from."""
    return value_of(execution, instruction.operands[1], 64)


def cvt(execution: Execution, instruction: Instruction) -> Value:
    types = [t for t in (integer_type((m,)) for m in instruction.modifiers[-2:]) if t]
    if len(types) != 2 or len(instruction.modifiers) < 2 or "sat" in instruction.modifiers:
        return None
    (to_width, to_signed), (from_width, from_signed) = types
    source = instruction.operands[1]
    if isinstance(source, Vector):
        return None
    value = value_of(execution, source, from_width)
    if to_width <= from_width:
        if to_width == from_width and execution.windows(value):
            return value
        narrow_register = str(instruction.operands[0])[:3] != "%rd"
        if to_width >= 32 and (narrow_register or to_width == 64):
            return value.reduced(to_width)
        return execution.atoms.ext(value, to_width, to_signed)
    if execution.windows(value) or _is_window(value):
        return value  # 32-bit addresses of shared and local memory
    return execution.atoms.ext(value, from_width, from_signed)


def _is_window(value: Poly) -> bool:
    return any(atom.kind == "window" for monomial in value.terms for atom in monomial)


def selp(execution: Execution, instruction: Instruction) -> Value:
    condition = condition_operand(execution, instruction.operands[3])
    kind = integer_type(instruction.modifiers)
    if kind is None:
        return None
    first, second = (value_of(execution, operand, kind[0]) for operand in instruction.operands[1:3])
    if condition.op in ("true", "false") or first == second:
        return second if condition.op == "false" else first
    return execution.select(condition, first, second)


def _comparison(execution: Execution, instruction: Instruction) -> Condition:
    """The relation that a setp tests, before it is joined with another predicate."""
    relation = instruction.modifiers[0] if instruction.modifiers else ""
    kind = integer_type(instruction.modifiers)
    if kind is None:
        return UNKNOWN
    width, signed = kind
    if relation in _UNSIGNED_RELATIONS:
        relation, signed = _UNSIGNED_RELATIONS[relation], False
    if relation not in _RELATIONS:
        return UNKNOWN
    left, right = (value_of(execution, operand, width) for operand in instruction.operands[1:3])
    select, number = constants_of_select(left), right.constant
    if select is not None and number is not None and relation in ("eq", "ne"):
        # What a compiler makes of a bool: 1 or 0, compared again.
        atom, first, second = select
        holds = [((v - number) % (1 << width) == 0) == (relation == "eq") for v in (first, second)]
        condition: Condition = atom.args[0]  # type: ignore[assignment]
        if holds[0] == holds[1]:
            return TRUE if holds[0] else FALSE
        return condition if holds[0] else negate(condition)
    return Condition("cmp", (Compare(relation, left.reduced(width), right.reduced(width), width, signed),))


def _setp_values(execution: Execution, instruction: Instruction) -> tuple[Condition, Condition]:
    compared = _comparison(execution, instruction)
    if len(instruction.operands) < 4:
        return compared, negate(compared)
    other = condition_operand(execution, instruction.operands[3])
    for word in ("and", "or"):
        if word in instruction.modifiers:
            return join_conditions(word, (compared, other)), join_conditions(word, (negate(compared), other))
    return UNKNOWN, UNKNOWN


def setp(execution: Execution, instruction: Instruction) -> Value:
    return _setp_values(execution, instruction)[0]


def setp_pair(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    first = instruction.operands[0]
    assert isinstance(first, Vector)
    for name, value in zip(first.elements, _setp_values(execution, instruction), strict=False):
        if isinstance(name, str):
            execution.environment[name] = under_guard(execution, guard, value, execution.environment.get(name))
