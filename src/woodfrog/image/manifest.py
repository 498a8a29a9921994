"""What an image's manifest says, as typed values (docs/format.md describes each field).

Sizes are bytes, times seconds. These are plain data: this module reads no file, and must never accept a value that the
format forbids: the caps are part of the types, `validate.py` checks the fields against each other.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from enum import IntFlag
from typing import Annotated, Literal, NamedTuple

import msgspec

FORMAT_VERSION = 1
DIGEST_BYTES = 32  # BLAKE3's default length
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 64 << 20
DEFAULT_CHUNK_BYTES = 1 << 20

# Caps of single fields: far above anything real, far below what would hurt a reader.
MAX_DEVICES = 64
MAX_HANDLES = 1 << 22
MAX_ALLOCATIONS = 1 << 25
MAX_PROCESSES = 1 << 16
MAX_FILES = 1 << 18

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Short = Annotated[str, msgspec.Meta(max_length=256)]
Argument = Annotated[str, msgspec.Meta(max_length=1 << 17)]  # the kernel's MAX_ARG_STRLEN
Count = Annotated[int, msgspec.Meta(ge=0)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]  # the kernel's PID_MAX_LIMIT on 64 bit
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_HANDLES)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Feature(IntFlag):
    """Mandatory feature flags: a reader that does not know one refuses the image."""

    GPU_DATA = 1
    CPU_STATE = 2
    DRIVER_ONLY = 4


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    cuda_version: Count  # 13000 is 13.0, as cuDriverGetVersion says
    release: Short = ""
    simulated: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    ordinal: Index
    uuid: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    name: Short
    total_bytes: Size
    compute_major: Index
    compute_minor: Index


class Host(msgspec.Struct, frozen=True, kw_only=True):
    hostname: Short
    kernel: Short
    architecture: Short
    boot_id: Short = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    pid: Pid
    parent_pid: Index = 0
    start_ticks: Count = 0
    threads: Index = 1
    executable: Text = ""
    command_line: Annotated[list[Argument], msgspec.Meta(max_length=1 << 16)] = []


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    uid: Count
    gid: Count
    working_directory: Text = ""
    log_path: Text = ""
    log_bytes: Size = 0
    session_id: Index = 0


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern="^gpu-[0-9]{1,4}[.]data$")]
    device: Index
    size_bytes: Size
    digests: bytes


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One physical allocation: `size` bytes at `offset` of data file number `file`."""

    id: Count
    device: Index
    size: Size
    kind: Index
    file: Index
    offset: Size


class Allocation(NamedTuple):
    """One allocation as the application sees it: [address, address+size) lies at `offset` in `handle`."""

    address: int
    size: int
    handle: int
    offset: int
    device: int
    kind: int


class Allocations(msgspec.Struct, frozen=True):
    """Allocations as columns of little-endian integers, because there can be millions of them."""

    address: bytes = b""
    size: bytes = b""
    handle: bytes = b""
    offset: bytes = b""
    device: bytes = b""
    kind: bytes = b""

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, int, int, int, int]]) -> Allocations:
        """Rows in Allocation's order; OverflowError for a value that does not fit its column."""
        columns = [array(code) for code in _COLUMN_CODES]
        for row in rows:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        return cls(*(_little_endian(column).tobytes() for column in columns))

    def columns(self) -> list[array[int]]:
        """The columns as arrays; ValueError when their lengths disagree."""
        result = []
        for code, packed in zip(_COLUMN_CODES, self._packed(), strict=True):
            column = array(code)
            column.frombytes(packed)
            result.append(_little_endian(column))
        if len({len(column) for column in result}) != 1:
            raise ValueError("columns of different lengths")
        return result

    def rows(self) -> Iterator[Allocation]:
        return map(Allocation._make, zip(*self.columns(), strict=True))

    def __len__(self) -> int:
        return len(self.address) // 8

    def _packed(self) -> tuple[bytes, ...]:
        return (self.address, self.size, self.handle, self.offset, self.device, self.kind)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file under cpu/, with the digests of its chunks."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    size_bytes: Size
    digests: bytes


class CpuState(msgspec.Struct, frozen=True, kw_only=True):
    tool: Short = "criu"
    version: Short
    options: Annotated[list[Text], msgspec.Meta(max_length=256)] = []
    root_pid: Pid
    # Filled by the writer's commit, which hashes the files.
    files: Annotated[list[FileRecord], msgspec.Meta(max_length=MAX_FILES)] = []


class Phase(msgspec.Struct, frozen=True, array_like=True):
    name: Short
    seconds: Seconds


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one image. Built by the operation; `name`, `number` and `cpu.files` are set by the writer."""

    kind: Literal["managed", "driver-only"]
    name: Short = ""
    number: Index = 0
    created_unix_s: Seconds
    woodfrog_version: Short
    operation: Count = 0
    target_name: Short = ""
    gpu_pid: Pid
    leave_running: bool
    parent: Short | None = None
    driver: Driver
    devices: Annotated[list[Device], msgspec.Meta(max_length=MAX_DEVICES)]
    host: Host
    processes: Annotated[list[Process], msgspec.Meta(max_length=MAX_PROCESSES)]
    environment: Environment
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)] = DEFAULT_CHUNK_BYTES
    data_files: Annotated[list[DataFile], msgspec.Meta(max_length=MAX_DEVICES)] = []
    handles: Annotated[list[Handle], msgspec.Meta(max_length=MAX_HANDLES)] = []
    allocations: Allocations = Allocations()
    cpu: CpuState | None = None
    phases: Annotated[list[Phase], msgspec.Meta(max_length=256)] = []
    stall_s: Seconds = 0.0
    notes: Annotated[dict[Short, Text], msgspec.Meta(max_length=256)] = {}

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.number}"

    @property
    def features(self) -> Feature:
        """The mandatory flags that these fields call for."""
        flags = Feature(0)
        if self.data_files:
            flags |= Feature.GPU_DATA
        if self.cpu is not None:
            flags |= Feature.CPU_STATE
        if self.kind == "driver-only":
            flags |= Feature.DRIVER_ONLY
        return flags

    @property
    def gpu_bytes(self) -> int:
        return sum(file.size_bytes for file in self.data_files)

    @property
    def cpu_bytes(self) -> int:
        return sum(file.size_bytes for file in self.cpu.files) if self.cpu else 0


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


_COLUMN_CODES = ("Q", "Q", "Q", "Q", "I", "I")


def _little_endian(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column.byteswap()
    return column
