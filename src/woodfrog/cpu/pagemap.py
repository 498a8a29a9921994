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
_MOST_BYTES = 1 << 63  # of memory, and of a file
# A record with its length, which must be that of what follows: address, pages, flags in one byte, pages once more.
_VALUE = rb"([\x80-\xff]{0,7}[\x00-\x7f])"
_AS_CRIU_WRITES = re.compile(
    rb"[\x00-\x7f]\0\0\0\x08" + _VALUE + rb"(?:\x10" + _VALUE + rb")?\x20([\x00-\x7f])(?:\x28" + _VALUE + rb")?",
    re.DOTALL,
)
# Address, pages and flags of a range; where its flags are in the file, -1 unless it is as CRIU writes it; its begin and
# end there, the length before it left out.
_Range = tuple[int, int, int, int, int, int]


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
    name, ranges = _parse(path, _contents(path))
    return name, (Entry(address, pages, flags) for address, pages, flags, *_ in ranges)


class Completed(NamedTuple):
    """What a pagemap and its pages file come to be once the pages that CRIU left out are in that file."""

    pages_name: str
    pieces: bytes  # all pages, as by `pieces`
    size_bytes: int  # of the pages file
    left_out_bytes: int
    pagemap: bytes


def completed(path: Path) -> Completed:
    """Of a dump that left out what may be filled later. The target stands still meanwhile, and CRIU has just written
    it: whatever is legal and not as it writes it is a BadImageError too."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    data = _contents(path)
    out = bytearray(data)
    packed = array("Q")
    offset = left_out_bytes = 0
    name, ranges = _parse(path, data)
    for address, pages, flags, flags_at, _, _ in ranges:
        if flags_at < 0:
            raise protobuf.damaged(path, "a range has other fields than expected")
        if not flags & (LAZY | PRESENT):
            continue
        size = pages * page_bytes
        packed.extend((address, size, offset))
        offset += size
        if not flags & PRESENT:
            left_out_bytes += size
            out[flags_at] |= PRESENT
    return Completed(name, packed.tobytes(), offset, left_out_bytes, bytes(out))


def with_flags(path: Path, flags: Callable[[Entry], int]) -> bytes:
    """The pagemap with the flags of each entry replaced; all else is carried over byte for byte."""
    data = _contents(path)
    out = bytearray()
    done = 0  # what of `data` is in `out`
    for address, pages, found, flags_at, start, end in _parse(path, data)[1]:
        wanted = flags(Entry(address, pages, found))
        if wanted == found:
            continue
        if flags_at >= 0 and wanted < 0x80:
            out += data[done:flags_at]
            out.append(wanted)
            done = flags_at + 1
        else:
            record = protobuf.without(path, data[start:end], _FLAGS) + protobuf.tag(_FLAGS, 0) + protobuf.varint(wanted)
            out += data[done : start - 4] + struct.pack("<I", len(record)) + record
            done = end
    return bytes(out + data[done:])


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


def _contents(path: Path) -> bytes:
    if path.stat().st_size > _MAX_BYTES:
        raise protobuf.damaged(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
    return path.read_bytes()


def _parse(path: Path, data: bytes) -> tuple[str, Iterator[_Range]]:
    """The name of the pages file, and the ranges. BadImageError, while they are read too."""
    head = next(protobuf.spans(path, data, _PAGEMAP_MAGIC), None)
    number = _last(protobuf.fields_of(path, data[slice(*head)]), _HEAD_PAGES_ID) if head is not None else None
    if head is None or number is None:
        raise protobuf.damaged(path, "it does not begin with its head")
    return f"pages-{number}.img", _ranges(path, data, head[1])


def _ranges(path: Path, data: bytes, position: int) -> Iterator[_Range]:
    """Those from there on. A large program has 100,000, and it stands still meanwhile, or waits to be restored: what is
    as CRIU writes it is taken apart by one regular expression, which leaves all else to the way for any message."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    most_pages = _MOST_BYTES // page_bytes
    total = 0
    counts: dict[bytes, int] = {}  # there are few of them
    usual, size = _AS_CRIU_WRITES.match, len(data)
    while position < size:
        found = usual(data, position)
        if found is not None and (end := found.end()) - position - 4 == data[position]:
            address = _number(found[1])
            count = found[4] or found[2] or b"\0"
            if (known := counts.get(count)) is None:
                known = counts[count] = _number(count)
            pages, flags_at = known, found.start(3)
            flags, start = data[flags_at], position + 4
        else:
            start, end = next(protobuf.spans_from(path, data, position))
            address, pages, flags = _any_range(path, data[start:end])
            flags_at = -1
        total += pages
        if not pages or total >= most_pages or address + pages * page_bytes >= _MOST_BYTES:
            raise protobuf.damaged(path, "it claims no pages, or more than there can be")
        yield address, pages, flags, flags_at, start, end
        position = end


def _number(data: bytes) -> int:
    """A number of protobuf in at most 8 bytes: seven bits of each, least first, all bytes at once."""
    value = int.from_bytes(data, "little")
    value = value & 0x007F007F007F007F | value >> 1 & 0x3F803F803F803F80
    value = value & 0x00003FFF00003FFF | value >> 2 & 0x0FFFC0000FFFC000
    return value & 0x0FFFFFFF | value >> 4 & 0xFFFFFFF0000000


def _any_range(path: Path, data: bytes) -> tuple[int, int, int]:
    """Address, pages and flags of one record."""
    fields = protobuf.fields_of(path, data)
    address, pages = _last(fields, _VADDR), _last(fields, _PAGES)
    if pages is None:
        pages = _last(fields, _PAGES_32)
    if address is None or pages is None:
        raise protobuf.damaged(path, "a range has no address or no length")
    flags = _last(fields, _FLAGS)
    if flags is None:  # what CRIU takes an entry without flags for
        flags = 0 if _last(fields, _IN_PARENT) else PRESENT
    return address, pages, flags


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
