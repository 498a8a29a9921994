"""CRIU's image files, made by hand: for tests of what reads and changes them."""

from __future__ import annotations

import struct
from pathlib import Path

COMMON, PSTREE, FILES, REMAP = 0x54564319, 0x50273030, 0x56303138, 0x59133954


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def blob(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def image(magic: int, *records: bytes) -> bytes:
    return struct.pack("<II", COMMON, magic) + b"".join(struct.pack("<I", len(one)) + one for one in records)


def regular(file_id: int, path: bytes, flags: int, size: int | None, mode: int = 0o100644, position: int = 0) -> bytes:
    reg = number(1, file_id) + number(2, flags) + number(3, position) + blob(5, number(1, 0)) + blob(6, path)
    if size is not None:
        reg += number(8, size)
    return number(1, 1) + number(2, file_id) + blob(3, reg + number(10, mode))


def write(directory: Path, name: str, data: bytes) -> None:
    (directory / name).write_bytes(data)
