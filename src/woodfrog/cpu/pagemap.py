"""CRIU's pagemaps: which pages of a process are where in its pages file, and where that file can be cut.

CRIU writes the pages of a process back to back into pages-<n>.img, and what they are into pagemap-<pid>.img. Cut by
offsets in the file, one page more would shift all chunks behind it. Cut by address, it changes the one chunk that it is
in. For a cut, a pagemap that cannot be understood is no error: its pages file is then cut like any other. This never
reads pages.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from woodfrog.cpu import protobuf
from woodfrog.errors import BadImageError

WINDOW_BYTES = 16 << 10  # measured against 4 and 64 KiB: docs/format.md, "Pages of processes"

PIECE_BYTES = 24  # of one in what `pieces` returns

_PAGEMAP_MAGIC = 0x56084025  # criu/include/magic.h
# images/pagemap.proto: field numbers. CRIU 4 writes the number of pages as field 5 as well, for more than 2^32 of them.
_HEAD_PAGES_ID = 1
_VADDR, _PAGES_32, _IN_PARENT, _FLAGS, _PAGES = 1, 2, 3, 4, 5
LAZY = 1 << 1  # flags: memory that may be filled after the process is there (criu(8), --lazy-pages)
PRESENT = 1 << 2  # flags: the pages are in the pages file
_NAME = re.compile(r"pagemap-(?:shmem-)?([0-9]{1,20})\.img")
_OF_PROCESS = re.compile(r"pagemap-([0-9]{1,10})\.img")
_MAX_BYTES = 64 << 20  # of one pagemap: some three million ranges, more than a kernel lets a process map


class Entry(NamedTuple):
    """One range of pages; `flags` as CRIU has them."""

    address: int
    pages: int
    flags: int


class PagesCut(NamedTuple):
    """How one pages file is cut: packed u32 sizes of its chunks, in order, and whose pages they are (0: shared)."""

    sizes: bytes
    pid: int


def cuts(directory: Path, window_bytes: int = WINDOW_BYTES) -> dict[str, PagesCut]:
    """For each pages file in CRIU's `directory` that its pagemap explains to the last byte, its cut. Chunks have at
    most `window_bytes` (a power of two), or one page where pages are larger."""
    found: dict[str, PagesCut] = {}
    claimed: set[str] = set()
    for path in sorted(directory.glob("pagemap-*.img")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            name, entries = read(path)
            sizes = _sizes(
                (entry for entry in entries if entry.flags & PRESENT), (directory / name).stat().st_size, window_bytes
            )
        except (BadImageError, OSError):
            continue
        if sizes is None or name in claimed:  # two that claim one file: whatever that is, it is not understood
            found.pop(name, None)
        else:
            found[name] = PagesCut(sizes.tobytes(), 0 if "shmem" in path.name else int(match[1]))
        claimed.add(name)
    return found


def paths(directory: Path) -> dict[int, Path]:
    """The pagemaps of processes in CRIU's `directory`, by process number (in its namespace)."""
    found = {int(match[1]): path for path in directory.iterdir() if (match := _OF_PROCESS.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read(path: Path) -> tuple[str, Iterator[Entry]]:
    """The name of the pages file, and all entries, in their order. BadImageError, while they are read too."""
    if path.stat().st_size > _MAX_BYTES:
        raise BadImageError(f"{path.name} is too large")
    records = protobuf.records(path, _PAGEMAP_MAGIC)
    return _pages_name(path, next(records, {})), map(_entry, records)


class Completed(NamedTuple):
    """What a pagemap and its pages file come to be once the pages that CRIU left out are in that file."""

    pages_name: str
    pieces: bytes  # all pages, as by `pieces`
    size_bytes: int  # of the pages file
    left_out_bytes: int
    pagemap: bytes


def completed(path: Path) -> Completed:
    """Of a dump that left out what may be filled later. Made for the time in which a target stands still: a large
    program has thousands of ranges, and this takes a third of the time of `read`. BadImageError."""
    if path.stat().st_size > _MAX_BYTES:
        raise BadImageError(f"{path.name} is too large")
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    data = path.read_bytes()
    out = bytearray(data)
    packed = array("Q")
    name = ""
    offset = left_out_bytes = 0
    for start, end in protobuf.spans(path, data, _PAGEMAP_MAGIC):
        if not name:
            name = _pages_name(path, protobuf.fields_of(path, data[start:end]))
            continue
        address, pages, flags, flags_at = _quickly(path, data, start, end)
        if not flags & (LAZY | PRESENT):
            continue
        size = pages * page_bytes
        if address + size + offset >= 1 << 63:
            raise protobuf.damaged(path, "it claims more pages than there can be")
        packed.extend((address, size, offset))
        offset += size
        if not flags & PRESENT:
            left_out_bytes += size
            out[flags_at] |= PRESENT
    if not name:
        raise BadImageError(f"{path.name} does not begin with its head")
    return Completed(name, packed.tobytes(), offset, left_out_bytes, bytes(out))


def with_flags(path: Path, flags: Callable[[Entry], int]) -> bytes:
    """The pagemap with the flags of each entry replaced; all else is carried over byte for byte."""
    data = path.read_bytes()
    out = bytearray(data[:8])
    for number, (start, end) in enumerate(protobuf.spans(path, data, _PAGEMAP_MAGIC)):
        record = data[start:end]
        if number > 0:
            entry = _entry(protobuf.fields_of(path, record))
            if (wanted := flags(entry)) != entry.flags:
                rest = protobuf.without(path, record, _FLAGS)
                record = rest + protobuf.tag(_FLAGS, 0) + protobuf.varint(wanted)
        out += struct.pack("<I", len(record)) + record
    return bytes(out)


def pieces(placed: Iterable[tuple[Entry, int]]) -> bytes:
    """Entries with their offsets in the pages file, packed for transfer.save_pages and fill_pages."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    packed = array("Q")
    for entry, offset in placed:
        packed.extend((entry.address, entry.pages * page_bytes, offset))
    return packed.tobytes()


def placed(entries: Iterable[Entry], kinds: int = PRESENT) -> Iterator[tuple[Entry, int]]:
    """The entries that have one of the flags `kinds`, each with its offset in a pages file that has just those."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    offset = 0
    for entry in entries:
        if entry.flags & kinds:
            yield entry, offset
            offset += entry.pages * page_bytes


def _pages_name(path: Path, head: protobuf.Fields) -> str:
    number = _last(head, _HEAD_PAGES_ID)
    if number is None:
        raise BadImageError(f"{path.name} does not begin with its head")
    return f"pages-{number}.img"


def _quickly(path: Path, data: bytes, start: int, end: int) -> tuple[int, int, int, int]:
    """Address, pages and flags of the range in data[start:end], and where its flags are, in one byte: as CRIU writes
    them, numbers with keys of one byte. BadImageError for whatever else may be legal."""
    found = [0] * 6
    flags_at = -1
    position = start
    while position < end:
        key = data[position]
        position += 1
        value = shift = 0
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80 or shift >= 63:
                break
            shift += 7
        else:
            raise protobuf.damaged(path, "a range is cut off")
        if key & 0x87 or key >> 3 > _PAGES or byte >= 0x80:
            raise protobuf.damaged(path, "a range has other fields than expected")
        found[key >> 3] = value
        if key >> 3 == _FLAGS:
            flags_at = position - 1
    pages = found[_PAGES] or found[_PAGES_32]
    if flags_at < 0 or found[_FLAGS] >= 0x80 or not pages:
        raise protobuf.damaged(path, "a range has no flags, or no pages")
    return found[_VADDR], pages, found[_FLAGS], flags_at


def _entry(fields: protobuf.Fields) -> Entry:
    address, pages = _last(fields, _VADDR), _last(fields, _PAGES)
    if pages is None:
        pages = _last(fields, _PAGES_32)
    if address is None or pages is None:
        raise BadImageError("a range of a pagemap has no address or no length")
    flags = _last(fields, _FLAGS)
    if flags is None:  # what CRIU takes an entry without flags for
        flags = 0 if _last(fields, _IN_PARENT) else PRESENT
    return Entry(address, pages, flags)


def _last(fields: protobuf.Fields, number: int) -> int | None:
    value = fields.get(number, [None])[-1]
    return value if isinstance(value, int) else None


def _sizes(entries: Iterable[Entry], file_bytes: int, window_bytes: int) -> array[int] | None:
    """The sizes of the chunks: the pages of one window each, windows being multiples of `window_bytes` in the address
    space. None unless the entries ascend and make up the file."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    window_bytes = max(window_bytes, page_bytes)
    sizes = array("I")
    window = -1  # of the last chunk
    behind = total = 0
    for address, pages, _ in entries:
        size = pages * page_bytes
        end = address + size
        total += size
        if address % page_bytes or size == 0 or address < behind or total > file_bytes:
            return None
        behind = end
        first, last = address // window_bytes, (end - 1) // window_bytes
        begins = min(end, (first + 1) * window_bytes) - address
        if first == window:
            sizes[-1] += begins
        else:
            sizes.append(begins)
        if last > first:
            sizes.extend(array("I", [window_bytes]) * (last - first - 1))
            sizes.append(end - last * window_bytes)
        window = last
    return sizes if total == file_bytes else None
