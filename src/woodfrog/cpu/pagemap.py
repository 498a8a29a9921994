"""Where CRIU's pages files can be cut so that a page's chunk depends on its address alone.

CRIU writes the pages of a process back to back into pages-<n>.img, and what they are into pagemap-<pid>.img. Cut by
offsets in the file, one page more would shift all chunks behind it. Cut by address, it changes the one chunk that it is
in. A pagemap that cannot be understood is no error: its pages file is then cut like any other. This never reads pages.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from woodfrog.cpu import protobuf
from woodfrog.errors import BadImageError

WINDOW_BYTES = 16 << 10  # measured against 4 and 64 KiB: docs/format.md, "Pages of processes"

_PAGEMAP_MAGIC = 0x56084025  # criu/include/magic.h
# images/pagemap.proto: field numbers. CRIU 4 writes the number of pages as field 5 as well, for more than 2^32 of them.
_HEAD_PAGES_ID = 1
_VADDR, _PAGES_32, _IN_PARENT, _FLAGS, _PAGES = 1, 2, 3, 4, 5
_PRESENT = 1 << 2  # flags: the pages are in the pages file
_NAME = re.compile(r"pagemap-(?:shmem-)?([0-9]{1,20})\.img")
_MAX_BYTES = 64 << 20  # of one pagemap: some three million ranges, more than a kernel lets a process map

Range = tuple[int, int]  # address, number of pages


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
            name, ranges = _read(path)
            sizes = _sizes(ranges, (directory / name).stat().st_size, window_bytes)
        except (BadImageError, OSError):
            continue
        if sizes is None or name in claimed:  # two that claim one file: whatever that is, it is not understood
            found.pop(name, None)
        else:
            found[name] = PagesCut(sizes.tobytes(), 0 if "shmem" in path.name else int(match[1]))
        claimed.add(name)
    return found


def _read(path: Path) -> tuple[str, Iterator[Range]]:
    """The name of the pages file, and the ranges that are in it."""
    if path.stat().st_size > _MAX_BYTES:
        raise BadImageError(f"{path.name} is too large")
    records = protobuf.records(path, _PAGEMAP_MAGIC)
    head = next(records, {})
    number = _last(head, _HEAD_PAGES_ID)
    if number is None:
        raise BadImageError(f"{path.name} does not begin with its head")
    return f"pages-{number}.img", _ranges(records)


def _ranges(records: Iterable[protobuf.Fields]) -> Iterator[Range]:
    for fields in records:
        address, pages = _last(fields, _VADDR), _last(fields, _PAGES)
        if pages is None:
            pages = _last(fields, _PAGES_32)
        if address is None or pages is None:
            raise BadImageError("a range of a pagemap has no address or no length")
        flags = _last(fields, _FLAGS)
        if flags is None:  # what CRIU takes an entry without flags for
            flags = 0 if _last(fields, _IN_PARENT) else _PRESENT
        if flags & _PRESENT:
            yield address, pages


def _last(fields: protobuf.Fields, number: int) -> int | None:
    value = fields.get(number, [None])[-1]
    return value if isinstance(value, int) else None


def _sizes(ranges: Iterable[Range], file_bytes: int, window_bytes: int) -> array[int] | None:
    """The sizes of the chunks: the pages of one window each, windows being multiples of `window_bytes` in the address
    space. None unless the ranges ascend and make up the file."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    window_bytes = max(window_bytes, page_bytes)
    sizes = array("I")
    window = -1  # of the last chunk
    behind = total = 0
    for address, pages in ranges:
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
