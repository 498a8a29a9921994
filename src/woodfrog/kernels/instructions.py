"""What PTX instructions do to symbolic values. Whatever is not modelled here makes its results unknown.

Integer instructions become polynomials or atoms; floating-point results are never followed. Memory instructions are in
memory.py.
"""

from __future__ import annotations

from collections.abc import Callable

from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.execution import Execution, under_guard
from woodfrog.kernels.memory import MEMORY_HANDLERS, other_memory
from woodfrog.kernels.opcodes import NO_GLOBAL_MEMORY, destinations, integer_type
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Operand, Vector
from woodfrog.kernels.values import (
    FALSE,
    SPECIAL_BOUNDS,
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

Handler = Callable[[Execution, Instruction], Value]

# Instructions that hand an address on in a form that is still followed.
_KEEP_ADDRESSES = frozenset(
    ("add", "sub", "mov", "cvta", "cvt", "ld", "st", "setp", "selp", "bra", "mad", "call", "atom", "red")
)
# What the handlers below and in memory.py take for granted; text that a compiler made never has fewer.
_FEWEST_OPERANDS = {
    "abs": 2, "add": 3, "and": 3, "atom": 2, "bfe": 4, "bfi": 5, "bfind": 2, "clz": 2, "cvt": 2, "cvta": 2, "div": 3,
    "ld": 2, "ldu": 2, "mad": 4, "max": 3, "min": 3, "mov": 2, "mul": 3, "neg": 2, "not": 2, "or": 3, "popc": 2,
    "red": 2, "rem": 3, "selp": 4, "setp": 3, "shl": 3, "shr": 3, "st": 2, "sub": 3, "xor": 3,
}  # fmt: skip
_UNSIGNED_RELATIONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_RELATIONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
# Special registers with bounds that hold in any launch (PTX ISA 9.0, "Special Registers").
_BOUNDED = {"%laneid": 31, "%warpid": 63, "%nwarpid": 64, "%smid": 1023, "%nsmid": 1024}


def step(execution: Execution, instruction: Instruction) -> None:
    """Execute one instruction."""
    guard = TRUE
    if instruction.predicate:
        guard = execution.condition_of(instruction.predicate)
        if instruction.negated:
            guard = negate(guard)
    opcode = instruction.opcode
    if opcode in ("bra", "brx", "ret", "exit", "trap"):
        return
    if len(instruction.operands) < _FEWEST_OPERANDS.get(opcode, 0):
        raise AnalysisLimitError(f"{instruction.name} has too few operands")
    if opcode not in _KEEP_ADDRESSES:
        _lose_operands(execution, instruction)
    memory = MEMORY_HANDLERS.get(opcode)
    if memory is not None:
        memory(execution, instruction, guard)
        return
    handler = _HANDLERS.get(opcode)
    if handler is not None and len(instruction.operands) >= 2 and isinstance(instruction.operands[0], str):
        name = instruction.operands[0]
        value = handler(execution, instruction)
        if value is None:
            _lose_operands(execution, instruction)
        elif isinstance(value, Poly):
            value = execution.atoms.limited(value, 64)
        execution.environment[name] = under_guard(execution, guard, value, execution.environment.get(name))
        return
    if handler is not None and opcode == "mov" and _unpack(execution, instruction, guard):
        return
    if opcode == "setp" and isinstance(instruction.operands[0], Vector):
        _setp_pair(execution, instruction, guard)
        return
    for name in destinations(instruction):
        execution.environment[name] = None
    if opcode not in NO_GLOBAL_MEMORY and any(isinstance(operand, Memory) for operand in instruction.operands):
        other_memory(execution, instruction, guard)


def _lose_operands(execution: Execution, instruction: Instruction) -> None:
    for operand in instruction.operands:
        parts = operand.elements if isinstance(operand, Vector) else (operand,)
        for part in parts:
            if isinstance(part, str):
                if execution.variables.get(part) in ("local", "param"):
                    execution.slots.lost.add(part)
                execution.lose(execution.environment.get(part))
            elif isinstance(part, Memory):
                name = part.base.lstrip("!&")
                if execution.variables.get(name) in ("local", "param"):
                    execution.slots.lost.add(name)
                execution.lose(execution.environment.get(name))


def value_of(execution: Execution, operand: Operand, width: int) -> Poly:
    """An operand as a polynomial modulo 2**width."""
    if isinstance(operand, int):
        return const(operand).reduced(width)
    if isinstance(operand, str):
        value = execution.environment.get(operand)
        if isinstance(value, Poly):
            return value
        if operand in execution.environment:
            return execution.unknown(width, "a computed value")
        return _named(execution, operand, width)
    if isinstance(operand, Memory) and operand.base.startswith("&"):
        return value_of(execution, operand.base[1:], width) + const(operand.offset)
    return execution.unknown(width, "an operand that is not followed")


def _named(execution: Execution, name: str, width: int) -> Poly:
    """A special register, the address of a variable, or a register that was never written."""
    if name[:1] == "%" and name[1:] in SPECIAL_BOUNDS and name != "%laneid":
        return execution.atoms.atom("special", name[1:])
    if name in _BOUNDED:
        return execution.unknown(width, f"{name}", 0, _BOUNDED[name])
    if name in execution.parameters or name in execution.variables:
        return execution.atoms.atom("window", name)
    if name in execution.module_variables:
        return execution.atoms.atom("symbol", name)
    return execution.unknown(width, f"{name}")


def condition_operand(execution: Execution, operand: Operand) -> Condition:
    if isinstance(operand, str):
        return execution.condition_of(operand)
    if isinstance(operand, Memory) and operand.base.startswith("!"):
        return negate(execution.condition_of(operand.base[1:]))
    if isinstance(operand, int):
        return TRUE if operand else FALSE
    return UNKNOWN


class _Operands:
    """The operands of a two- or three-operand integer instruction, read as its type says."""

    def __init__(self, execution: Execution, instruction: Instruction) -> None:
        self.atoms = execution.atoms
        self._execution = execution
        self._operands = instruction.operands
        kind = integer_type(instruction.modifiers)
        plain = not {"cc", "sat"} & set(instruction.modifiers)
        self.known = kind is not None and plain
        self.width, self.signed = kind or (64, False)

    def bits(self, index: int, width: int | None = None) -> Poly:
        return value_of(self._execution, self._operands[index], width or self.width)

    def integer(self, index: int, *, signed: bool | None = None) -> Poly:
        return self.atoms.ext(self.bits(index), self.width, self.signed if signed is None else signed)

    def unsigned32(self, index: int) -> Poly:
        return self.atoms.ext(self.bits(index, 32), 32, False)

    def constant(self, index: int) -> int | None:
        return self.bits(index).constant

    def done(self, value: Poly) -> Poly:
        return self.atoms.limited(value, self.width)


def _add(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.bits(1), o.bits(2)
    fused = _quotient_and_multiplicand(o, left, right) or _quotient_and_multiplicand(o, right, left)
    return fused or o.done(left + right)


def _quotient_and_multiplicand(o: _Operands, quotient: Poly, other: Poly) -> Poly | None:
    """(x * m >> w) + x as one quotient: how compilers divide by a constant whose multiplier needs w + 1 bits."""
    if len(quotient.terms) != 1 or not other.terms:
        return None
    (monomial, coefficient) = next(iter(quotient.terms.items()))
    if coefficient != 1 or len(monomial) != 1 or monomial[0].kind != "floordiv":
        return None
    numerator, divisor = monomial[0].args
    if not isinstance(numerator, Poly) or not isinstance(divisor, Poly) or divisor.constant != 1 << o.width:
        return None
    x = o.atoms.ext(other, o.width, True)
    first = next(iter(x.terms), None)
    if first is None or first not in numerator.terms or numerator.terms[first] % x.terms[first]:
        return None
    multiplier = numerator.terms[first] // x.terms[first]
    if x.scaled(multiplier) != numerator:
        return None
    return o.atoms.floordiv(x.scaled(multiplier + (1 << o.width)), divisor)


def _sub(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    return o.done(o.bits(1) - o.bits(2)) if o.known else None


def _product(o: _Operands, left: Poly, right: Poly) -> Poly:
    if len(left.terms) * len(right.terms) > 512:
        return o._execution.unknown(64, "too large an expression")
    return left * right


def _mul(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    if "wide" in instruction.modifiers:
        return o.atoms.limited(_product(o, o.integer(1), o.integer(2)), 2 * o.width)
    if "hi" in instruction.modifiers:
        return o.atoms.floordiv(_product(o, o.integer(1), o.integer(2)), const(1 << o.width))
    return o.done(_product(o, o.bits(1), o.bits(2)))


def _mad(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    product = _mul(execution, instruction)
    if not isinstance(product, Poly):
        return None
    width = 2 * o.width if "wide" in instruction.modifiers else o.width
    return o.atoms.limited(product + o.bits(3, width), width)


def _neg(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    return o.done(o.bits(1).scaled(-1)) if o.known else None


def _abs(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    value = o.integer(1, signed=True)
    return o.atoms.atom("max", value, value.scaled(-1))


def _not(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        return negate(condition_operand(execution, instruction.operands[1]))
    o = _Operands(execution, instruction)
    return o.done(o.bits(1).scaled(-1) - const(1)) if o.known else None


def _modulo(o: _Operands, value: Poly, power: int) -> Poly:
    """value mod 2**power; right for any value that has the right bits, whatever wraps above."""
    if power == 0:
        return ZERO
    return value - o.atoms.floordiv(value, const(1 << power)).scaled(1 << power)


def _and(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        return join_conditions("and", [condition_operand(execution, p) for p in instruction.operands[1:3]])
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.bits(1), o.bits(2)
    if left.constant is not None:
        left, right = right, left
    mask = right.constant
    if mask is None:
        return o.atoms.atom("and", o.atoms.ext(left, o.width, False), o.atoms.ext(right, o.width, False))
    mask %= 1 << o.width
    select = _constants_of_select(left)
    if select is not None:
        atom, first, second = select
        return execution.select(atom.args[0], const(first & mask), const(second & mask))  # type: ignore[arg-type]
    if mask == 0:
        return ZERO
    low = (mask & -mask).bit_length() - 1
    high = mask.bit_length()
    if mask == (1 << high) - (1 << low):
        return o.done((left if high == o.width else _modulo(o, left, high)) - _modulo(o, left, low))
    return o.atoms.atom("and", o.atoms.ext(left, o.width, False), const(mask))


def _constants_of_select(value: Poly) -> tuple[Atom, int, int] | None:
    """The atom and both constants of a value that is one constant or another."""
    if len(value.terms) == 1:
        (monomial, coefficient) = next(iter(value.terms.items()))
        if coefficient == 1 and len(monomial) == 1 and monomial[0].kind == "select":
            first, second = monomial[0].args[1].constant, monomial[0].args[2].constant  # type: ignore[attr-defined]
            if first is not None and second is not None:
                return monomial[0], first, second
    return None


def _or(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        return join_conditions("or", [condition_operand(execution, p) for p in instruction.operands[1:3]])
    return _bitwise(execution, instruction, "or")


def _xor(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        left, right = (condition_operand(execution, p) for p in instruction.operands[1:3])
        if left.op in ("true", "false"):
            left, right = right, left
        return left if right.op == "false" else negate(left) if right.op == "true" else UNKNOWN
    return _bitwise(execution, instruction, "xor")


def _bitwise(execution: Execution, instruction: Instruction, kind: str) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.integer(1, signed=False), o.integer(2, signed=False)
    a, b = left.constant, right.constant
    if a is not None and b is not None:
        return const(a | b if kind == "or" else a ^ b)
    if a == 0 or b == 0:
        return o.bits(2) if a == 0 else o.bits(1)
    if kind == "xor" and (1 << o.width) - 1 in (a, b):
        return o.done((o.bits(1) if b is not None else o.bits(2)).scaled(-1) - const(1))
    return o.atoms.atom(kind, left, right)


def _shl(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    amount = o.unsigned32(2)
    number = amount.constant
    if number is not None:
        return o.done(o.bits(1).scaled(1 << number)) if number < o.width else ZERO
    return o.done(o.bits(1) * o.atoms.atom("pow2", amount, o.width))


def _shr(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    amount = o.unsigned32(2)
    number = amount.constant
    divisor = o.atoms.atom("pow2", amount, 0) if number is None else const(1 << min(number, o.width))
    return o.atoms.floordiv(o.integer(1), divisor)


def _div(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    divide = o.atoms.truncdiv if o.signed else o.atoms.floordiv
    return divide(o.integer(1), o.integer(2))


def _rem(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.integer(1), o.integer(2)
    quotient = (o.atoms.truncdiv if o.signed else o.atoms.floordiv)(left, right)
    return o.done(left - quotient * right)


def _min_max(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.integer(1), o.integer(2)
    a, b = left.constant, right.constant
    if a is not None and b is not None:
        return const(min(a, b) if instruction.opcode == "min" else max(a, b))
    return left if left == right else o.atoms.atom(instruction.opcode, left, right)


def _bfe(execution: Execution, instruction: Instruction) -> Value:
    o = _Operands(execution, instruction)
    position, length = o.bits(2, 32).constant, o.bits(3, 32).constant
    if not o.known or position is None or length is None:
        return None
    position, length = position & 0xFF, length & 0xFF
    if length == 0 or position + length > o.width:
        return ZERO if length == 0 else None
    shifted = o.atoms.floordiv(o.integer(1, signed=False), const(1 << position))
    return o.atoms.ext(shifted, length, True) if o.signed else _modulo(o, shifted, length)


def _bfi(execution: Execution, instruction: Instruction) -> Value:
    """bfi d, a, b, position, length: the low bits of a put into b."""
    o = _Operands(execution, instruction)
    position, length = o.bits(3, 32).constant, o.bits(4, 32).constant
    if not o.known or position is None or length is None:
        return None
    position, length = position & 0xFF, length & 0xFF
    if position + length > o.width:
        return None
    base = o.integer(2, signed=False)
    old = _modulo(o, o.atoms.floordiv(base, const(1 << position)), length)
    return o.done(base + (_modulo(o, o.bits(1), length) - old).scaled(1 << position))


def _count_bits(execution: Execution, instruction: Instruction) -> Value:
    width = 64 if instruction.modifiers[-1:] in (("b64",), ("u64",), ("s64",)) else 32
    return execution.unknown(32, "a count of bits", 0, width)


def _mov(execution: Execution, instruction: Instruction) -> Value:
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


def _unpack(execution: Execution, instruction: Instruction, guard: Condition) -> bool:
    """mov.b64 {low, high}, value."""
    first, kind = instruction.operands[0], integer_type(instruction.modifiers)
    if not isinstance(first, Vector) or kind is None or not first.elements or kind[0] % len(first.elements):
        return False
    each = kind[0] // len(first.elements)
    value = value_of(execution, instruction.operands[1], kind[0])
    _lose_operands(execution, instruction)
    whole = execution.atoms.ext(value, kind[0], False)
    for index, name in enumerate(first.elements):
        if isinstance(name, str):
            part = value if index == 0 else execution.atoms.floordiv(whole, const(1 << each * index))
            new = part if each == 32 else execution.atoms.ext(part, each, False)
            execution.environment[name] = under_guard(execution, guard, new, execution.environment.get(name))
    return True


def _cvta(execution: Execution, instruction: Instruction) -> Value:
    """Global and generic addresses are the same numbers; others are told apart by the variable they come from."""
    return value_of(execution, instruction.operands[1], 64)


def _cvt(execution: Execution, instruction: Instruction) -> Value:
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


def _selp(execution: Execution, instruction: Instruction) -> Value:
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
    select, number = _constants_of_select(left), right.constant
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


def _setp(execution: Execution, instruction: Instruction) -> Value:
    return _setp_values(execution, instruction)[0]


def _setp_pair(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    first = instruction.operands[0]
    assert isinstance(first, Vector)
    for name, value in zip(first.elements, _setp_values(execution, instruction), strict=False):
        if isinstance(name, str):
            execution.environment[name] = under_guard(execution, guard, value, execution.environment.get(name))


_HANDLERS: dict[str, Handler] = {
    "abs": _abs, "add": _add, "and": _and, "bfe": _bfe, "bfi": _bfi, "bfind": _count_bits, "clz": _count_bits,
    "cvt": _cvt, "cvta": _cvta, "div": _div, "mad": _mad, "max": _min_max, "min": _min_max, "mov": _mov, "mul": _mul,
    "neg": _neg, "not": _not, "or": _or, "popc": _count_bits, "rem": _rem, "selp": _selp, "setp": _setp, "shl": _shl,
    "shr": _shr, "sub": _sub, "xor": _xor,
}  # fmt: skip
