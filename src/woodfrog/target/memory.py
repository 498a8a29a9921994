"""A target's GPU memory as values: what a survey counts, and what an export brings.

Built only from messages that wire.unpack accepted, and checked once more here for what the messages claim about each
other. Owns descriptors, never memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from woodfrog.target import wire
from woodfrog.target.descriptors import SCM_MAX_FD, Descriptors

# Caps on what one target may claim. 2^20 handles of 2 MiB are 2 TiB, more than any machine's GPUs hold.
MAX_HANDLES = 1 << 20
MAX_MAPPINGS = 1 << 23
MAX_SIZE_BYTES = 1 << 47
_MAX_DEVICES = 256


@dataclass(frozen=True)
class DeviceUse:
    """What the interposer owns on one GPU of the target. `ordinal` is the target's own numbering."""

    ordinal: int
    uuid: bytes  # 16 bytes
    owned_bytes: int
    owned_count: int
    largest_bytes: int


@dataclass(frozen=True)
class Survey:
    """The interposer's count of the target's GPU memory."""

    owned_bytes: int
    owned_count: int
    allocation_count: int
    driver_owned_bytes: int
    host_bytes: int
    launches: int
    contexts: int
    obstacles: tuple[str, ...]
    devices: tuple[DeviceUse, ...]


@dataclass(frozen=True)
class Handle:
    """One physical allocation of the target; `kind` is one of wire.h's kinds by name."""

    handle: int
    size_bytes: int
    device: int
    kind: str


@dataclass(frozen=True)
class Mapping:
    """One allocation as the application sees it: `size_bytes` at `address`, `offset_bytes` into `handle`."""

    address: int
    size_bytes: int
    handle: int
    offset_bytes: int
    device: int
    kind: str


@dataclass(frozen=True)
class Shared:
    """A handle whose memory other processes may have: exported by the application `exports` times, or `imported`, from
    process `exporter` (0: not known). `kept_fd`: the interposer's own descriptor of it in the target. Host memory is
    told of here too, shared or not: `host_node` is its NUMA node, -1 for memory of a device. `by_ipc`: exported by
    cuIpcGetMemHandle, which only processes with the interposer can open."""

    handle: int
    exports: int
    imported: bool
    exporter: int
    kept_fd: int
    host_node: int
    by_ipc: bool


@dataclass
class Exported:
    """What `export_memory` brought: `fds[k]` is the memory of `handles[k]`. Close it, or take the descriptors.

    A target waits while this is read, so mappings, of which there are most, stay as they came until they are asked for.
    """

    handles: list[Handle] = field(default_factory=list)
    mapping_entries: list[Sequence[wire.Values]] = field(default_factory=list)  # by packet, as they came
    shared: list[Shared] = field(default_factory=list)
    fds: Descriptors = field(default_factory=Descriptors)

    @property
    def size_bytes(self) -> int:
        return sum(handle.size_bytes for handle in self.handles)

    def add(self, message: wire.Message) -> None:
        """Take an export or mapping batch over, its descriptors included, or raise WireError and take nothing."""
        if message.type == "export_batch":
            handles = [handle_of(entry) for entry in message.entries]
            if len(handles) != len(message.fds):
                raise wire.WireError(f"{len(handles)} handles came with {len(message.fds)} descriptors")
            if len(self.handles) + len(handles) > MAX_HANDLES:
                raise wire.WireError(f"it exports more than {MAX_HANDLES} handles")
            self.handles += handles
            self.fds.extend(message.fds)
        elif message.type == "mapping_batch":
            if message.fds:
                raise wire.WireError("mappings came with descriptors")
            if sum(map(len, self.mapping_entries)) + len(message.entries) > MAX_MAPPINGS:
                raise wire.WireError(f"it reports more than {MAX_MAPPINGS} allocations")
            self.mapping_entries.append(message.entries)
        elif message.type == "shared_batch":
            if message.fds:
                raise wire.WireError("what is shared came with descriptors")
            if len(self.shared) + len(message.entries) > MAX_HANDLES:
                raise wire.WireError(f"it shares more than {MAX_HANDLES} handles")
            self.shared += [_shared(entry) for entry in message.entries]
        else:
            raise wire.WireError(f"a {message.type} came in answer to export_memory")

    def check(self) -> None:
        """WireError unless handles are distinct, and what is shared is one of them."""
        known = {handle.handle for handle in self.handles}
        if len(known) != len(self.handles):
            raise wire.WireError("it exports a handle twice")
        for shared in self.shared:
            if shared.handle not in known:
                raise wire.WireError(f"it shares handle {shared.handle}, which was not exported")

    @cached_property
    def mappings(self) -> list[Mapping]:
        """All of them, each inside one of the handles; WireError."""
        sizes = {handle.handle: handle for handle in self.handles}
        found = [_mapping(entry) for entries in self.mapping_entries for entry in entries]
        for mapping in found:
            owner = sizes.get(mapping.handle)
            if owner is None:
                raise wire.WireError(f"the allocation at {mapping.address:#x} lies in a handle that was not exported")
            if mapping.offset_bytes + mapping.size_bytes > owner.size_bytes:
                raise wire.WireError(f"the allocation at {mapping.address:#x} reaches past its handle")
            if mapping.device != owner.device:
                raise wire.WireError(f"the allocation at {mapping.address:#x} lies on another device than its handle")
        return found

    def close(self) -> None:
        self.fds.close()

    def __enter__(self) -> Exported:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def survey_of(message: wire.Message) -> Survey:
    """The survey in a survey_result."""
    body = message.body
    return Survey(
        owned_bytes=body["owned_bytes"],
        owned_count=body["owned_count"],
        allocation_count=body["allocation_count"],
        driver_owned_bytes=body["driver_owned_bytes"],
        host_bytes=body["host_bytes"],
        launches=body["launches"],
        contexts=body["contexts"],
        obstacles=tuple(name for name, bit in wire.tables().obstacles.items() if body["obstacles"] & bit),
        devices=tuple(
            DeviceUse(
                ordinal=entry["ordinal"],
                uuid=entry["uuid"],
                owned_bytes=entry["owned_bytes"],
                owned_count=entry["owned_count"],
                largest_bytes=entry["largest_bytes"],
            )
            for entry in message.entries
        ),
    )


