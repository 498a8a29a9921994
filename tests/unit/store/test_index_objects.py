"""Index objects: what is written is read back, and whatever else is in their place is refused in a sentence."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest
import store_images
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from store_images import CHUNK_BYTES, pattern

from woodfrog._native import transfer
from woodfrog.errors import BadImageError
from woodfrog.store import indexes, keys, records
from woodfrog.store.indexes import IndexedPack, decode, encode
from woodfrog.store.open import open_store


def records_of(count: int, seed: int) -> bytes:
    """Of chunks of 1000 bytes, back to back from 4096."""
    return b"".join(
        pattern(32, f"{seed} {number}") + struct.pack("<QIIII", 4096 + 1000 * number, 1000, 1000, 0, 0)
        for number in range(count)
    )


def pack(count: int, seed: int) -> IndexedPack:
    return IndexedPack(pattern(32, seed), 4096 + 1000 * count, records_of(count, seed))


PACKS = [pack(3, 1), pack(0, 2), pack(200, 3)]
GOOD = encode(PACKS)


def test_what_is_written_is_read_back() -> None:
    assert decode(GOOD) == PACKS
    assert decode(encode([])) == []


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_only_a_record(position: int, change: int) -> None:
    """The name finds every change; this is for whoever makes a matching name too."""
    data = GOOD[:position] + bytes([GOOD[position] ^ change]) + GOOD[position + 1 :]
    try:
        found = decode(data)
    except BadImageError:
        return
    assert [each.chunks for each in found] == [3, 0, 200]
    for each in found:
        for offset, stored in zip(records.offsets_of(each.records), records.stored_sizes_of(each.records), strict=True):
            assert offset + stored <= each.size_bytes


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.binary(max_size=300), st.integers(0, len(GOOD)).map(lambda size: GOOD[:size]), st.just(GOOD + b"x"))
)
def test_anything_else_is_refused_without_reading_past_its_end(data: bytes) -> None:
    if data != GOOD:
        with pytest.raises(BadImageError):
            decode(data)


def test_numbers_that_promise_more_than_there_is_are_refused() -> None:
    header = struct.Struct("<8sIIIIQ24x")
    for packs, count in ((2**32 - 1, 0), (0, 2**60), (3, 0), (2, 3)):
        with pytest.raises(BadImageError):
            decode(header.pack(indexes.MAGIC, 1, header.size, packs, 0, count) + bytes(48))
    with pytest.raises(BadImageError, match="version 2"):
        decode(header.pack(indexes.MAGIC, 2, header.size, 0, 0, 0))


def test_an_index_whose_records_make_no_sense_counts_as_damaged(tmp_path: Path) -> None:
    """It has its right name and its right sizes; what it says of a chunk cannot be."""
    with open_store(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        wrong = pattern(32, 1) + struct.pack("<QIIII", 4096, 1000, 1000, 77, 0)
        name = pattern(32, "pack")
        file = store.tier.new_file()
        file_bytes = 8192
        Path(f"/proc/self/fd/{file.fd}").write_bytes(bytes(file_bytes))
        store.tier.put_files([(keys.pack_key(name), file)])
        file.close()
        data = encode([IndexedPack(name, file_bytes, wrong)])
        store.tier.put_if_absent(keys.index_key(blake3(data).digest()), data)
        with store.session() as session:
            assert len(session.missing(wrong[:32])) == 4
        assert [problem.kind for problem in store.verify(store_images.digests)] == ["index-damaged"]
        assert store.repair(store_images.digests).hopeless.keys() == {keys.pack_key(name)}
        assert store.prune(store_images.digests).packs[0].action == "delete"


def test_many_records_go_into_several_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "WRITTEN_BYTES", 100 * records.RECORD_BYTES)
    packs = [pack(40, number) for number in range(7)]
    with open_store(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        assert len(indexes.write(store.tier, packs)) == 4
        assert sorted(indexes.read_all(store.tier).packs) == sorted(each.name for each in packs)
        # Once more changes nothing; a damaged one is mended.
        written = indexes.write(store.tier, packs)
        (tmp_path / "store" / written[0]).write_bytes(b"damaged")
        assert len(indexes.read_all(store.tier).damaged) == 1
        assert indexes.write(store.tier, packs) == written
        assert indexes.read_all(store.tier).damaged == {}


def test_columns_of_tables_are_what_they_say() -> None:
    table = records_of(5, 9)
    assert list(records.offsets_of(table)) == [4096 + 1000 * number for number in range(5)]
    assert list(records.stored_sizes_of(table)) == [1000] * 5
    assert records.digests_of(table) == b"".join(pattern(32, f"9 {number}") for number in range(5))
    locations = records.locations_of(table, 0x01020304)
    assert list(records.pack_column(locations)) == [0x01020304] * 5
    for number, row in enumerate(struct.iter_unpack(records.LOCATION, locations)):
        assert row == (4096 + 1000 * number, 1000, 1000, 0, 0x01020304, 0)
    chunks = records.chunk_table(records.digests_of(table), [5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [0, 0, 1, 1, 2])
    assert chunks == b"".join(
        struct.pack("<32sQII", pattern(32, f"9 {number}"), 5 + number, 1 + number, number // 2) for number in range(5)
    )
    assert records.select_rows(table, [4, 0], 56) == table[-56:] + table[:56]
    assert records.positions_of(b"\1\0\0\0\2\0\0\0") == array("I", [1, 2])
    assert list(records.running_offsets([3, 4, 5])) == [0, 3, 7]


def test_rows_that_a_table_does_not_have_are_refused() -> None:
    for positions, row_bytes in (([2], 4), ([0], 3), ([0], 0)):
        with pytest.raises(transfer.TransferError):
            records.select_rows(bytes(8), positions, row_bytes)
    assert records.select_rows(b"", [], 32) == b""
