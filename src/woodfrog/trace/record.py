"""What a trace holds: plain values, of which text, page and JSON are made. Times are seconds from its begin."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from woodfrog.driver.calls import Kind
from woodfrog.driver.entering import Copies


@dataclass(frozen=True)
class Step:
    """One of the driver's steps (lock, checkpoint, restore, unlock), or a state that was seen while only watching."""

    name: str
    begun_s: float
    took_s: float
    state: str  # of the process, by the driver, afterwards
    error: str = ""


@dataclass(frozen=True)
class Sample:
    """Memory of the process at one moment, in bytes; `gpu_bytes` as NVML tells, None where it does not."""

    time_s: float
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    gpu_bytes: int | None


@dataclass(frozen=True)
class DriverFile:
    """A file of the driver that the process has open or mapped: how often, and how much of it is mapped."""

    path: str
    descriptors: int
    mappings: int
    mapped_bytes: int


@dataclass(frozen=True)
class Holdings:
    """What of the driver the process has after a step. `listed`: whether NVML lists it as a user of a GPU; None where
    there is no NVML."""

    after: str
    files: list[DriverFile]
    listed: bool | None = None


@dataclass(frozen=True)
class SavedState:
    """The mapping that holds the saved GPU state. `contents`: shares of 0 to 1 by kind, of `sampled` blocks."""

    address: int
    size_bytes: int
    resident_bytes: int
    huge_bytes: int
    sampled: int
    contents: dict[str, float]
    filled_bytes_per_s: float  # over the whole checkpoint
    copied_bytes_per_s: float  # over the checkpoint without the mapping's populating; 0: not known


@dataclass(frozen=True)
class LongCall:
    """A system call worth a place in the timeline."""

    step: str
    begun_s: float
    took_s: float
    thread: int
    kind: str


@dataclass
class Trace:
    """A whole trace. `unseen`: sentences for people."""

    pid: int
    command: str
    started_by_us: bool
    gpus: list[str] = field(default_factory=list)
    driver: str = ""
    entered: bool = False  # whether the driver was helped (driver/entering.py)
    copies: list[Copies] = field(default_factory=list)  # that threads in the process helped with
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    holdings: list[Holdings] = field(default_factory=list)
    saved: SavedState | None = None
    calls: dict[str, list[Kind]] = field(default_factory=dict)  # of each step
    long_calls: list[LongCall] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)  # that were traced, with their names
    stops: int = 0
    stopped_s: float = 0.0
    unseen: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def step(self, name: str) -> Step | None:
        """The first step of a name."""
        return next((step for step in self.steps if step.name == name), None)
