"""What the reader finds: pieces of GPU code, their kernels and the kernels' parameters. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it lies in the parameter block of a launch."""

    index: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class KernelInfo:
    """A kernel as its file describes it. `parameters` is None where the file does not say."""

    name: str
    parameters: tuple[Parameter, ...] | None


@dataclass(frozen=True)
class CodeObject:
    """One cubin or PTX text. `data` is unpacked, and belongs to this object."""

    kind: str  # "ptx" or "cubin"
    architecture: str  # "sm_90", or "unknown"
    compression: str  # "none", "lz4" or "zstd"
    stored_bytes: int  # in the file, compressed or not
    data: bytes = field(repr=False)
    origin: str  # where in the file, e.g. "libx.a(y.o), container 3, entry 1"
