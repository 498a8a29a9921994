"""Operands of instructions as symbolic values."""

from __future__ import annotations

from woodfrog.kernels.execution import Execution
from woodfrog.kernels.opcodes import integer_type
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Operand, Vector
from woodfrog.kernels.values import FALSE, SPECIAL_BOUNDS, TRUE, UNKNOWN, Condition, Poly, const, negate

# Special registers with bounds that hold in any launch (PTX ISA 9.0, "Special Registers").
_BOUNDED = {"%laneid": 31, "%warpid": 63, "%nwarpid": 64, "%smid": 1023, "%nsmid": 1024}


def lose_operands(execution: Execution, instruction: Instruction) -> None:
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
        return execution.atoms.special(name[1:])
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


class Operands:
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
