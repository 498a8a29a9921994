"""What PTX instructions do to symbolic values. Whatever is not modelled here makes its results unknown.

Integer instructions become polynomials or atoms; floating-point results are never followed. Memory instructions are in
memory.py.
"""

from __future__ import annotations

from collections.abc import Callable

from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.execution import Execution, under_guard
from woodfrog.kernels.memory import MEMORY_HANDLERS, other_memory
from woodfrog.kernels.moves import constants_of_select, cvt, cvta, mov, selp, setp, setp_pair, unpack
from woodfrog.kernels.opcodes import NO_GLOBAL_MEMORY, destinations
from woodfrog.kernels.operands import Operands, condition_operand, lose_operands
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Vector
from woodfrog.kernels.values import (
    TRUE,
    UNKNOWN,
    ZERO,
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
        lose_operands(execution, instruction)
    memory = MEMORY_HANDLERS.get(opcode)
    if memory is not None:
        memory(execution, instruction, guard)
        return
    handler = _HANDLERS.get(opcode)
    if handler is not None and len(instruction.operands) >= 2 and isinstance(instruction.operands[0], str):
        name = instruction.operands[0]
        value = handler(execution, instruction)
        if value is None:
            lose_operands(execution, instruction)
        elif isinstance(value, Poly):
            value = execution.atoms.limited(value, 64)
        execution.environment[name] = under_guard(execution, guard, value, execution.environment.get(name))
        return
    if handler is not None and opcode == "mov" and unpack(execution, instruction, guard):
        return
    if opcode == "setp" and isinstance(instruction.operands[0], Vector):
        setp_pair(execution, instruction, guard)
        return
    for name in destinations(instruction):
        execution.environment[name] = None
    if opcode not in NO_GLOBAL_MEMORY and any(isinstance(operand, Memory) for operand in instruction.operands):
        other_memory(execution, instruction, guard)


def _add(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.bits(1), o.bits(2)
    fused = _quotient_and_multiplicand(o, left, right) or _quotient_and_multiplicand(o, right, left)
    return fused or o.done(left + right)


def _quotient_and_multiplicand(o: Operands, quotient: Poly, other: Poly) -> Poly | None:
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
    o = Operands(execution, instruction)
    return o.done(o.bits(1) - o.bits(2)) if o.known else None


def _product(o: Operands, left: Poly, right: Poly) -> Poly:
    if len(left.terms) * len(right.terms) > 512:
        return o._execution.unknown(64, "too large an expression")
    return left * right


def _mul(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    if "wide" in instruction.modifiers:
        return o.atoms.limited(_product(o, o.integer(1), o.integer(2)), 2 * o.width)
    if "hi" in instruction.modifiers:
        return o.atoms.floordiv(_product(o, o.integer(1), o.integer(2)), const(1 << o.width))
    return o.done(_product(o, o.bits(1), o.bits(2)))


def _mad(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    product = _mul(execution, instruction)
    if not isinstance(product, Poly):
        return None
    width = 2 * o.width if "wide" in instruction.modifiers else o.width
    return o.atoms.limited(product + o.bits(3, width), width)


def _neg(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    return o.done(o.bits(1).scaled(-1)) if o.known else None


def _abs(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    value = o.integer(1, signed=True)
    return o.atoms.atom("max", value, value.scaled(-1))


def _not(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        return negate(condition_operand(execution, instruction.operands[1]))
    o = Operands(execution, instruction)
    return o.done(o.bits(1).scaled(-1) - const(1)) if o.known else None


def _modulo(o: Operands, value: Poly, power: int) -> Poly:
    """value mod 2**power; right for any value that has the right bits, whatever wraps above."""
    if power == 0:
        return ZERO
    return value - o.atoms.floordiv(value, const(1 << power)).scaled(1 << power)


def _and(execution: Execution, instruction: Instruction) -> Value:
    if "pred" in instruction.modifiers:
        return join_conditions("and", [condition_operand(execution, p) for p in instruction.operands[1:3]])
    o = Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.bits(1), o.bits(2)
    if left.constant is not None:
        left, right = right, left
    mask = right.constant
    if mask is None:
        return o.atoms.atom("and", o.atoms.ext(left, o.width, False), o.atoms.ext(right, o.width, False))
    mask %= 1 << o.width
    select = constants_of_select(left)
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
    o = Operands(execution, instruction)
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
    return o.atoms.bitwise(kind, left, right)


def _shl(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    amount = o.unsigned32(2)
    number = amount.constant
    if number is not None:
        return o.done(o.bits(1).scaled(1 << number)) if number < o.width else ZERO
    return o.done(o.bits(1) * o.atoms.atom("pow2", amount, o.width))


def _shr(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    amount = o.unsigned32(2)
    number = amount.constant
    divisor = o.atoms.atom("pow2", amount, 0) if number is None else const(1 << min(number, o.width))
    return o.atoms.floordiv(o.integer(1), divisor)


def _div(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    divide = o.atoms.truncdiv if o.signed else o.atoms.floordiv
    return divide(o.integer(1), o.integer(2))


def _rem(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.integer(1), o.integer(2)
    quotient = (o.atoms.truncdiv if o.signed else o.atoms.floordiv)(left, right)
    return o.done(left - quotient * right)


def _min_max(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
    if not o.known:
        return None
    left, right = o.integer(1), o.integer(2)
    a, b = left.constant, right.constant
    if a is not None and b is not None:
        return const(min(a, b) if instruction.opcode == "min" else max(a, b))
    return left if left == right else o.atoms.atom(instruction.opcode, left, right)


def _bfe(execution: Execution, instruction: Instruction) -> Value:
    o = Operands(execution, instruction)
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
    o = Operands(execution, instruction)
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


_HANDLERS: dict[str, Handler] = {
    "abs": _abs, "add": _add, "and": _and, "bfe": _bfe, "bfi": _bfi, "bfind": _count_bits, "clz": _count_bits,
    "cvt": cvt, "cvta": cvta, "div": _div, "mad": _mad, "max": _min_max, "min": _min_max, "mov": mov, "mul": _mul,
    "neg": _neg, "not": _not, "or": _or, "popc": _count_bits, "rem": _rem, "selp": selp, "setp": setp, "shl": _shl,
    "shr": _shr, "sub": _sub, "xor": _xor,
}  # fmt: skip
