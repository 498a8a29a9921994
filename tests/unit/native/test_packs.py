"""What is written into a pack comes out of it, whatever its size, encoding and source, as docs/format.md says."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer
from woodfrog.store import files

from . import packing
from .packing import CHUNK, KIB, MIB, PAGE, digest, filled, floats, new_file, noise, reading, text

pytestmark = pytest.mark.usefixtures("file_way")


MODES = ["none", "lz4", "zstd", "auto"]
SIZES = [1, 15, 16, 17, 255, PAGE - 1, PAGE, PAGE + 1, 64 * KIB - 1, 64 * KIB, 100_001, MIB]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with new_file(tmp_path) as fd:
        yield fd


@pytest.fixture
def other_fd(tmp_path: Path) -> Iterator[int]:
    with new_file(tmp_path) as fd:
        yield fd


def mixed(seed: int = 0) -> list[bytes]:
    """Chunks of many sizes and kinds, some of them twice, some of zeros."""
    made = [kind(size, seed + i) for i, size in enumerate(SIZES) for kind in (noise, text, floats)]
    return [*made, bytes(PAGE), bytes(77), made[0], made[20], *(noise(64 * KIB, seed + 100 + i) for i in range(40))]


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_is_what_the_format_says(fd: int, mode: str) -> None:
    contents = mixed()
    with filled(contents) as source:
        packed, name = transfer.write_pack(fd, source.chunks, [source.arena], compress=mode)
    records = packing.records(packed)
    assert [record.digest for record in records] == [digest(data) for data in contents]
    assert [record.raw for record in records] == [len(data) for data in contents]
    found, parsed_name, parsed = packing.parse(packing.content(fd))
    assert parsed_name == name
    assert sorted(found) == sorted(records)
    assert sorted(parsed) == sorted(contents)


@pytest.mark.parametrize("mode", MODES)
def test_scanning_gives_what_writing_gave(fd: int, mode: str) -> None:
    with filled(mixed()) as source:
        packed, name = transfer.write_pack(fd, source.chunks, [source.arena], compress=mode)
    for options in ({}, {"contents": True}, {"salvage": True}):
        scanned, scanned_name = transfer.scan_pack(fd, **options)
        assert scanned_name == name
        assert sorted(packing.records(scanned)) == sorted(packing.records(packed))
        assert scanned == b"".join(packing.RECORD.pack(*r) for r in sorted(packing.records(packed), key=lambda r: r[1]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 5])
def test_chunks_come_back_into_the_arena_and_into_files(fd: int, other_fd: int, mode: str, threads: int) -> None:
    data = noise(5 * MIB, 1) + text(3 * MIB + 100) + floats(2 * MIB) + bytes(MIB) + noise(4097, 2)
    chunk = 64 * KIB
    contents = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    index = transfer.ChunkIndex(chunk)
    with filled(contents) as source, ExitStack() as stack:
        missing = packing.numbers(index.missing(source.digests))
        assert len(missing) == len(contents) - (MIB // chunk - 1), "chunks of zeros are not to be stored"
        chosen = b"".join(source.chunks[at * 48 : at * 48 + 48] for at in missing)
        packed, _ = transfer.write_pack(fd, chosen, [source.arena], compress=mode, threads=threads)
        index.add(3, packed)
        where = index.find(source.digests)
        # Open for reading only, as packs of a local store are: past the page cache.
        fd = stack.enter_context(reading(fd))
        assert transfer.check_packs(source.digests, where, {3: fd}) == []
        progress = transfer.Progress()
        target = transfer.Arena(-(-len(data) // PAGE) * PAGE)
        with mmap.mmap(target.fd, target.size_bytes) as view:
            view[:] = b"\xff" * target.size_bytes
            transfer.refill_arena_from_packs(
                target, [(0, len(data))], source.digests, where, {3: fd},
                chunk_bytes=chunk, threads=threads, progress=progress,
            )  # fmt: skip
            assert view[: len(data)] == data
            assert not view[len(data) :].strip(b"\xff"), "nothing behind the range is touched"
        assert progress.bytes_done == progress.bytes_total == len(data)
        os.pwrite(other_fd, b"\xee" * 3 * MIB, 0)
        transfer.extract_from_packs(
            [(other_fd, 555, len(data))], source.digests, where, {3: fd}, chunk_bytes=chunk, threads=threads
        )
        assert packing.content(other_fd) == b"\xee" * 555 + data
        assert transfer.hash_pieces([(other_fd, 555, len(data))], chunk_bytes=chunk) == source.digests
        target.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([noise, text, floats, lambda size, seed: bytes(size)]), st.integers(1, 200_000)),
        min_size=1,
        max_size=12,
    ),
    mode=st.sampled_from(MODES),
    from_file=st.booleans(),
    threads=st.integers(1, 4),
)
def test_any_chunks_from_arena_or_file_come_back(
    tmp_path: Path, kinds: list[tuple[object, int]], mode: str, from_file: bool, threads: int
) -> None:
    contents = [kind(size, i) for i, (kind, size) in enumerate(kinds)]  # type: ignore[operator]
    with filled(contents) as source, new_file(tmp_path) as fd, new_file(tmp_path) as file, new_file(tmp_path) as out:
        os.pwrite(file, b"x" * 10 + b"".join(contents), 0)
        at, chunks = 10, []
        for i, data in enumerate(contents):
            second = from_file and i % 2 == 1
            chunks.append(CHUNK.pack(digest(data), at if second else source.offsets[i], len(data), int(second)))
            at += len(data)
        packed, name = transfer.write_pack(fd, b"".join(chunks), [source.arena, file], compress=mode, threads=threads)
        _, parsed_name, parsed = packing.parse(packing.content(fd))
        assert (sorted(parsed), parsed_name) == (sorted(contents), name)
        assert transfer.scan_pack(fd, contents=True)[1] == name
        where = packing.locate(packed)
        pieces, at = [], 0
        for data in contents:
            pieces.append((out, at, len(data)))
            at += len(data)
        transfer.extract_from_packs(pieces, source.digests, where, {0: fd}, chunk_bytes=256 * KIB)
        assert packing.content(out) == b"".join(contents)


@pytest.mark.parametrize("access", [os.O_RDWR, os.O_WRONLY])
def test_files_in_memory_get_the_same_bytes_mapped_or_written(fd: int, access: int) -> None:
    """By many threads mapped where that is possible, which a file open for writing only is not. What is around the
    pieces stays."""
    contents = [noise(64 * KIB, i) if i % 5 else bytes(64 * KIB) for i in range(160)]
    memory = os.memfd_create("out")
    os.pwrite(memory, b"\xee" * 9 * MIB, 0)
    out = os.open(f"/proc/self/fd/{memory}", access)
    with filled(contents) as source:
        packed, _ = transfer.write_pack(fd, source.chunks, [source.arena])
        pieces = [(out, 555, 40 * 64 * KIB), (out, 5 * MIB + 1, 120 * 64 * KIB)]
        transfer.extract_from_packs(
            pieces, source.digests, packing.locate(packed), {0: fd}, chunk_bytes=64 * KIB, threads=8
        )
    first, second = b"".join(contents[:40]), b"".join(contents[40:])
    expected = b"\xee" * 555 + first + b"\xee" * (5 * MIB + 1 - 555 - len(first)) + second
    assert packing.content(memory) == expected
    os.close(out)
    os.close(memory)


def test_chunks_of_zeros_become_holes(fd: int, tmp_path: Path) -> None:
    chunk = 64 * KIB
    index = transfer.ChunkIndex(chunk)
    digests = digest(bytes(chunk)) * 1024 + digest(bytes(100))
    where = index.find(digests, packing.sizes([chunk] * 1024 + [100]))
    assert {location.pack for location in packing.locations(where)} == {transfer.ZERO}
    with new_file(tmp_path) as new, new_file(tmp_path) as old:
        os.pwrite(old, b"\xff" * 80 * MIB, 0)
        for file in (new, old):
            transfer.extract_from_packs([(file, 0, 64 * MIB + 100)], digests, where, {}, chunk_bytes=chunk)
        assert os.fstat(new).st_size == 64 * MIB + 100
        assert os.fstat(new).st_blocks * 512 < MIB
        assert os.fstat(old).st_blocks * 512 < 17 * MIB
        assert packing.content(old) == bytes(64 * MIB + 100) + b"\xff" * (16 * MIB - 100)
    assert transfer.check_packs(digests, where, {}) == []


def test_compressible_chunks_get_smaller_and_others_stay_raw(fd: int) -> None:
    contents = [text(64 * KIB, i) for i in range(64)] + [noise(64 * KIB, i) for i in range(64)]
    for mode, encodings in [("lz4", {1}), ("zstd", {2, 3}), ("auto", {1, 2, 3})]:
        os.ftruncate(fd, 0)
        with filled(contents) as source:
            packed, _ = transfer.write_pack(fd, source.chunks, [source.arena], compress=mode)
        records = packing.records(packed)
        assert {record.encoding for record in records[:64]} <= encodings, mode
        assert {record.encoding for record in records[64:]} == {packing.RAW}, mode
        assert all(record.stored <= record.raw * 15 // 16 for record in records[:64])


def test_floats_of_two_bytes_are_split_where_zstd_is_allowed(fd: int) -> None:
    contents = [floats(64 * KIB, i) for i in range(32)]
    for mode in ("zstd", "auto"):
        os.ftruncate(fd, 0)
        with filled(contents) as source:
            packed, _ = transfer.write_pack(fd, source.chunks, [source.arena], compress=mode)
        assert {record.encoding for record in packing.records(packed)} == {packing.SPLIT_ZSTD}
        assert os.fstat(fd).st_size < 0.8 * 32 * 64 * KIB


def test_a_higher_level_makes_it_smaller(fd: int) -> None:
    contents = [text(MIB, i) for i in range(4)]
    reached = []
    for level in (1, 12):
        os.ftruncate(fd, 0)
        with filled(contents) as source:
            transfer.write_pack(fd, source.chunks, [source.arena], compress="zstd", level=level)
        reached.append(os.fstat(fd).st_size)
    assert reached[1] < reached[0]


def test_uncompressed_chunks_of_a_page_or_more_start_on_a_page(fd: int) -> None:
    with filled(mixed()) as source:
        packed, _ = transfer.write_pack(fd, source.chunks, [source.arena], compress="auto")
    raw = [r for r in packing.records(packed) if r.encoding == packing.RAW and r.raw >= PAGE]
    assert len(raw) > 20
    assert all(record.offset % PAGE == 0 for record in raw)


def test_writing_again_continues_the_pack(fd: int) -> None:
    names = []
    written: list[packing.Record] = []
    for seed in range(3):
        with filled(mixed(seed)) as source:
            packed, name = transfer.write_pack(fd, source.chunks, [source.arena], compress=MODES[seed])
        written += packing.records(packed)
        names.append(name)
    found, name, _ = packing.parse(packing.content(fd))
    assert sorted(found) == sorted(written)
    assert name == names[-1] == transfer.scan_pack(fd)[1]
    assert len(set(names)) == 3


def test_a_file_that_is_no_pack_is_not_continued(fd: int) -> None:
    os.pwrite(fd, noise(3 * PAGE), 0)
    before = packing.content(fd)
    with filled([b"abc"]) as source, pytest.raises(transfer.IntegrityError, match="no segment"):
        transfer.write_pack(fd, source.chunks, [source.arena])
    assert packing.content(fd) == before


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_bytes_that_are_not_their_digests_are_never_written(fd: int, mode: str) -> None:
    with filled([noise(64 * KIB, i) for i in range(500)]) as source:
        transfer.write_pack(fd, source.chunks[: 48 * 3], [source.arena])
        before = packing.content(fd)
        with mmap.mmap(source.arena.fd, source.arena.size_bytes) as view:
            for chunk in (77, 321):
                view[source.offsets[chunk] + 5] ^= 1
        with pytest.raises(transfer.IntegrityError) as caught:
            transfer.write_pack(fd, source.chunks, [source.arena], compress=mode)
    assert caught.value.chunk == 77
    assert packing.content(fd) == before, "a failed write leaves the file as it was"


def test_a_source_file_that_is_too_short_is_an_error(fd: int, other_fd: int) -> None:
    os.pwrite(other_fd, bytes(1000), 0)
    with pytest.raises(transfer.TransferError, match="ends at offset 1000") as caught:
        transfer.write_pack(fd, CHUNK.pack(digest(bytes(1001)), 0, 1001, 0), [other_fd])
    assert caught.value.code == -errno.ENODATA
    assert os.fstat(fd).st_size == 0


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        (b"", {}, "no chunks"),
        (b"x" * 47, {}, "not a multiple of 48"),
        (CHUNK.pack(bytes(32), 0, 0, 0), {}, "0 bytes"),
        (CHUNK.pack(bytes(32), 0, (64 << 20) + 1, 0), {}, "1 to 67108864"),
        (CHUNK.pack(bytes(32), 0, 10, 1), {}, "source that is not given"),
        (CHUNK.pack(bytes(32), MIB, 1, 0), {}, "arena"),
        (CHUNK.pack(bytes(32), 2**64 - 1, 10, 0), {}, "arena"),
        (CHUNK.pack(bytes(32), 0, 10, 0), {"compress": "brotli"}, "none, lz4, zstd or auto"),
        (CHUNK.pack(bytes(32), 0, 10, 0), {"compress": "zstd", "level": 20}, "level"),
        (CHUNK.pack(bytes(32), 0, 10, 0), {"compress": "lz4", "level": 1}, "only zstd has levels"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    fd: int, chunks: bytes, options: dict[str, object], message: str
) -> None:
    with filled([bytes(MIB)]) as source, pytest.raises(transfer.TransferError, match=message) as caught:
        transfer.write_pack(fd, chunks, [source.arena], **options)  # type: ignore[arg-type]
    assert caught.value.code == -errno.EINVAL
    assert os.fstat(fd).st_size == 0


def test_a_cancelled_write_stops_and_leaves_the_file_as_it_was(fd: int) -> None:
    data = noise(64 * KIB)
    with filled([data]) as source:
        chunks = source.chunks * 20_000  # 1.2 GiB, of the same bytes
        progress = transfer.Progress()
        raised: list[BaseException] = []

        def write() -> None:
            try:
                transfer.write_pack(fd, chunks, [source.arena], compress="zstd", level=19, progress=progress)
            except transfer.CancelledError as error:
                raised.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        while progress.bytes_total == 0:  # until it has begun
            thread.join(0.001)
        progress.cancel()
        thread.join()
    assert len(raised) == 1
    assert os.fstat(fd).st_size == 0


def test_reading_can_be_cancelled(fd: int, other_fd: int) -> None:
    progress = transfer.Progress()
    progress.cancel()
    size = 64 * KIB
    with filled([noise(size)]) as source:
        packed, _ = transfer.write_pack(fd, source.chunks, [source.arena])
        stored = (source.digests, packing.locate(packed), {0: fd})
        arena, ranges, pieces = source.arena, [(0, size)], [(other_fd, 0, size)]
        with pytest.raises(transfer.CancelledError):
            transfer.check_packs(*stored, progress=progress)
        with pytest.raises(transfer.CancelledError):
            transfer.extract_from_packs(pieces, *stored, chunk_bytes=size, progress=progress)
        with pytest.raises(transfer.CancelledError):
            transfer.refill_arena_from_packs(arena, ranges, *stored, chunk_bytes=size, progress=progress)
        with pytest.raises(transfer.CancelledError):
            transfer.hash_pieces([(fd, 0, PAGE)], chunk_bytes=PAGE, progress=progress)
        with pytest.raises(transfer.CancelledError):
            transfer.scan_pack(fd, contents=True, progress=progress)


def test_digests_of_files_are_those_of_their_chunks(fd: int, other_fd: int) -> None:
    first, second = noise(3 * MIB + 5), text(777)
    os.pwrite(fd, first, 0)
    os.pwrite(other_fd, second, 0)
    pieces = [(fd, 0, len(first)), (other_fd, 7, 700), (fd, 100, 0), (other_fd, 0, 777)]
    progress = transfer.Progress()
    digests = transfer.hash_pieces(pieces, chunk_bytes=16 * KIB, progress=progress)
    parts = [first, second[7:707], second]
    assert digests == b"".join(digest(p[at : at + 16 * KIB]) for p in parts for at in range(0, len(p), 16 * KIB))
    assert progress.bytes_done == progress.bytes_total == sum(map(len, parts))
    with pytest.raises(transfer.TransferError, match="ends at offset"):
        transfer.hash_pieces([(other_fd, 0, 778)], chunk_bytes=16 * KIB)


def test_files_are_cut_into_chunks_of_sizes_that_are_given(fd: int, other_fd: int, tmp_path: Path) -> None:
    first, second = noise(5 * PAGE), noise(2 * PAGE + 7, 1)
    os.pwrite(other_fd, first + second, 0)
    pieces = [(other_fd, 0, len(first)), (other_fd, len(first), len(second))]
    sizes = [PAGE, 3 * PAGE, PAGE, 2 * PAGE, 7]
    digests = transfer.hash_pieces(pieces, chunk_bytes=16 * KIB, sizes=packing.sizes(sizes))
    whole, at, expected = first + second, 0, b""
    rows = []
    for size in sizes:
        expected += digest(whole[at : at + size])
        rows.append(CHUNK.pack(digest(whole[at : at + size]), at, size, 0))
        at += size
    assert digests == expected
    packed, _ = transfer.write_pack(fd, b"".join(rows), [other_fd], cached=True)
    where = packing.locate(packed)
    with new_file(tmp_path) as out:
        there = [(out, 0, len(first)), (out, len(first), len(second))]
        transfer.extract_from_packs(there, digests, where, {0: fd}, chunk_bytes=16 * KIB, sizes=packing.sizes(sizes))
        assert packing.content(out) == whole


@pytest.mark.parametrize(
    "sizes",
    [[], [2 * PAGE], [3 * PAGE + 1], [PAGE, 0, PAGE, PAGE + 1], [100, 3 * PAGE - 99], [5 * PAGE], [PAGE] * 4 + [1]],
)
def test_sizes_that_do_not_make_up_the_pieces_are_refused(other_fd: int, sizes: list[int]) -> None:
    os.pwrite(other_fd, noise(3 * PAGE + 1), 0)
    with pytest.raises(transfer.TransferError):
        transfer.hash_pieces([(other_fd, 0, 3 * PAGE + 1)], chunk_bytes=2 * PAGE, sizes=packing.sizes(sizes))


def test_a_pack_in_memory_has_smaller_segments(tmp_path: Path) -> None:
    """What was hashed is copied while it is in the processor's cache."""
    contents = [noise(64 * KIB, i) for i in range(160)]
    segments = {}
    for place in (Path("/dev/shm"), tmp_path):
        with new_file(place) as descriptor, filled(contents) as source:
            packed, name = transfer.write_pack(descriptor, source.chunks, [source.arena])
            assert transfer.scan_pack(descriptor, contents=True)[1] == name
            offsets = sorted(record.offset for record in packing.records(packed))
            gaps = [after - before for before, after in itertools.pairwise(offsets)]
            segments[place] = 1 + sum(gap > 64 * KIB for gap in gaps)  # a header between two chunks
    assert segments[Path("/dev/shm")] == 10
    assert segments[tmp_path] == 2 or files.is_in_memory(tmp_path)
