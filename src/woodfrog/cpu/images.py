"""Reads the few of CRIU's image files that woodfrog needs: the process tree, open regular files, unix sockets.

CRIU's images are a magic number or two followed by (u32 length, protobuf message) records. Only the wire format of
protobuf and the handful of fields named below are read; everything else is passed over, so newer CRIU releases that add
fields are fine. The input is hostile until proven otherwise: every length is capped before it is used, and whatever
does not parse is a BadImageError. This module never writes into an image; `with_sizes` returns new bytes.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from woodfrog.errors import BadImageError

# criu/include/magic.h
_COMMON_MAGIC = 0x54564319
_PSTREE_MAGIC = 0x50273030
_FILES_MAGIC = 0x56303138
_REMAP_MAGIC = 0x59133954

# images/fdinfo.proto, regfile.proto, sk-unix.proto, pstree.proto, remap-file-path.proto: field numbers
_FILE_TYPE, _FILE_REG, _FILE_UNIX = 1, 3, 16
_TYPE_REG, _TYPE_UNIX = 1, 5
_UNIX_NAME, _UNIX_PERMS = 11, 13
_PERMS_UID, _PERMS_GID = 2, 3
_REG_ID, _REG_FLAGS, _REG_POS, _REG_NAME, _REG_SIZE, _REG_EXT, _REG_MODE = 1, 2, 3, 6, 8, 9, 10
_TREE_PID, _TREE_PPID, _TREE_PGID, _TREE_SID, _TREE_THREADS = 1, 2, 3, 4, 5
_REMAP_ORIGINAL, _REMAP_TARGET, _REMAP_TYPE = 1, 2, 3
_REMAP_LINKED = 0

# Caps. A process with 100,000 open files makes a files.img of ~15 MB; one record holds one path of at most 4 KiB.
MAX_FILE_BYTES = 256 << 20
MAX_RECORD_BYTES = 1 << 20

_NO_POSITION = 2**64 - 1  # CRIU's "has no file position"

Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True)
class Task:
    """One process of a dumped tree, with the numbers that it must get again."""

    pid: int
    parent_pid: int
    group_id: int
    session_id: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class OpenFile:
    """A regular file that some process of the dumped tree had open or mapped, as CRIU will look for it."""

    file_id: int
    path: str
    flags: int  # as for open(2)
    position: int | None
    size_bytes: int | None  # None: CRIU does not compare it (files that are only appended to)
    mode: int


@dataclass(frozen=True)
class SocketFile:
    """A unix socket of the dumped tree that is bound to an absolute path; CRIU binds it there again."""

    path: str
    uid: int
    gid: int


def tasks(directory: Path) -> list[Task]:
    """The dumped process tree, root first."""
    path = directory / "pstree.img"
    found = []
    for fields in records(path, _PSTREE_MAGIC):
        found.append(
            Task(
                pid=_number(path, fields, _TREE_PID),
                parent_pid=_number(path, fields, _TREE_PPID),
                group_id=_number(path, fields, _TREE_PGID),
                session_id=_number(path, fields, _TREE_SID),
                threads=tuple(_numbers(fields, _TREE_THREADS)),
            )
        )
    if not found:
        raise _damaged(path, "it holds no process")
    return found


def open_files(directory: Path) -> list[OpenFile]:
    """Regular files that CRIU opens by path at restore; deleted files are not among them."""
    path = directory / "files.img"
    remapped = {original for original, _ in _remaps(directory)}
    found = []
    for fields in records(path, _FILES_MAGIC):
        if _number(path, fields, _FILE_TYPE) != _TYPE_REG or _FILE_REG not in fields:
            continue
        reg = _nested(path, fields, _FILE_REG)
        if _number(path, reg, _REG_ID) in remapped or _optional(reg, _REG_EXT):
            continue
        mode = _optional(reg, _REG_MODE) or 0
        if not stat.S_ISREG(mode):
            continue
        name = reg.get(_REG_NAME, [b""])[-1]
        if not isinstance(name, bytes) or not name.startswith(b"/"):
            raise _damaged(path, "a file in it has no absolute path")
        position = _number(path, reg, _REG_POS)
        found.append(
            OpenFile(
                file_id=_number(path, reg, _REG_ID),
                path=name.decode(errors="surrogateescape"),
                flags=_number(path, reg, _REG_FLAGS),
                position=None if position == _NO_POSITION else position,
                size_bytes=_optional(reg, _REG_SIZE),
                mode=mode,
            )
        )
    return found


def socket_files(directory: Path) -> list[SocketFile]:
    """Unix sockets bound to an absolute path of the filesystem; abstract and relative names are not among them."""
    path = directory / "files.img"
    found = []
    for fields in records(path, _FILES_MAGIC):
        if _number(path, fields, _FILE_TYPE) != _TYPE_UNIX or _FILE_UNIX not in fields:
            continue
        socket = _nested(path, fields, _FILE_UNIX)
        name = socket.get(_UNIX_NAME, [b""])[-1]
        if not isinstance(name, bytes) or not name.startswith(b"/"):
            continue
        owner = _nested(path, socket, _UNIX_PERMS) if _UNIX_PERMS in socket else {}
        found.append(
            SocketFile(
                path=name.rstrip(b"\0").decode(errors="surrogateescape"),
                uid=_optional(owner, _PERMS_UID) or 0,
                gid=_optional(owner, _PERMS_GID) or 0,
            )
        )
    return found


def linked_remaps(directory: Path) -> list[str]:
    """Paths of the hard links that CRIU left for deleted files that still have another name; a restore eats them."""
    wanted = {target for _, target in _remaps(directory, kind=_REMAP_LINKED)}
    path = directory / "files.img"
    found = []
    for fields in records(path, _FILES_MAGIC) if wanted else ():
        if _FILE_REG not in fields:
            continue
        reg = _nested(path, fields, _FILE_REG)
        name = reg.get(_REG_NAME, [b""])[-1]
        if _number(path, reg, _REG_ID) in wanted and isinstance(name, bytes):
            found.append(name.decode(errors="surrogateescape"))
    return found


def with_sizes(files_image: bytes, sizes: dict[int, int]) -> bytes:
    """`files_image` with the recorded size of the files in `sizes` (file id → bytes) replaced; all else unchanged."""
    path = Path("files.img")
    out = bytearray(files_image[:8])
    for start, end in _spans(path, files_image, _FILES_MAGIC):
        record = files_image[start:end]
        fields = _fields(path, record)
        if _FILE_REG in fields:
            reg = _nested(path, fields, _FILE_REG)
            size = sizes.get(_number(path, reg, _REG_ID))
            if size is not None:
                raw = fields[_FILE_REG][-1]
                assert isinstance(raw, bytes)
                whole = _without(path, raw, _REG_SIZE) + _tag(_REG_SIZE, 0) + _varint(size)
                record = _without(path, record, _FILE_REG) + _tag(_FILE_REG, 2) + _varint(len(whole)) + whole
        out += struct.pack("<I", len(record)) + record
    return bytes(out)


def _remaps(directory: Path, kind: int | None = None) -> list[tuple[int, int]]:
    path = directory / "remap-fpath.img"
    if not path.exists():
        return []
    pairs = []
    for fields in records(path, _REMAP_MAGIC):
        if kind is None or _optional(fields, _REMAP_TYPE) in (kind, None):
            pairs.append((_number(path, fields, _REMAP_ORIGINAL), _number(path, fields, _REMAP_TARGET)))
    return pairs


def records(path: Path, magic: int) -> Iterator[Fields]:
    """Each record of one of CRIU's image files of that magic, by field number. BadImageError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _damaged(path, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        data = path.read_bytes()
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    for start, end in _spans(path, data, magic):
        yield _fields(path, data[start:end])


