"""No byte of a pack can be changed or lost unnoticed; damage costs what it hits; hostile packs cost bounded time."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import lz4.block
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from . import packing
from .packing import KIB, LZ4, MIB, PAGE, RAW, SPLIT_ZSTD, ZSTD, Location, build_header, digest, filled, noise, text

pytestmark = pytest.mark.usefixtures("file_way")


LARGEST_RAW = 64 * MIB


@pytest.fixture
def fd() -> Iterator[int]:
    """In memory: it is changed tens of thousands of times."""
    fd = os.memfd_create("pack")
    yield fd
    os.close(fd)


def write(fd: int, *groups: list[bytes], compress: str = "auto") -> tuple[list[packing.Record], bytes]:
    """A pack with a segment a group."""
    written: list[packing.Record] = []
    name = b""
    for contents in groups:
        with filled(contents) as source:
            packed, name = transfer.write_pack(fd, source.chunks, [source.arena], compress=compress, threads=1)
        written += packing.records(packed)
    return written, name


SMALL = ([noise(300, 1), text(3000, 2)], [noise(PAGE, 3), noise(100, 4)], [text(2000, 5)])


def test_every_flipped_byte_is_found_or_changes_nothing(fd: int) -> None:
    written, _ = write(fd, *SMALL)
    whole = packing.content(fd)
    assert len(whole) == 28 * KIB
    digests = b"".join(record.digest for record in written)
    where = packing.locate(b"".join(packing.RECORD.pack(*record) for record in written))
    owner = {at: i for i, record in enumerate(written) for at in range(record.offset, record.offset + record.stored)}
    harmless = 0
    for at, value in enumerate(whole):
        os.pwrite(fd, bytes([value ^ (1 << at % 8)]), at)
        bad = transfer.check_packs(digests, where, {0: fd}, threads=1)
        if at in owner and bad == [] and written[owner[at]].encoding != RAW:
            harmless += 1  # there are other LZ4 blocks and Zstandard frames of the same bytes
            packing.parse(packing.content(fd))
            transfer.scan_pack(fd, contents=True, threads=1)
        else:
            assert bad == ([owner[at]] if at in owner else [])
            with pytest.raises(transfer.IntegrityError, match="damaged at offset"):
                transfer.scan_pack(fd, contents=True, threads=1)
        os.pwrite(fd, bytes([value]), at)
    assert harmless < 0.2 * sum(record.stored for record in written if record.encoding != RAW)
    assert transfer.scan_pack(fd, contents=True)[0] != b""


def test_every_flipped_byte_of_a_header_is_found_without_reading_the_contents(fd: int) -> None:
    write(fd, *SMALL)
    whole = packing.content(fd)
    for at in [*range(4 * KIB), *range(8 * KIB, 12 * KIB)]:
        os.pwrite(fd, bytes([whole[at] ^ 0x80]), at)
        with pytest.raises(transfer.IntegrityError, match="damaged at offset"):
            transfer.scan_pack(fd)
        os.pwrite(fd, whole[at : at + 1], at)


def test_every_cut_is_found(fd: int) -> None:
    _, name = write(fd, *SMALL)
    whole = packing.content(fd)
    ends = {8 * KIB, 20 * KIB}  # where segments end
    for length in range(len(whole) - 1, -1, -1):
        os.ftruncate(fd, length)
        if length in ends:
            assert transfer.scan_pack(fd)[1] != name
        else:
            with pytest.raises(transfer.IntegrityError, match=r"ends within|empty"):
                transfer.scan_pack(fd)


def test_exchanged_and_foreign_segments_change_the_name(fd: int) -> None:
    _, name = write(fd, *SMALL)
    whole = packing.content(fd)
    parts = [whole[: 8 * KIB], whole[8 * KIB : 20 * KIB], whole[20 * KIB :]]
    for order in ([1, 0, 2], [0, 1], [0, 1, 2, 2], [2, 1, 0]):
        packing.put(fd, b"".join(parts[i] for i in order))
        assert transfer.scan_pack(fd, contents=True)[1] != name


def test_a_damaged_chunk_is_named_and_does_not_come_out(fd: int) -> None:
    size, contents = 100 * 64 * KIB, [noise(64 * KIB, i) for i in range(100)]
    written, _ = write(fd, contents)
    where = packing.locate(b"".join(packing.RECORD.pack(*record) for record in written))
    stored = (b"".join(map(digest, contents)), where, {0: fd})
    for chunk in (90, 33):
        os.pwrite(fd, b"damage", written[chunk].offset + 1000)
    assert transfer.check_packs(*stored) == [33, 90]
    written_to, mapped = os.memfd_create("written"), os.memfd_create("mapped")  # by few threads, and by many
    with filled([bytes(size)]) as place:
        with pytest.raises(transfer.IntegrityError, match="chunk 33 does not have the digest") as caught:
            transfer.refill_arena_from_packs(place.arena, [(0, size)], *stored, chunk_bytes=64 * KIB)
        assert (caught.value.chunk, caught.value.code) == (33, -errno.EBADMSG)
        for out, threads in ((written_to, 2), (mapped, 8)):
            with pytest.raises(transfer.IntegrityError, match="chunk 33 does not have the digest"):
                transfer.extract_from_packs([(out, 0, size)], *stored, chunk_bytes=64 * KIB, threads=threads)
            assert b"damage" not in packing.content(out)
            os.close(out)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"magic": b"WFRGIMG\0"}, "no segment"),
        ({"version": 2}, "version is unknown"),
        ({"records": 0}, "number of chunks"),
        ({"records": 2049}, "number of chunks"),
        ({"records": 2**32 - 1}, "number of chunks"),
        ({"records": 85}, "length does not fit"),
        ({"header_bytes": 8192}, "length does not fit"),
        ({"header_bytes": 0}, "length does not fit"),
        ({"reserved": 1}, "reserved field"),
        ({"payload_bytes": 8192}, "payload's length"),
        ({"payload_bytes": 2**64 - 1}, "payload's length"),
        ({"record_reserved": 1}, "record makes no sense"),
    ],
)
def test_a_header_that_says_what_it_must_not_is_refused(fd: int, changed: dict[str, int], reason: str) -> None:
    data = noise(100)
    entry = (digest(data), 100, 100, RAW)
    packing.put(fd, build_header([entry]) + data.ljust(PAGE, b"\0"))
    assert len(transfer.scan_pack(fd, contents=True)[0]) == packing.RECORD.size
    packing.put(fd, build_header([entry], **changed) + data.ljust(PAGE, b"\0"))
    with pytest.raises(transfer.IntegrityError, match=reason):
        transfer.scan_pack(fd)
    assert transfer.scan_pack(fd, salvage=True)[0] == b""


@pytest.mark.parametrize(
    ("stored", "raw", "encoding"),
    [
        (0, 0, RAW),
        (0, 10, ZSTD),
        (10, 11, RAW),
        (11, 10, RAW),
        (10, 10, LZ4),
        (11, 10, ZSTD),
        (10, LARGEST_RAW + 1, ZSTD),
        (LARGEST_RAW + 1, LARGEST_RAW + 1, RAW),
        (10, 2**32 - 1, ZSTD),
        (10, 20, 4),
        (10, 20, 2**32 - 1),
    ],
)
def test_a_record_that_cannot_be_is_refused_everywhere(fd: int, stored: int, raw: int, encoding: int) -> None:
    packing.put(fd, build_header([(bytes(32), stored, raw, encoding)]).ljust(16 * PAGE, b"\0"))
    with pytest.raises(transfer.IntegrityError, match="record makes no sense"):
        transfer.scan_pack(fd)
    with pytest.raises(transfer.TransferError, match="record 0 makes no sense"):
        transfer.ChunkIndex(PAGE).add(0, packing.RECORD.pack(bytes(32), 0, stored, raw, encoding, 0))
    where = packing.LOCATION.pack(0, stored, raw, encoding, 0, 0)
    assert transfer.check_packs(bytes(32), where, {0: fd}) == [0]
    with filled([bytes(PAGE)]) as place, pytest.raises(transfer.TransferError):
        transfer.refill_arena_from_packs(place.arena, [(0, raw)], bytes(32), where, {0: fd}, chunk_bytes=64 * MIB)


def test_a_segment_of_too_many_bytes_is_refused(fd: int) -> None:
    entries = [(bytes(32), 10, LARGEST_RAW, ZSTD), (bytes(32), 1, 2, ZSTD)]
    packing.put(fd, build_header(entries).ljust(16 * PAGE, b"\0"))
    with pytest.raises(transfer.IntegrityError, match="larger than a segment"):
        transfer.scan_pack(fd)


def compress_all(data: bytes) -> dict[int, bytes]:
    split = data[0::2] + data[1::2]
    compressor = zstandard.ZstdCompressor(write_content_size=True)
    return {
        LZ4: lz4.block.compress(data, store_size=False),
        ZSTD: compressor.compress(data),
        SPLIT_ZSTD: compressor.compress(split),
    }


@pytest.mark.parametrize("encoding", [LZ4, ZSTD, SPLIT_ZSTD])
def test_what_decodes_to_more_or_less_than_its_record_says_is_damage(fd: int, encoding: int) -> None:
    data = bytes(LARGEST_RAW)  # a bomb: 64 MiB from some KiB
    stored = compress_all(data)[encoding]
    payload = stored.ljust(-(-len(stored) // PAGE) * PAGE, b"\0")
    for raw in (len(stored) + 1, LARGEST_RAW - 1, LARGEST_RAW):
        packing.put(fd, build_header([(digest(bytes(raw)), len(stored), raw, encoding)]) + payload)
        if raw == LARGEST_RAW:
            assert len(transfer.scan_pack(fd, contents=True)[0]) == packing.RECORD.size
            continue
        with pytest.raises(transfer.IntegrityError):
            transfer.scan_pack(fd, contents=True)
    short = compress_all(bytes(5000))[encoding]
    payload = short.ljust(PAGE, b"\0")
    packing.put(fd, build_header([(digest(bytes(5000)), len(short), 5001, encoding)]) + payload)
    with pytest.raises(transfer.IntegrityError):
        transfer.scan_pack(fd, contents=True)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mangled_headers_with_a_valid_digest_never_do_harm(fd: int, data: st.DataObject) -> None:
    entries = [(digest(noise(50, i)), 50, 50, RAW) for i in range(data.draw(st.integers(1, 5)))]
    header = bytearray(build_header(entries)[:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 32 + 48 * len(entries)))
        value = data.draw(st.binary(min_size=1, max_size=8))
        header[at : at + len(value)] = value
    header = header[: PAGE - 32]
    packing.put(fd, (bytes(header) + digest(bytes(header))).ljust(8 * PAGE, b"\0"))
    for options in ({}, {"contents": True}):
        with pytest.raises(transfer.IntegrityError):
            transfer.scan_pack(
                fd, **options
            )  # the contents are zeros, which no digest here is of, and so is what follows
    assert transfer.scan_pack(fd, salvage=True)[0] == b""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.builds(
            lambda encoding, at, value: (lambda b: b[:at] + value + b[at + len(value) :])(
                compress_all(text(4000))[encoding]
            ),
            st.sampled_from([LZ4, ZSTD, SPLIT_ZSTD]),
            st.integers(0, 300),
            st.binary(min_size=1, max_size=6),
        ),
    ),
    raw=st.integers(2, 5000),
    encoding=st.sampled_from([LZ4, ZSTD, SPLIT_ZSTD]),
)
def test_mangled_contents_are_damage_and_nothing_else(fd: int, stored: bytes, raw: int, encoding: int) -> None:
    raw = max(raw, len(stored) + 1)
    header = build_header([(bytes(32), len(stored), raw, encoding)])
    packing.put(fd, header + stored.ljust(-(-len(stored) // PAGE) * PAGE, b"\0"))
    packed, _ = transfer.scan_pack(fd)
    assert transfer.check_packs(bytes(32), packing.locate(packed), {0: fd}) == [0]
    assert transfer.scan_pack(fd, salvage=True)[0] == b""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    location=st.builds(
        Location,
        st.integers(0, 2**64 - 1) | st.integers(0, 40 * KIB),
        st.integers(0, 2**32 - 1) | st.integers(0, 8 * KIB),
        st.integers(0, 2**32 - 1) | st.just(PAGE),
        st.integers(0, 5),
        st.sampled_from([0, 1, transfer.ZERO, transfer.ABSENT]),
        st.just(0),
    )
)
def test_a_location_that_is_wrong_gives_an_error_and_no_bytes(fd: int, tmp_path: Path, location: Location) -> None:
    packing.put(fd, b"")
    write(fd, [noise(PAGE, 1)], [noise(3 * PAGE, 2)])
    where = packing.LOCATION.pack(*location)
    wanted = digest(b"something else")
    assert transfer.check_packs(wanted, where, {0: fd}) == [0]
    with packing.new_file(tmp_path) as out:
        with pytest.raises(transfer.TransferError) as caught:
            transfer.extract_from_packs([(out, 0, PAGE)], wanted, where, {0: fd}, chunk_bytes=PAGE)
        assert caught.value.code in (-errno.EBADMSG, -errno.ENOENT, -errno.EINVAL, -errno.ENODATA)
        assert not any(packing.content(out))


def test_a_chunk_that_no_pack_has_is_an_error_before_anything_moves(fd: int) -> None:
    index = transfer.ChunkIndex(PAGE)
    wanted = digest(noise(PAGE, 1)) + digest(bytes(PAGE))
    with filled([noise(2 * PAGE, 5)]) as place, mmap.mmap(place.arena.fd, 2 * PAGE) as view:
        with pytest.raises(transfer.TransferError, match="chunk 0 is in no pack") as caught:
            transfer.refill_arena_from_packs(
                place.arena, [(0, 2 * PAGE)], wanted, index.find(wanted), {}, chunk_bytes=PAGE
            )
        assert view[:] == place.contents[0]
    assert caught.value.code == -errno.ENOENT


def test_zeros_are_set_only_where_the_digest_is_of_zeros(fd: int) -> None:
    where = packing.LOCATION.pack(0, 0, PAGE, 0, transfer.ZERO, 0)
    wanted = digest(noise(PAGE))
    assert transfer.check_packs(wanted, where, {}) == [0]
    with filled([noise(PAGE)]) as place, pytest.raises(transfer.IntegrityError, match="said to be zeros"):
        transfer.refill_arena_from_packs(place.arena, [(0, PAGE)], wanted, where, {}, chunk_bytes=PAGE)


# Salvage


def salvaged(fd: int) -> list[packing.Record]:
    return packing.records(transfer.scan_pack(fd, salvage=True)[0])


def test_a_damaged_header_costs_its_segment_only(fd: int) -> None:
    written, _ = write(fd, *SMALL)
    os.pwrite(fd, b"\xff", 8 * KIB + 50)
    assert salvaged(fd) == [written[0], written[1], written[4]]


def test_a_damaged_chunk_costs_itself_only(fd: int) -> None:
    written, _ = write(fd, *SMALL)
    os.pwrite(fd, b"\xff\xff", written[2].offset + 7)
    assert salvaged(fd) == [written[0], written[1], written[3], written[4]]
    os.pwrite(fd, b"\xff", 30)  # and with the first header gone
    assert salvaged(fd) == [written[3], written[4]]


def test_of_a_pack_that_was_cut_what_is_there_is_saved(fd: int) -> None:
    written, _ = write(fd, [noise(64 * KIB, i) for i in range(20)])
    os.ftruncate(fd, written[11].offset + 100)
    assert salvaged(fd) == written[:11]


def test_a_chunk_that_ends_just_before_the_cut_is_saved(fd: int) -> None:
    written, _ = write(fd, [text(3000, i) for i in range(5)])
    os.ftruncate(fd, written[4].offset + written[4].stored)
    assert salvaged(fd) == written
    os.ftruncate(fd, written[4].offset + written[4].stored - 1)
    assert salvaged(fd) == written[:4]


def test_a_pack_inside_a_chunk_of_a_damaged_pack_adds_only_what_is_there(fd: int, tmp_path: Path) -> None:
    with packing.new_file(tmp_path) as inner:
        write(inner, [noise(PAGE, 1)], [noise(PAGE, 2)])
        nested = packing.content(inner)
    # A header that claims chunks which are not there: believed, it would make the store think that it has them.
    claimed = [(digest(noise(MIB, 9)), MIB, MIB, RAW)] * 20
    outer = [nested + build_header(claimed) + bytes(PAGE)]
    written, _ = write(fd, outer, [noise(100, 3)], [noise(200, 4)], compress="none")
    os.pwrite(fd, b"\xff", 30)
    found = [record.digest for record in salvaged(fd)]
    assert found == [digest(noise(PAGE, 1)), digest(noise(PAGE, 2)), written[1].digest, written[2].digest]


@pytest.mark.timeout(300)
def test_a_file_full_of_false_headers_is_given_up_in_bounded_time(fd: int) -> None:
    claimed = [(digest(b"not there"), MIB, MIB, RAW)] * 64
    packing.put(fd, bytes(PAGE) + build_header(claimed) * (32 * MIB // PAGE))
    assert salvaged(fd) == []


@pytest.mark.timeout(300)
def test_noise_is_no_pack_and_takes_bounded_time(fd: int) -> None:
    packing.put(fd, random.Random(1).randbytes(16 * MIB))
    assert salvaged(fd) == []
    with pytest.raises(transfer.IntegrityError, match="no segment"):
        transfer.scan_pack(fd)
