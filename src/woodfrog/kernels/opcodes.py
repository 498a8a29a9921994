"""Which operands an instruction writes and which memory it may touch, for every opcode that is known.

An opcode that is not listed is assumed to write all its registers, and to touch all memory if it has an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from woodfrog.kernels.ptx.parser import type_bytes
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Operand, Vector

# Opcodes of the PTX ISA 9.0 whose first operand, a register or a vector, is all that they write.
WRITES_FIRST = frozenset(
    [
        "abs",
        "activemask",
        "add",
        "addc",
        "and",
        "atom",
        "bfe",
        "bfi",
        "bfind",
        "bmsk",
        "brev",
        "clz",
        "cnot",
        "copysign",
        "cos",
        "cvt",
        "cvta",
        "div",
        "dp2a",
        "dp4a",
        "elect",
        "ex2",
        "fma",
        "fns",
        "getctarank",
        "isspacep",
        "istypep",
        "ld",
        "ldmatrix",
        "ldu",
        "lg2",
        "lop3",
        "mad",
        "mad24",
        "madc",
        "mapa",
        "match",
        "max",
        "min",
        "mma",
        "mov",
        "mul",
        "mul24",
        "neg",
        "not",
        "or",
        "popc",
        "prmt",
        "rcp",
        "redux",
        "rem",
        "rsqrt",
        "sad",
        "selp",
        "set",
        "setp",
        "shf",
        "shfl",
        "shl",
        "shr",
        "sin",
        "slct",
        "sqrt",
        "sub",
        "subc",
        "szext",
        "tanh",
        "testp",
        "tex",
        "tld4",
        "txq",
        "suld",
        "suq",
        "vote",
        "wmma",
        "wgmma",
        "xor",
        "createpolicy",
        "clusterlaunchcontrol",
        "movmatrix",
        "mbarrier",
        "tcgen05",
        "multimem",
        "alloca",
        "stacksave",
    ]
)
# Opcodes that write no register.
WRITES_NOTHING = frozenset(
    [
        "applypriority",
        "bra",
        "brkpt",
        "brx",
        "call",
        "discard",
        "exit",
        "fence",
        "membar",
        "nanosleep",
        "pmevent",
        "prefetch",
        "prefetchu",
        "red",
        "ret",
        "st",
        "stmatrix",
        "sured",
        "sust",
        "trap",
        "griddepcontrol",
        "setmaxnreg",
        "tensormap",
        "cp",
    ]
)
# Opcodes that touch no memory but shared memory, tensor memory and caches, whatever their operands look like.
NO_GLOBAL_MEMORY = frozenset(
    [
        "bar",
        "barrier",
        "fence",
        "membar",
        "mbarrier",
        "nanosleep",
        "griddepcontrol",
        "setmaxnreg",
        "prefetch",
        "prefetchu",
        "applypriority",
        "createpolicy",
        "wgmma",
        "ldmatrix",
        "stmatrix",
        "tcgen05",
        "clusterlaunchcontrol",
        "mapa",
        "getctarank",
        "isspacep",
        "cvta",
        "mma",
        "movmatrix",
        "elect",
        "pmevent",
        "brkpt",
        "redux",
    ]
)
SHARED_SPACES = frozenset(("shared", "shared::cta", "shared::cluster"))
# Functions of the device runtime that the driver provides; none writes memory that a program can name.
HARMLESS_CALLS = frozenset(("vprintf", "malloc", "free", "__assertfail"))


def registers(operand: Operand) -> Iterator[str]:
    """The names in an operand, addresses included."""
    if isinstance(operand, str):
        yield operand
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from registers(element)
    elif isinstance(operand, Memory):
        if operand.base:
            yield operand.base.lstrip("!&")
        for element in operand.rest:
            yield from registers(element)


def destinations(instruction: Instruction) -> Iterable[str]:
    """The registers that an instruction writes, or may write."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "bar" or opcode == "barrier":
        opcode = "and" if "red" in instruction.modifiers else "ret"
    if opcode in WRITES_NOTHING or not operands:
        return ()
    if opcode in WRITES_FIRST:
        first = operands[0]
        return registers(first) if isinstance(first, (str, Vector)) else ()
    return (name for operand in operands if not isinstance(operand, Memory) for name in registers(operand))


def integer_type(modifiers: Iterable[str]) -> tuple[int, bool] | None:
    """Width and signedness of the last type among the modifiers; None when that is no plain integer or bit type."""
    for modifier in reversed(tuple(modifiers)):
        kind, digits = modifier[:1], modifier[1:]
        if kind in "usb" and digits in ("8", "16", "32", "64"):
            return int(digits), kind == "s"
        if type_bytes(modifier) is not None or "x" in digits:
            return None
    return None


def access_bytes(modifiers: Iterable[str]) -> tuple[int, int, bool] | None:
    """(bytes of an element, elements, whether it is signed) of a load, store or atomic."""
    elements, size, signed = 1, None, False
    for modifier in modifiers:
        if modifier in ("v2", "v4", "v8"):
            elements = int(modifier[1:])
        elif modifier.endswith("x2") and modifier[:-2] in ("f16", "bf16", "u16", "s16", "b16"):
            size = 4
        elif (found := type_bytes(modifier)) is not None:
            size, signed = found, modifier[0] == "s"
    return None if size is None else (size, elements, signed)
