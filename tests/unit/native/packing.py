"""What the tests of packs share: chunks with known contents in an arena, packed arrays, and a reader in Python.

The reader follows docs/format.md, not the C++ code.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import blake3
import lz4.block
import zstandard

from woodfrog._native import transfer

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
CHUNK = struct.Struct("<32sQII")
RECORD = struct.Struct("<32sQIIII")
LOCATION = struct.Struct("<QIIIIQ")
FIXED = struct.Struct("<8sIIIIQ")
SEGMENT_RECORD = struct.Struct("<32sIIII")
RAW, LZ4, ZSTD, SPLIT_ZSTD = range(4)


class Record(NamedTuple):
    digest: bytes
    offset: int
    stored: int
    raw: int
    encoding: int
    reserved: int


class Location(NamedTuple):
    offset: int
    stored: int
    raw: int
    encoding: int
    pack: int
    reserved: int = 0


def digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def text(size: int, seed: int = 0) -> bytes:
    """Compresses well."""
    words = [b"pack ", b"segment ", b"chunk ", b"digest ", b"index "]
    generator = random.Random(seed)
    return b"".join(generator.choices(words, k=size // 5 + 1))[:size]


def floats(size: int, seed: int = 0) -> bytes:
    """Like weights in bf16: the high bytes are alike, the low ones random."""
    generator = random.Random(seed)
    low, high = generator.randbytes((size + 1) // 2), generator.randbytes((size + 1) // 2)
    out = bytearray(2 * len(low))
    out[0::2], out[1::2] = low, high.translate(bytes([0x3C, 0x3D, 0xBC, 0xBD] * 64))
    return bytes(out[:size])


def records(packed: bytes) -> list[Record]:
    return [Record(*fields) for fields in RECORD.iter_unpack(packed)]


def locations(packed: bytes) -> list[Location]:
    return [Location(*fields) for fields in LOCATION.iter_unpack(packed)]


def pack_locations(values: Sequence[Location]) -> bytes:
    return b"".join(LOCATION.pack(*value) for value in values)


def locate(packed_records: bytes, pack: int = 0) -> bytes:
    """The locations that records of pack number `pack` mean."""
    return pack_locations(
        [Location(r.offset, r.stored, r.raw, r.encoding, pack) for r in records(packed_records)],
    )


def sizes(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def numbers(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@dataclass
class Filled:
    """An arena with chunks in it, each at a multiple of a page."""

    arena: transfer.Arena
    contents: list[bytes]
    offsets: list[int]

    @property
    def chunks(self) -> bytes:
        return b"".join(
            CHUNK.pack(digest(data), offset, len(data), 0)
            for data, offset in zip(self.contents, self.offsets, strict=True)
        )

    @property
    def digests(self) -> bytes:
        return b"".join(digest(data) for data in self.contents)


@contextlib.contextmanager
def filled(contents: Sequence[bytes]) -> Iterator[Filled]:
    offsets, at = [], 0
    for data in contents:
        offsets.append(at)
        at += -(-len(data) // PAGE) * PAGE
    arena = transfer.Arena(max(at, PAGE))
    with mmap.mmap(arena.fd, arena.size_bytes) as view:
        for data, offset in zip(contents, offsets, strict=True):
            view[offset : offset + len(data)] = data
    yield Filled(arena, list(contents), offsets)
    arena.close()


@contextlib.contextmanager
def new_file(directory: Path) -> Iterator[int]:
    """A file without a name, as a store's temporary files are."""
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    yield fd
    os.close(fd)


@contextlib.contextmanager
def reading(fd: int) -> Iterator[int]:
    """The same file, open for reading only."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    yield again
    os.close(again)


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size + 1, 0)


def put(fd: int, data: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)


def decode(encoding: int, stored: bytes, raw: int) -> bytes:
    if encoding == RAW:
        return stored
    if encoding == LZ4:
        return lz4.block.decompress(stored, uncompressed_size=raw)
    data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw)
    if encoding == ZSTD:
        return data
    out = bytearray(raw)
    out[0::2], out[1::2] = data[: (raw + 1) // 2], data[(raw + 1) // 2 :]
    return bytes(out)


def build_header(entries: Sequence[tuple[bytes, int, int, int]], **changed: int) -> bytes:
    """A segment's header for (digest, stored, raw, encoding); `changed` fields are written as given, digest valid."""
    length = -(-(32 + 48 * len(entries) + 32) // PAGE) * PAGE
    end = 0
    for _, stored, _, encoding in entries:
        if encoding == RAW and stored >= PAGE:
            end = -(-end // PAGE) * PAGE
        end += stored
    fixed = FIXED.pack(
        changed.get("magic", b"WFRGSEG\0"),
        changed.get("version", 1),
        changed.get("records", len(entries)),
        changed.get("header_bytes", length),
        changed.get("reserved", 0),
        changed.get("payload_bytes", -(-end // PAGE) * PAGE),
    )
    body = fixed + b"".join(SEGMENT_RECORD.pack(*entry, changed.get("record_reserved", 0)) for entry in entries)
    body = body.ljust(length - 32, b"\0")
    return body + digest(body)


def parse(data: bytes) -> tuple[list[Record], bytes, list[bytes]]:
    """Records, name and contents of a pack, as docs/format.md has it. Fails on the first difference."""
    found: list[Record] = []
    contents: list[bytes] = []
    header_digests = b""
    at = 0
    while at < len(data):
        magic, version, count, length, reserved, payload = FIXED.unpack_from(data, at)
        assert (magic, version, reserved) == (b"WFRGSEG\0", 1, 0)
        assert 1 <= count <= 2048
        assert length == -(-(32 + 48 * count + 32) // PAGE) * PAGE
        header = data[at : at + length]
        assert header[-32:] == digest(header[:-32])
        assert not any(header[32 + 48 * count : -32])
        header_digests += header[-32:]
        end = start = at + length
        for i in range(count):
            value, stored, raw, encoding, zero = SEGMENT_RECORD.unpack_from(header, 32 + 48 * i)
            place = start + -(-(end - start) // PAGE) * PAGE if encoding == RAW and stored >= PAGE else end
            assert zero == 0
            assert not any(data[end:place])
            found.append(Record(value, place, stored, raw, encoding, 0))
            contents.append(decode(encoding, data[place : place + stored], raw))
            assert digest(contents[-1]) == value
            end = place + stored
        assert payload == -(-(end - start) // PAGE) * PAGE
        assert not any(data[end : start + payload])
        at = start + payload
    assert at == len(data)
    return found, digest(header_digests), contents
