"""The syntax tree of a PTX module. Plain values; made by the parser only.

Operands are small tuples and names, because modules hold hundreds of thousands of them:
a register, label or symbol is a `str`; an integer an `int`; a float constant a `Float`; `{a, b}` a `Vector`;
`[base+offset]` a `Memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Float(NamedTuple):
    """A floating-point constant as written."""

    text: str


class Vector(NamedTuple):
    """`{a, b, c}`."""

    elements: tuple[Operand, ...]


class Memory(NamedTuple):
    """`[base+offset]`, and for tensor copies the coordinates that follow the base. base "" is an absolute address."""

    base: str
    offset: int
    rest: tuple[Operand, ...] = ()


Operand = str | int | Float | Vector | Memory


@dataclass(slots=True)
class Instruction:
    """One instruction. `opcode` is the first word, `modifiers` the rest without dots."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    position: int  # of the opcode in the text, in characters
    predicate: str = ""  # register of the guard, "" for none
    negated: bool = False

    @property
    def name(self) -> str:
        """The opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(slots=True)
class Label:
    """A branch target."""

    name: str
    position: int


@dataclass(slots=True)
class Targets:
    """`NAME: .branchtargets a, b;` (an empty tuple for other labelled directives)."""

    name: str
    labels: tuple[str, ...]


@dataclass(slots=True)
class SourceLine:
    """`.loc file line column`: the source of what follows."""

    file: int
    line: int


Statement = Instruction | Label | Targets | SourceLine


@dataclass(slots=True)
class ParameterDeclaration:
    """A parameter of a function. `offset_bytes` counts in the parameter block of a kernel."""

    name: str
    offset_bytes: int
    size_bytes: int
    alignment_bytes: int
    is_pointer: bool  # declared with .ptr


@dataclass(slots=True)
class Variable:
    """A variable of the module or of a function. size_bytes 0: an unsized extern array."""

    name: str
    space: str  # "global", "const", "shared", "local" or "param"
    size_bytes: int
    alignment_bytes: int
    is_extern: bool
    initial: tuple[object, ...] | None = None


@dataclass(slots=True)
class Function:
    """An .entry or a .func. `registers` gives each register's declared type."""

    name: str
    is_kernel: bool
    parameters: list[ParameterDeclaration]
    results: list[ParameterDeclaration]
    position: int
    body: list[Statement] | None = None  # None: a declaration
    registers: dict[str, str] = field(default_factory=dict)
    register_ranges: dict[str, str] = field(default_factory=dict)  # "%r" of %r<10> → its type
    variables: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "reqntid": (128, 1, 1), …


@dataclass(slots=True)
class Module:
    """A parsed PTX text."""

    version: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str]
    text: str = field(repr=False)

    @property
    def kernels(self) -> list[Function]:
        return [function for function in self.functions.values() if function.is_kernel]

    def line_of(self, position: int) -> int:
        """The line of the text, counted from 1, that a position lies in."""
        return self.text.count("\n", 0, position) + 1
