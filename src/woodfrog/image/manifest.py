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
MIN_CHUNK_BYTES = 16 << 10  # as in the store's configuration: the chunks are the store's
MAX_CHUNK_BYTES = 64 << 20

# Caps of single fields: far above anything real, far below what would hurt a reader.
MAX_DEVICES = 64
MAX_HANDLES = 1 << 22
MAX_ALLOCATIONS = 1 << 25
MAX_PROCESSES = 1 << 16
MAX_FILES = 1 << 18

# Handles of the target's GPU process number k have k in the bits from here on. Agents count theirs from one: 2^40 of
# them are never reached.
MEMBER_SHIFT = 40

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
    OWN_CUTS = 8
    SHARED_MEMORY = 16
    HOST_MEMORY = 32
    SEVERAL_PROCESSES = 64
    MAPPED_FILES = 128
    LENT_MEMORY = 256


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One of several processes that use the GPU: `devices` are those of its own device ordinals that differ from the
    image's, with the ordinals that the image has for them."""

    pid: Pid
    devices: Annotated[dict[Index, Index], msgspec.Meta(max_length=MAX_DEVICES)] = {}


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


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One physical allocation of `size` bytes. Handles are grouped by device: `device` never falls."""

    id: Count
    device: Index  # into `devices`
    size: Size
    kind: Index
    host_node: Annotated[int, msgspec.Meta(ge=-1, le=1 << 16)] = -1  # the NUMA node of host memory; -1: the device's


class SharedHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A handle of `size` bytes that is memory of another one, from its beginning: it has no chunks of its own."""

    id: Count
    of: Count  # the id of the one in `handles`
    size: Size
    device: Index  # into `devices`, as the handle's process knows it
    kind: Index


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
    """One of CRIU's files, with the digests of its chunks. `sizes`: of these (packed u32), where they are not cut at
    multiples of the image's chunk size. `pid`: whose memory it holds, 0 if it is none or not one process's.
    `mapped_as`: it is none of CRIU's own files but memory that process `pid` maps, and CRIU's name for that.
    `lent_from`: it is GPU memory of process `pid` that its driver lent (custom storage), and the UUID of that GPU."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    size_bytes: Size
    digests: bytes
    sizes: bytes = b""
    pid: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 0
    mapped_as: Annotated[str, msgspec.Meta(pattern=r"^(file\[[0-9a-f]{1,8}:[0-9a-f]{1,16}\])?\Z")] = ""
    lent_from: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""


class CpuState(msgspec.Struct, frozen=True, kw_only=True):
    tool: Short = "criu"
    version: Short
    options: Annotated[list[Text], msgspec.Meta(max_length=256)] = []
    root_pid: Pid
    # Filled by the writer, which hashes the files.
    files: Annotated[list[FileRecord], msgspec.Meta(max_length=MAX_FILES)] = []


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kind of data, in bytes. raw = zero + known + new; `stored`: what `new` took in the packs."""

    raw: Count = 0
    zero: Count = 0  # full chunks of zeros: neither transferred nor stored
    known: Count = 0  # in the store already, from whatever image
    new: Count = 0
    stored: Count = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """For people and for the estimate of the next checkpoint; a restore never needs them."""

    gpu: Amounts = Amounts()
    cpu: Amounts = Amounts()


class Phase(msgspec.Struct, frozen=True, array_like=True):
    name: Short
    seconds: Seconds


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one image. Built by the operation; `name`, `number`, `cpu.files` and `stats` are the writer's to
    set. `parent` is the image of the same target before this one: information, never needed to read this one."""

    kind: Literal["managed", "driver-only"]
    name: Short = ""
    number: Index = 0
    created_unix_s: Seconds
    woodfrog_version: Short
    operation: Count = 0
    target_name: Short = ""
    gpu_pid: Pid
    # Where several processes use the GPU all of them, `gpu_pid` first; a handle's id says whose it is (`member_of`).
    gpu_processes: Annotated[list[GpuProcess], msgspec.Meta(max_length=MAX_PROCESSES)] = []
    leave_running: bool
    parent: Short | None = None
    driver: Driver
    devices: Annotated[list[Device], msgspec.Meta(max_length=MAX_DEVICES)]
    host: Host
    processes: Annotated[list[Process], msgspec.Meta(max_length=MAX_PROCESSES)]
    environment: Environment
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    handles: Annotated[list[Handle], msgspec.Meta(max_length=MAX_HANDLES)] = []
    digests: bytes = b""  # of all handles' chunks, handle after handle
    shared: Annotated[list[SharedHandle], msgspec.Meta(max_length=MAX_HANDLES)] = []
    allocations: Allocations = Allocations()
    cpu: CpuState | None = None
    stats: Stats = Stats()
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
        if self.handles:
            flags |= Feature.GPU_DATA
        if self.cpu is not None:
            flags |= Feature.CPU_STATE
        if self.kind == "driver-only":
            flags |= Feature.DRIVER_ONLY
        if self.cpu is not None and any(file.sizes for file in self.cpu.files):
            flags |= Feature.OWN_CUTS
        if self.lent_files:
            flags |= Feature.LENT_MEMORY
        if self.mapped_files:
            flags |= Feature.MAPPED_FILES
        if self.shared:
            flags |= Feature.SHARED_MEMORY
        if self.gpu_processes:
            flags |= Feature.SEVERAL_PROCESSES
        if any(handle.host_node >= 0 for handle in self.handles):
            flags |= Feature.HOST_MEMORY
        return flags

    @property
    def gpu_bytes(self) -> int:
        return sum(handle.size for handle in self.handles)

    @property
    def cpu_bytes(self) -> int:
        return sum(file.size_bytes for file in self.cpu.files) if self.cpu else 0

    @property
    def mapped_files(self) -> list[FileRecord]:
        """Those of `cpu.files` that are mapped as they are instead of being read by CRIU."""
        return [file for file in self.cpu.files if file.mapped_as] if self.cpu else []

    @property
    def lent_files(self) -> list[FileRecord]:
        """Those of `cpu.files` that are GPU memory which the driver lent."""
        return [file for file in self.cpu.files if file.lent_from] if self.cpu else []

    @property
    def cpu_digests(self) -> bytes:
        """Of the chunks of all of CRIU's files, file after file."""
        return b"".join(file.digests for file in self.cpu.files) if self.cpu else b""

    def all_digests(self) -> bytes:
        """Of every chunk that the image needs: the handles', then CRIU's files'. Repeats and zeros included."""
        return self.digests + self.cpu_digests


def member_of(handle: int) -> int:
    """Which of the target's GPU processes has the handle of this id."""
    return handle >> MEMBER_SHIFT


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


_COLUMN_CODES = ("Q", "Q", "Q", "Q", "I", "I")


def _little_endian(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column.byteswap()
    return column
