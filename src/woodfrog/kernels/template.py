"""What a kernel will touch, as expressions of its launch: the product of the analysis. Values only; see evaluate.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from woodfrog.kernels import limits
from woodfrog.kernels.values import Condition, Poly


class Exactness(IntEnum):
    """How close a named range is to the bytes that are touched; never is a touched byte outside all ranges."""

    EXACT = 0  # these bytes and no others
    BOUNDED = 1  # between bounds that follow from the launch
    WHOLE = 2  # the whole allocation that the access's base points into
    EVERYTHING = 3  # all memory: the address itself comes out of memory, or is not understood


class Kind(IntEnum):
    """What an access does. Atomics and reductions load and store."""

    LOAD = 0
    STORE = 1
    ATOMIC = 2

    @property
    def loads(self) -> bool:
        return self is not Kind.STORE

    @property
    def stores(self) -> bool:
        return self is not Kind.LOAD


class Range(NamedTuple):
    """Bytes [address, address + size_bytes)."""

    address: int
    size_bytes: int
    exactness: Exactness


@dataclass(frozen=True)
class LoopFact:
    """What holds whenever a loop's counter has a value: it is 0, or `again` held in the iteration before.

    `again` is written for the counter's present value. `complete`: nothing else decides whether the loop goes on.
    """

    loop: int
    again: tuple[Condition, ...]
    complete: bool


Step = Condition | LoopFact
Reader = Callable[[int, int], bytes | None]  # address, size in bytes


@dataclass(frozen=True)
class Access:
    """A load, store or atomic of a kernel, or an asynchronous copy's side in global memory.

    It happens only where all `steps` hold. `address` None: anywhere. `reason` says what kept it from being exact.
    """

    kind: Kind
    address: Poly | None
    size: Poly | None
    steps: tuple[Step, ...]
    steps_complete: bool  # it happens wherever all steps hold
    position: int  # of the instruction in the PTX text
    line: int  # of the PTX text, from 1
    source: tuple[int, int]  # file number of the PTX module and line, (0, 0) when not known
    reason: str = ""
    # Accesses that this one stands for, see combine.py: evaluated each by itself where it is not exact itself.
    parts: tuple[Access, ...] = ()


@dataclass(frozen=True)
class ParameterLayout:
    name: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Template:
    """All that a kernel can touch in global and constant memory."""

    kernel: str
    parameters: tuple[ParameterLayout, ...]
    accesses: tuple[Access, ...]
    fallback: str = ""  # why the kernel could not be analysed; it then has one access to everything
    loops: tuple[LoopFact, ...] = ()  # in the order of their numbers
    # For each way into a block where ways join (block, block it comes from): what holds there beyond what holds at the
    # last block before that all ways share, and whether that is all that decides.
    gates: Mapping[tuple[int, int], tuple[tuple[Step, ...], bool]] = field(default_factory=dict)
    symbols: tuple[str, ...] = ()  # module variables whose addresses the evaluation needs
    files: Mapping[int, str] = field(default_factory=dict)
    block: tuple[int, int, int] | None = None  # the dimensions that blocks must have; None: any

    @cached_property
    def combined(self) -> tuple[Access, ...]:
        """The accesses with neighbours joined: what is evaluated."""
        from woodfrog.kernels.combine import combined

        return combined(self.accesses)

    @property
    def ranges_each(self) -> int:
        """How many ranges each access is split into at most: fewer where there are many accesses."""
        return max(limits.BOUNDED_RANGES, limits.RANGES // max(len(self.combined), 1))

    @property
    def parameters_bytes(self) -> int:
        return max((p.offset_bytes + p.size_bytes for p in self.parameters), default=0)

    def ranges(self, launch: Launch, *, kinds: Sequence[Kind] = tuple(Kind)) -> list[Range]:
        """The ranges that a launch touches by accesses of these kinds, sorted; a superset of the truth.

        Raises UsageError when the launch does not fit the kernel's parameters.
        """
        from woodfrog.kernels.evaluate import evaluate

        return evaluate(self, launch, kinds)


@dataclass(frozen=True)
class Launch:
    """A launch as the driver gets it. `parameters` is the parameter block, laid out as Template.parameters says.

    `allocations` are (address, size_bytes) of all device memory there is, module variables included: what an access
    that cannot be bounded is widened to. Without them such an access is the whole address space.
    `symbols` are the addresses and sizes of module variables.
    `contents` gives bytes of memory as they are when the kernel begins to run (None: not readable), which nobody but
    the kernel may change while it runs. With it, ranges that depend on loaded indices and pointers have bounds.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    allocations: Sequence[tuple[int, int]] = ()
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    contents: Reader | None = None
