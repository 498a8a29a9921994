"""What `diff` and the picture of `inspect` say, against memory whose every byte is known."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_images import CHUNK_BYTES, digests, manifest

from woodfrog.errors import RefusedError
from woodfrog.image import diff as diffs
from woodfrog.image import picture as pictures
from woodfrog.image.diff import CHANGED, diff
from woodfrog.image.manifest import Allocations, CpuState, FileRecord, Handle, Manifest, Process
from woodfrog.image.picture import NEW, SHARED, ZERO, picture
from woodfrog.image.spans import Marks, Span, draw, spans

MEMORY = 5 * CHUNK_BYTES + 512


def image(memory: bytes, rows: list[tuple[int, int, int]], **changes: Any) -> Manifest:
    """One handle with that memory; rows of (address, size, offset)."""
    return manifest(
        handles=[Handle(1, 0, len(memory), 0)],
        digests=digests(memory),
        allocations=Allocations.from_rows((address, size, 1, offset, 0, 0) for address, size, offset in rows),
        **changes,
    )


writes = st.lists(st.tuples(st.integers(0, MEMORY - 1), st.integers(1, 70_000)), max_size=6)
cuts = st.lists(st.integers(1, MEMORY - 1), max_size=5, unique=True)


@settings(max_examples=25, deadline=None)
@given(writes, cuts)
def test_diff_covers_every_changed_byte_and_no_chunk_without_one(written: list[tuple[int, int]], at: list[int]) -> None:
    before = random.Random(1).randbytes(MEMORY)
    after = bytearray(before)
    for offset, size in written:
        end = min(offset + size, MEMORY)
        after[offset:end] = bytes(byte ^ 0xFF for byte in after[offset:end])
    edges = [0, *sorted(at), MEMORY]
    rows = [(0x1000 + begin, end - begin, begin) for begin, end in itertools.pairwise(edges)]
    found = diff(image(before, rows), image(bytes(after), rows))
    changed = [begin != end for begin, end in zip(before, after, strict=True)]
    assert [one.address for one in found.allocations] == [row[0] for row in rows]
    for one, (_, size, offset) in zip(found.allocations, rows, strict=True):
        assert sum(span.size_bytes for span in one.spans) == size
        for begin, length, kind in one.spans:
            first, last = offset + begin, offset + begin + length
            for chunk in range(first // CHUNK_BYTES, (last - 1) // CHUNK_BYTES + 1):
                inside = any(changed[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
                assert inside == (kind == CHANGED)
        assert (one.state == "same") == (one.changed_bytes == 0)
    assert found.gpu_new_bytes == sum(
        min(CHUNK_BYTES, MEMORY - begin)
        for begin in range(0, MEMORY, CHUNK_BYTES)
        if any(changed[begin : begin + CHUNK_BYTES])
    )


def test_diff_names_allocations_that_came_went_grew_and_moved_within_their_chunk() -> None:
    memory = random.Random(2).randbytes(MEMORY)
    before = image(memory, [(0x1000, 512, 0), (0x2000, CHUNK_BYTES, CHUNK_BYTES), (0x3000, 512, 3 * CHUNK_BYTES)])
    after = image(
        memory, [(0x2000, 2 * CHUNK_BYTES, CHUNK_BYTES), (0x3000, 512, 3 * CHUNK_BYTES + 256), (0x4000, 512, 0)]
    )
    found = {one.address: one for one in diff(before, after).allocations}
    assert {address: one.state for address, one in found.items()} == {
        0x1000: "removed", 0x2000: "changed", 0x3000: "unknown", 0x4000: "added"
    }  # fmt: skip
    assert (found[0x2000].changed_bytes, found[0x4000].changed_bytes) == (CHUNK_BYTES, 512)


def test_images_with_chunks_of_other_sizes_cannot_be_compared() -> None:
    with pytest.raises(RefusedError, match="chunks"):
        diff(manifest(), manifest(chunk_bytes=2 * CHUNK_BYTES))


def files(**contents: bytes) -> CpuState:
    records = [
        FileRecord(path=path.replace("__", "-") + ".img", size_bytes=len(data), digests=digests(data))
        for path, data in contents.items()
    ]
    return CpuState(version="4.1.1", root_pid=100, files=records)


def test_diff_gives_each_process_its_files_and_the_tree_the_rest() -> None:
    old = manifest(cpu=files(core__100=b"a", core__101=b"b", pages__1=b"p" * 100, inventory=b"i"))
    new = manifest(cpu=files(core__100=b"a", core__101=b"B", pages__1=b"q" * 100, inventory=b"i"))
    found = {one.pid: one for one in diff(old, new).processes}
    assert {pid: one.state for pid, one in found.items()} == {100: "same", 101: "changed", None: "changed"}
    assert [file.path for file in found[101].files] == ["core-101.img"]
    assert [file.path for file in found[None].files if file.state == "changed"] == ["pages-1.img"]


def test_diff_gives_all_files_to_an_only_process_and_tells_what_only_moved() -> None:
    one = [Process(pid=101, command_line=["train"])]
    first, second = (random.Random(seed).randbytes(CHUNK_BYTES) for seed in (3, 4))
    old = manifest(processes=one, gpu_pid=101, cpu=files(pages__1=first + second))
    new = manifest(processes=one, gpu_pid=101, cpu=files(pages__1=b"x" * CHUNK_BYTES + first + second))
    (process,) = diff(old, new).processes
    assert (process.pid, process.changed_bytes, process.new_bytes) == (101, 3 * CHUNK_BYTES, CHUNK_BYTES)


def test_diff_names_processes_that_came_and_went() -> None:
    both = [Process(pid=100), Process(pid=101, parent_pid=100)]
    new = manifest(processes=[both[1], Process(pid=102, command_line=["later"])])
    states = {one.pid: one.state for one in diff(manifest(processes=both), new).processes}
    assert states == {100: "removed", 101: "same", 102: "added"}


def test_a_picture_tells_zero_shared_and_new_apart_byte_for_byte() -> None:
    new, shared = random.Random(5).randbytes(CHUNK_BYTES), random.Random(6).randbytes(CHUNK_BYTES)
    memory = new + bytes(CHUNK_BYTES) + shared + bytes(512)
    mine = image(memory, [(0x1000, len(memory) - 100, 0), (0x9000, 100, len(memory) - 100)], cpu=None)
    drawn = picture(mine, [digests(shared), digests(b"else")])
    assert drawn.others == 2
    assert drawn.gpu == pictures.Shares(CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 512)
    assert drawn.allocations[0].spans == [
        Span(0, CHUNK_BYTES, NEW),
        Span(CHUNK_BYTES, CHUNK_BYTES, ZERO),
        Span(2 * CHUNK_BYTES, CHUNK_BYTES, SHARED),
        Span(3 * CHUNK_BYTES, 412, ZERO),
    ]
    assert drawn.allocations[1].spans == [Span(0, 100, ZERO)]
    assert drawn.to_dict()["allocations"][0]["ranges"][0] == [0, CHUNK_BYTES, "new"]


def test_a_picture_of_an_image_alone_has_nothing_shared() -> None:
    drawn = picture(msgspec.structs.replace(manifest(), cpu=files(core__100=b"c")), [])
    assert drawn.gpu == pictures.Shares(new_bytes=manifest().gpu_bytes)
    assert drawn.cpu == pictures.Shares(new_bytes=1)


MARKS = Marks(1, "#", "+", {2: "-", 0: "."})


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200), st.integers(1, 80))
def test_a_line_of_blocks_shows_however_little_is_strong(kinds: list[int], width: int) -> None:
    size = 10 * len(kinds)
    line = draw(spans(kinds, 0, size, 10), size, MARKS, width)
    assert len(line) == min(width, size)
    assert (set(line) & {"#", "+"} != set()) == (1 in kinds)
    if set(kinds) == {0}:
        assert set(line) == {"."}


def test_spans_begin_where_the_allocation_does() -> None:
    assert spans([1, 1, 0], 15, 20, 10) == [Span(0, 15, 1), Span(15, 5, 0)]


def test_the_marks_of_diff_and_picture_have_an_ascii_form() -> None:
    for marks in (pictures.ASCII_MARKS, diffs.ASCII_MARKS):
        assert "".join([marks.full, marks.partly, *marks.others.values()]).isascii()