def handle_of(entry: wire.Values) -> Handle:
    """A `handle` entry, checked; WireError."""
    return Handle(entry["handle"], _size(entry["size"]), _device(entry["device"]), _kind(entry["kind"]))


def handle_batches(name: str, handles: Sequence[Handle], fds: Sequence[int]) -> list[wire.Message]:
    """`handles` with their descriptors in packets of as many as fit; at least one, which may be empty."""
    if len(handles) != len(fds):
        raise ValueError(f"{len(handles)} handles and {len(fds)} descriptors")
    numbers = {name: number for number, name in wire.tables().kinds.items()}
    layout = wire.tables().by_name[name].entry
    assert layout.names == ("handle", "size", "device", "kind")
    step = min(wire.tables().max_entries, SCM_MAX_FD)
    starts = range(0, len(handles), step) or range(1)
    return [
        wire.Message(
            name,
            0,
            last=start == starts[-1],
            entries=layout.pack_rows(
                (one.handle, one.size_bytes, one.device, numbers[one.kind]) for one in handles[start : start + step]
            ),
            fds=list(fds[start : start + step]),
        )
        for start in starts
    ]


def _mapping(entry: wire.Values) -> Mapping:
    return Mapping(
        address=entry["address"],
        size_bytes=_size(entry["size"]),
        handle=entry["handle"],
        offset_bytes=entry["offset"],
        device=_device(entry["device"]),
        kind=_kind(entry["kind"]),
    )


def _shared(entry: wire.Values) -> Shared:
    return Shared(
        handle=entry["handle"],
        exports=entry["exports"],
        imported=bool(entry["imported"]),
        exporter=entry["exporter"],
        kept_fd=entry["kept_fd"],
        host_node=entry["host_node"],
        by_ipc=bool(entry["by_ipc"]),
    )


def _size(value: int) -> int:
    if not 0 < value <= MAX_SIZE_BYTES:
        raise wire.WireError(f"it claims a size of {value} bytes")
    return value


def _device(value: int) -> int:
    if value >= _MAX_DEVICES:
        raise wire.WireError(f"it claims device {value}")
    return value


def _kind(value: int) -> str:
    name = wire.tables().kinds.get(value)
    if name is None:
        raise wire.WireError(f"it claims a kind of allocation, {value}, that does not exist")
    return name
