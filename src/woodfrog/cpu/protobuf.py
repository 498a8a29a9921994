"""The format of CRIU's image files: two magic numbers, then (u32 length, protobuf message) records.

Only the wire format of protobuf is known here, no message. The input is hostile until proven otherwise: every length is
capped before it is used, and whatever does not parse is a BadImageError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from woodfrog.errors import BadImageError

_COMMON_MAGIC = 0x54564319  # criu/include/magic.h

# Caps. A process with 100,000 open files makes a files.img of ~15 MB; one record holds one path of at most 4 KiB.
MAX_FILE_BYTES = 256 << 20
MAX_RECORD_BYTES = 1 << 20

Fields = dict[int, list[int | bytes]]


def records(path: Path, magic: int) -> Iterator[Fields]:
    """Each record of one of CRIU's image files of that magic, by field number. BadImageError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise damaged(path, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    for start, end in spans(path, data, magic):
        yield fields_of(path, data[start:end])


def spans(path: Path, data: bytes, magic: int) -> Iterator[tuple[int, int]]:
    if len(data) < 8 or struct.unpack_from("<II", data) != (_COMMON_MAGIC, magic):
        raise damaged(path, "it does not begin with CRIU's magic numbers")
    yield from spans_from(path, data, 8)


def spans_from(path: Path, data: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each record, from the one whose length is at `position` on."""
    while position < len(data):
        if len(data) - position < 4:
            raise damaged(path, "it ends within a record")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if length > MAX_RECORD_BYTES or length > len(data) - position:
            raise damaged(path, f"a record claims {length} bytes")
        yield position, position + length
        position += length


def fields_of(path: Path, data: bytes) -> Fields:
    fields: Fields = {}
    for number, value, _, _ in walk(path, data):
        fields.setdefault(number, []).append(value)
    return fields


def walk(path: Path, data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """(field number, value, start, end) of each field of one protobuf message."""
    position = 0
    while position < len(data):
        start = position
        key, position = read_varint(path, data, position)
        number, wire_type = key >> 3, key & 7
        value: int | bytes
        if wire_type == 0:
            value, position = read_varint(path, data, position)
        else:
            if wire_type == 2:
                length, position = read_varint(path, data, position)
            elif wire_type in (1, 5):
                length = 8 if wire_type == 1 else 4
            else:
                raise damaged(path, f"a field has wire type {wire_type}")
            if length > len(data) - position:
                raise damaged(path, "a field reaches past its record")
            value = data[position : position + length]
            position += length
        yield number, value, start, position


def without(path: Path, data: bytes, number: int) -> bytes:
    return b"".join(data[start:end] for found, _, start, end in walk(path, data) if found != number)


def read_varint(path: Path, data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise damaged(path, "a number is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
    raise damaged(path, "a number is longer than 64 bits")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def required(path: Path, fields: Fields, number: int) -> int:
    value = optional(fields, number)
    if value is None:
        raise damaged(path, f"field {number} is missing from a record")
    return value


def optional(fields: Fields, number: int) -> int | None:
    value = fields.get(number, [None])[-1]
    return value if isinstance(value, int) else None


def numbers(fields: Fields, number: int) -> list[int]:
    found: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            found.append(value)
        else:  # the packed form of repeated numbers
            position = 0
            while position < len(value):
                one, position = read_varint(Path("pstree.img"), value, position)
                found.append(one)
    return found


def nested(path: Path, fields: Fields, number: int) -> Fields:
    value = fields[number][-1]
    if not isinstance(value, bytes):
        raise damaged(path, f"field {number} is not a message")
    return fields_of(path, value)


def damaged(path: Path, why: str) -> BadImageError:
    return BadImageError(
        f"CRIU's {path.name} cannot be used: {why}.",
        advice="The image is damaged or incomplete: `woodfrog verify` says which parts; use another image.",
    )
