"""Packs and unpacks the messages of native/wire/wire.h from the tables of woodfrog._native.wire.

Every packet from the other side is hostile until it has passed here: its length, version, type, sender, counts and the
number of descriptors that came with it must all agree. Must never allocate by a number that the other side chose
without a cap, and holds no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, overload

from woodfrog.errors import WoodfrogError

Values = dict[str, Any]


class WireError(WoodfrogError):
    """The other side does not speak the protocol: another version of woodfrog, or not the interposer at all."""


@dataclass
class Message:
    """One packet. `fds` belong to whoever holds the message."""

    type: str
    sequence: int
    status: int = 0
    last: bool = False
    same: bool = False  # of a return_batch: WF_FLAG_SAME
    body: Values = field(default_factory=dict)
    entries: Sequence[Values] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)


class _Layout:
    """A body or an entry. Targets have thousands of handles and wait while their entries are packed and read."""

    def __init__(self, codec: struct.Struct, names: tuple[str, ...]) -> None:
        self.size = codec.size
        self.codec = codec
        self.names = names
        codes = [char for char in codec.format if char.isalpha()]
        self._defaults = {name: b"" if code == "s" else 0 for name, code in zip(names, codes, strict=True)}

    def pack(self, values: Values) -> bytes:
        return self.codec.pack(*(self._defaults | values).values())

    def unpack(self, data: bytes) -> Values:
        return dict(zip(self.names, self.codec.unpack(data), strict=True))

    def pack_rows(self, rows: Iterable[Sequence[Any]]) -> Entries:
        """Entries of values in the order of `names`, packed at once."""
        pack = self.codec.pack
        return Entries(self, b"".join([pack(*row) for row in rows]))

    def unpack_all(self, data: bytes) -> Entries:
        """As many as there are; `data` has whole ones only."""
        return Entries(self, data)


class Entries(Sequence[Values]):
    """The entries of a packet, as `data` has them. They are unpacked when they are looked at, once: a target may wait
    for the packet, and not for what is in it."""

    def __init__(self, layout: _Layout, data: bytes) -> None:
        self._layout, self.data = layout, data
        self._values: list[Values] | None = None

    def __len__(self) -> int:
        return len(self.data) // self._layout.size if self._layout.size else 0

    @overload
    def __getitem__(self, index: int) -> Values: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Values]: ...
    def __getitem__(self, index: int | slice) -> Values | Sequence[Values]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Values]:
        return iter(self._all())

    def _all(self) -> list[Values]:
        if self._values is None:
            names, codec = self._layout.names, self._layout.codec
            unpacked = codec.iter_unpack(self.data) if len(self) else ()
            self._values = [dict(zip(names, values, strict=True)) for values in unpacked]
        return self._values


@dataclass(frozen=True)
class _Kind:
    name: str
    number: int
    body: _Layout
    entry: _Layout
    sender: str


@dataclass(frozen=True)
class Tables:
    """wire.h as data."""

    magic: int
    version: int
    max_message: int
    max_entries: int
    flag_last: int
    flag_same: int
    header: _Layout
    by_name: dict[str, _Kind]
    by_number: dict[int, _Kind]
    states: dict[int, str]
    statuses: dict[int, str]
    kinds: dict[int, str]
    spendings: dict[int, str]
    obstacles: dict[str, int]
    control: dict[str, int]  # WF_CONTROL_…


@cache
def tables() -> Tables:
    """Read once, from the compiled module, so that both sides always agree."""
    from woodfrog._native import wire  # compiled; loaded only where messages are really exchanged

    def layout(pair: tuple[str, tuple[str, ...]]) -> _Layout:
        return _Layout(struct.Struct(pair[0]), tuple(pair[1]))

    kinds = [
        _Kind(name, number, layout(body), layout(entry), sender)
        for name, (number, body, entry, sender) in wire.MESSAGES.items()
    ]
    return Tables(
        magic=wire.MAGIC,
        version=wire.VERSION,
        max_message=wire.MAX_MESSAGE,
        max_entries=wire.MAX_ENTRIES,
        flag_last=wire.FLAG_LAST,
        flag_same=wire.FLAG_SAME,
        header=layout(wire.HEADER),
        by_name={kind.name: kind for kind in kinds},
        by_number={kind.number: kind for kind in kinds},
        states={number: name for name, number in wire.STATES.items()},
        statuses={number: name for name, number in wire.STATUSES.items()},
        kinds={number: name for name, number in wire.KINDS.items()},
        spendings={number: name for name, number in wire.SPENDINGS.items()},
        obstacles=dict(wire.OBSTACLES),
        control={
            "withdraw": wire.CONTROL_WITHDRAW,
            "own": wire.CONTROL_OWN,
            "ask": wire.CONTROL_ASK,
            "shared": wire.CONTROL_SHARED,
        },
    )


def pack(message: Message) -> bytes:
    """The packet for `message`, without its descriptors (those go beside it)."""
    table = tables()
    kind = table.by_name[message.type]
    if len(message.entries) > table.max_entries:
        raise ValueError(f"{len(message.entries)} entries in one message; at most {table.max_entries} fit")
    header = table.header.pack(
        {
            "magic": table.magic,
            "version": table.version,
            "type": kind.number,
            "sequence": message.sequence,
            "count": len(message.entries),
            "fd_count": len(message.fds),
            "status": message.status,
            "flags": (table.flag_last if message.last else 0) | (table.flag_same if message.same else 0),
        }
    )
    entries = message.entries
    packed = entries.data if isinstance(entries, Entries) else b"".join(kind.entry.pack(entry) for entry in entries)
    return header + kind.body.pack(message.body) + packed


def unpack(data: bytes, fds: list[int], sender: str) -> Message:
    """The message in a packet that `sender` ("agent" or "daemon") sent; WireError says what is wrong with it.

    The descriptors stay the caller's until this returns.
    """
    table = tables()
    if len(data) < table.header.size:
        raise WireError(f"a packet of {len(data)} bytes is shorter than a header")
    header = table.header.unpack(data[: table.header.size])
    if header["magic"] != table.magic:
        raise WireError("the packet does not begin with woodfrog's magic number")
    if header["version"] != table.version:
        raise WireError(f"it speaks version {header['version']} of the protocol, the daemon version {table.version}")
    kind = table.by_number.get(header["type"])
    if kind is None or kind.sender != sender:
        raise WireError(f"message type {header['type']} is not one that the {sender} may send")
    if header["count"] > table.max_entries:
        raise WireError(f"a {kind.name} claims {header['count']} entries; at most {table.max_entries} are allowed")
    expected = table.header.size + kind.body.size + header["count"] * kind.entry.size
    if len(data) != expected:
        raise WireError(f"a {kind.name} with {header['count']} entries has {len(data)} bytes instead of {expected}")
    if header["fd_count"] != len(fds):
        raise WireError(f"a {kind.name} announces {header['fd_count']} descriptors, and {len(fds)} came")
    body_end = table.header.size + kind.body.size
    return Message(
        type=kind.name,
        sequence=header["sequence"],
        status=header["status"],
        last=bool(header["flags"] & table.flag_last),
        same=bool(header["flags"] & table.flag_same),
        body=kind.body.unpack(data[table.header.size : body_end]),
        entries=kind.entry.unpack_all(data[body_end:]),
        fds=fds,
    )


def text(raw: bytes) -> str:
    """A fixed-size string field: up to the first NUL, with nothing that could disturb a terminal."""
    decoded = raw.split(b"\0", 1)[0].decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in decoded)
