"""CRIU's pages are cut by address: pages that come and go change the chunks around them, and no others.

More examples: WOODFROG_PAGEMAP_EXAMPLES (default 60).
"""

from __future__ import annotations

import os
import random
import struct
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog.cpu import pagemap
from woodfrog.errors import BadImageError

EXAMPLES = int(os.environ.get("WOODFROG_PAGEMAP_EXAMPLES", "60"))
COMMON, PAGEMAP = 0x54564319, 0x56084025
PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES_IN_WINDOW = 4
WINDOW = PAGES_IN_WINDOW * PAGE
BASE = 0x7F00_0000_0000
PRESENT, LAZY, PARENT = 4, 2, 1

examples = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def fields(**numbers: int) -> bytes:
    """A message of numbers; their names are f1, f2 …"""
    return b"".join(varint(int(name[1:]) << 3) + varint(value) for name, value in numbers.items())


def image(*records: bytes) -> bytes:
    return struct.pack("<II", COMMON, PAGEMAP) + b"".join(struct.pack("<I", len(one)) + one for one in records)


def entry(address: int, pages: int, flags: int = PRESENT) -> bytes:
    """As CRIU 4 writes it."""
    return fields(f1=address, f2=pages, f4=flags, f5=pages)


def runs(numbers: set[int]) -> list[tuple[int, int]]:
    """(first, count) of runs of page numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def content(number: int) -> bytes:
    return random.Random(number).randbytes(16) * (PAGE // 16)


def dump(folder: Path, numbers: set[int], pid: int = 7, pages_id: int = 1) -> bytes:
    """What CRIU writes for a process with these pages; the pages file's bytes."""
    folder.mkdir(exist_ok=True)
    data = b"".join(content(number) for number in sorted(numbers))
    (folder / f"pages-{pages_id}.img").write_bytes(data)
    records = [entry(BASE + first * PAGE, count) for first, count in runs(numbers)]
    (folder / f"pagemap-{pid}.img").write_bytes(image(fields(f1=pages_id), *records))
    return data


def sizes_of(cut: pagemap.PagesCut) -> array[int]:
    return array("I", cut.sizes)


def chunks(data: bytes, sizes: array[int]) -> list[bytes]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [data[begin:end] for begin, end in pairwise(ends)]


pages = st.sets(st.integers(0, 60), min_size=1)


@examples
@given(pages)
def test_each_chunk_holds_the_pages_of_one_window(tmp_path: Path, numbers: set[int]) -> None:
    data = dump(tmp_path, numbers)
    ((name, cut),) = pagemap.cuts(tmp_path, WINDOW).items()
    assert (name, cut.pid) == ("pages-1.img", 7)
    windows: dict[int, bytes] = {}
    for number in sorted(numbers):
        window = number // PAGES_IN_WINDOW
        windows[window] = windows.get(window, b"") + content(number)
    assert chunks(data, sizes_of(cut)) == list(windows.values())