def _spans(path: Path, data: bytes, magic: int) -> Iterator[tuple[int, int]]:
    if len(data) < 8 or struct.unpack_from("<II", data) != (_COMMON_MAGIC, magic):
        raise _damaged(path, "it does not begin with CRIU's magic numbers")
    position = 8
    while position < len(data):
        if len(data) - position < 4:
            raise _damaged(path, "it ends within a record")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if length > MAX_RECORD_BYTES or length > len(data) - position:
            raise _damaged(path, f"a record claims {length} bytes")
        yield position, position + length
        position += length


def _fields(path: Path, data: bytes) -> Fields:
    fields: Fields = {}
    for number, value, _, _ in _walk(path, data):
        fields.setdefault(number, []).append(value)
    return fields


def _walk(path: Path, data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """(field number, value, start, end) of each field of one protobuf message."""
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(path, data, position)
        number, wire_type = key >> 3, key & 7
        value: int | bytes
        if wire_type == 0:
            value, position = _read_varint(path, data, position)
        else:
            if wire_type == 2:
                length, position = _read_varint(path, data, position)
            elif wire_type in (1, 5):
                length = 8 if wire_type == 1 else 4
            else:
                raise _damaged(path, f"a field has wire type {wire_type}")
            if length > len(data) - position:
                raise _damaged(path, "a field reaches past its record")
            value = data[position : position + length]
            position += length
        yield number, value, start, position


def _without(path: Path, data: bytes, number: int) -> bytes:
    return b"".join(data[start:end] for found, _, start, end in _walk(path, data) if found != number)


def _read_varint(path: Path, data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _damaged(path, "a number is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
    raise _damaged(path, "a number is longer than 64 bits")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _number(path: Path, fields: Fields, number: int) -> int:
    value = _optional(fields, number)
    if value is None:
        raise _damaged(path, f"field {number} is missing from a record")
    return value


def _optional(fields: Fields, number: int) -> int | None:
    value = fields.get(number, [None])[-1]
    return value if isinstance(value, int) else None


def _numbers(fields: Fields, number: int) -> list[int]:
    found: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            found.append(value)
        else:  # the packed form of repeated numbers
            position = 0
            while position < len(value):
                one, position = _read_varint(Path("pstree.img"), value, position)
                found.append(one)
    return found


def _nested(path: Path, fields: Fields, number: int) -> Fields:
    value = fields[number][-1]
    if not isinstance(value, bytes):
        raise _damaged(path, f"field {number} is not a message")
    return _fields(path, value)


def _damaged(path: Path, why: str) -> BadImageError:
    return BadImageError(
        f"CRIU's {path.name} cannot be used: {why}.",
        advice="The image is damaged or incomplete: `woodfrog verify` says which parts; use another image.",
    )