@examples
@given(pages, st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_pages_that_come_and_go_change_only_the_chunks_of_their_windows(
    tmp_path: Path, numbers: set[int], come: set[int], go: set[int]
) -> None:
    after = (numbers | come) - go
    if not after:
        return
    made = []
    for index, those in enumerate((numbers, after)):
        folder = tmp_path / str(index)
        data = dump(folder, those)
        made.append(set(chunks(data, sizes_of(pagemap.cuts(folder, WINDOW)["pages-1.img"]))))
    touched = {number // PAGES_IN_WINDOW for number in numbers ^ after}
    assert len(made[1] - made[0]) <= len(touched)


def test_large_ranges_and_ranges_of_other_kinds_are_understood(tmp_path: Path) -> None:
    """Lazy pages are in the file; pages that are in a parent, or nowhere, are not. Older CRIU writes no flags."""
    records = [
        fields(f1=BASE + PAGE, f2=9, f4=PRESENT | LAZY),  # 3 + 4 + 2 pages
        fields(f1=BASE + 10 * PAGE, f2=100, f4=PARENT),
        fields(f1=BASE + 110 * PAGE, f2=7, f4=LAZY),
        fields(f1=BASE + 200 * PAGE, f2=1),  # no flags: present
        fields(f1=BASE + 201 * PAGE, f2=1, f3=1),  # no flags, in the parent
        fields(f1=BASE + 203 * PAGE, f2=0, f4=PRESENT, f5=1),  # the wide number counts
    ]
    (tmp_path / "pagemap-shmem-9.img").write_bytes(image(fields(f1=3), *records))
    (tmp_path / "pages-3.img").write_bytes(bytes(11 * PAGE))
    ((name, cut),) = pagemap.cuts(tmp_path, WINDOW).items()
    assert (name, cut.pid) == ("pages-3.img", 0)
    assert list(sizes_of(cut)) == [3 * PAGE, 4 * PAGE, 2 * PAGE, 2 * PAGE]


GOOD = [fields(f1=1), entry(BASE, 2)]
BAD: dict[str, bytes] = {
    "empty": b"",
    "another magic": struct.pack("<II", COMMON, PAGEMAP + 1),
    "no head": image(),
    "a head without a number": image(b"", entry(BASE, 2)),
    "cut off": image(*GOOD)[:-1],
    "a record that claims too much": image(*GOOD) + struct.pack("<I", 1 << 31),
    "no address": image(fields(f1=1), fields(f2=2, f4=PRESENT)),
    "no length": image(fields(f1=1), fields(f1=BASE, f4=PRESENT)),
    "no pages": image(*GOOD, entry(BASE + 2 * PAGE, 0)),
    "more than the file has": image(fields(f1=1), entry(BASE, 3)),
    "less than the file has": image(fields(f1=1), entry(BASE, 1)),
    "enormously more": image(fields(f1=1), entry(0, (1 << 64) - 1)),
    "descending": image(fields(f1=1), entry(BASE + PAGE, 1), entry(BASE, 1)),
    "a page twice": image(fields(f1=1), entry(BASE, 1), entry(BASE, 1)),
    "no page's address": image(fields(f1=1), entry(BASE + 1, 2)),
    "text for a number": image(fields(f1=1), varint(1 << 3 | 2) + b"\x01x" + fields(f5=2, f4=PRESENT)),
    "the pages of nobody": image(fields(f1=2), entry(BASE, 2)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_pagemap_that_is_not_understood_cuts_nothing(tmp_path: Path, what: str) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(2 * PAGE))
    (tmp_path / "pagemap-7.img").write_bytes(image(*GOOD))
    assert pagemap.cuts(tmp_path).keys() == {"pages-1.img"}
    (tmp_path / "pagemap-7.img").write_bytes(BAD[what])
    assert pagemap.cuts(tmp_path) == {}


def test_pages_that_several_claim_are_nobodys(tmp_path: Path) -> None:
    for count in range(2, 5):
        dump(tmp_path, {1, 2}, pid=count)
        assert len(pagemap.cuts(tmp_path)) == (1 if count == 2 else 0)


@examples
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_answered(tmp_path: Path, data: bytes, framed: bool) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(2 * PAGE))
    (tmp_path / "pagemap-7.img").write_bytes(image(fields(f1=1), data) if framed else data)
    for cut in pagemap.cuts(tmp_path).values():
        assert sum(sizes_of(cut)) == 2 * PAGE


def test_what_a_pagemap_says_is_read_with_places_in_the_pages_file(tmp_path: Path) -> None:
    page = PAGE
    path = tmp_path / "pagemap-12.img"
    path.write_bytes(
        image(
            fields(f1=3),
            entry(BASE, 2, PRESENT | LAZY),
            entry(BASE + 8 * page, 1, PARENT),
            entry(BASE + 9 * page, 300, LAZY),
            entry(BASE + 400 * page, 5),
        )
    )
    (tmp_path / "pagemap-shmem-7.img").write_bytes(image(fields(f1=4)))
    (tmp_path / "pagemap-9.img").write_bytes(image(fields(f1=5)))
    assert list(pagemap.paths(tmp_path)) == [9, 12]
    name, listed = pagemap.read(path)
    found = list(listed)
    assert name == "pages-3.img"
    assert [(one.pages, one.flags) for one in found] == [(2, 6), (1, 1), (300, 2), (5, 4)]
    assert [(one.pages, offset) for one, offset in pagemap.placed(found)] == [(2, 0), (5, 2 * page)]
    whole = list(pagemap.placed(found, LAZY | PRESENT))
    assert [(one.pages, offset) for one, offset in whole] == [(2, 0), (300, 2 * page), (5, 302 * page)]
    assert array("Q", pagemap.pieces(whole[:2])).tolist() == [BASE, 2 * page, 0, BASE + 9 * page, 300 * page, 2 * page]


def test_flags_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    unknown = fields(f1=BASE, f2=7, f4=LAZY, f5=7, f99=1234)
    first, last = entry(BASE - PAGE, 1, PRESENT | LAZY), entry(BASE + 100 * PAGE, 1)
    (tmp_path / "pagemap-1.img").write_bytes(image(fields(f1=3, f50=1), first, unknown, last))
    changed = pagemap.with_flags(tmp_path / "pagemap-1.img", lambda one: one.flags | PRESENT)
    assert changed == image(fields(f1=3, f50=1), first, fields(f1=BASE, f2=7, f5=7, f99=1234, f4=LAZY | PRESENT), last)
    assert pagemap.with_flags(tmp_path / "pagemap-1.img", lambda one: one.flags) == image(
        fields(f1=3, f50=1), first, unknown, last
    )


def padded(number: int, value: int) -> bytes:
    """A field whose value has a byte more than it needs: legal, and nobody's way of writing it."""
    shortest = varint(value)
    return varint(number << 3) + bytes(byte | 0x80 for byte in shortest) + b"\x00"


# Ways to write one range. All are legal; only the first ones are CRIU's.
STYLES: list[Callable[[int, int, int], bytes]] = [
    lambda address, pages, flags: fields(f1=address, f2=pages & 0xFFFF_FFFF, f4=flags, f5=pages),
    lambda address, pages, flags: fields(f1=address, f4=flags, f5=pages),
    lambda address, pages, flags: fields(f1=address, f2=pages, f4=flags),
    lambda address, pages, flags: fields(f4=flags, f5=pages, f1=address),
    lambda address, pages, flags: fields(f1=address, f2=pages, f4=flags, f5=pages, f99=7),
    lambda address, pages, flags: fields(f1=1, f4=1) + fields(f1=address, f4=flags, f5=pages),
    lambda address, pages, flags: padded(1, address) + padded(5, pages) + padded(4, flags),
    lambda address, pages, flags: fields(f1=address, f5=pages) + padded(4, flags),
    lambda address, pages, flags: fields(f1=address, f2=pages, f3=1, f4=flags, f5=pages),
]
written = st.lists(
    st.tuples(st.integers(0, 1 << 60), st.integers(1, 1 << 36), st.integers(0, 300), st.sampled_from(STYLES)),
    max_size=8,
)


@examples
@given(written)
def test_a_range_is_read_the_same_however_it_is_written(
    tmp_path: Path, ranges: list[tuple[int, int, int, Callable[[int, int, int], bytes]]]
) -> None:
    path = tmp_path / "pagemap-7.img"
    path.write_bytes(image(fields(f1=3), *(style(*one) for *one, style in ranges)))
    name, found = pagemap.read(path)
    expected = [pagemap.Entry(*one) for *one, _ in ranges]
    assert (name, list(found)) == ("pages-3.img", expected)
    more = pagemap.with_flags(path, lambda one: one.flags + 1)
    path.write_bytes(more)
    assert list(pagemap.read(path)[1]) == [pagemap.Entry(*one[:2], one.flags + 1) for one in expected]


UNREADABLE: dict[str, bytes] = {
    "no pages": image(fields(f1=3), entry(BASE, 0)),
    "more pages than there can be": image(fields(f1=3), entry(BASE, 1 << 60)),
    "more pages than a number has": image(fields(f1=3), entry(BASE, (1 << 64) - 1)),
    "an address behind all memory": image(fields(f1=3), entry((1 << 63) - PAGE, 1)),
    "more pages together than there can be": image(fields(f1=3), *[entry(0, (1 << 50) - 1)] * 3),
    "a number of eleven bytes": image(fields(f1=3), b"\x08" + b"\xff" * 20 + entry(BASE, 1)),
    "no end": image(fields(f1=3), entry(BASE, 1))[:-1],
    "a length that is not that of the record": image(fields(f1=3)) + struct.pack("<I", 200) + entry(BASE, 1),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_is_refused_by_all_who_read_a_pagemap(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pagemap-7.img"
    path.write_bytes(UNREADABLE[what])
    for look in (
        lambda: list(pagemap.read(path)[1]),
        lambda: pagemap.completed(path),
        lambda: pagemap.with_flags(path, lambda one: one.flags),
    ):
        with pytest.raises(BadImageError, match=r"pagemap-7\.img cannot be used"):
            look()


ranges = st.lists(
    st.tuples(
        st.integers(1, 1 << 33), st.integers(1, 1 << 20), st.sampled_from([PARENT, PRESENT, LAZY, PRESENT | LAZY])
    ),
    max_size=8,
)


@examples
@given(ranges)
def test_a_completed_pagemap_has_the_pages_that_were_left_out(
    tmp_path: Path, found: list[tuple[int, int, int]]
) -> None:
    path = tmp_path / "pagemap-7.img"
    entries = []
    address = BASE
    for count, gap, flags in found:
        entries.append(pagemap.Entry(address, count, flags))
        address += (count + gap) * PAGE
    path.write_bytes(image(fields(f1=3), *(entry(*one) for one in entries)))
    completed = pagemap.completed(path)
    kept = [one for one in entries if one.flags != PARENT]
    assert completed.pages_name == "pages-3.img"
    assert completed.pieces == pagemap.pieces(pagemap.placed(kept, LAZY | PRESENT))
    assert completed.size_bytes == sum(one.pages for one in kept) * PAGE
    assert completed.left_out_bytes == sum(one.pages for one in kept if one.flags == LAZY) * PAGE
    path.write_bytes(completed.pagemap)
    assert completed.pagemap == image(
        fields(f1=3), *(entry(*one) if one.flags == PARENT else entry(*one[:2], one.flags | PRESENT) for one in entries)
    )


@examples
@given(st.binary(max_size=40))
def test_any_range_is_completed_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "pagemap-7.img"
    path.write_bytes(image(fields(f1=3), data))
    try:
        completed = pagemap.completed(path)
    except BadImageError:
        return
    (found,) = pagemap.read(path)[1]
    left_out = found.flags & LAZY and not found.flags & PRESENT
    assert completed.left_out_bytes == (found.pages * PAGE if left_out else 0)


NOT_AS_CRIU_WRITES: dict[str, bytes] = {
    "no head": image(),
    "a head without a number": image(fields(f2=1)),
    "no flags": image(fields(f1=3), fields(f1=BASE, f2=1)),
    "no number of pages": image(fields(f1=3), fields(f1=BASE, f4=LAZY)),
    "another field": image(fields(f1=3), fields(f1=BASE, f2=1, f4=LAZY, f6=1)),
    "flags in two bytes": image(fields(f1=3), fields(f1=BASE, f2=1, f4=0x80 | LAZY)),
    "a number without an end": image(fields(f1=3), entry(BASE, 1, LAZY)[:-1] + b"\x80"),
}


@pytest.mark.parametrize("what", NOT_AS_CRIU_WRITES)
def test_a_pagemap_that_criu_has_not_written_so_is_not_completed(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pagemap-7.img"
    path.write_bytes(NOT_AS_CRIU_WRITES[what])
    with pytest.raises(BadImageError):
        pagemap.completed(path)
