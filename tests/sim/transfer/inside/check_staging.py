"""Copies of chunks in device memory: which slot is where, what is hashed of them, and how their memory goes back."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer
from woodfrog.errors import WoodfrogError
from woodfrog.image.chunks import Cut, packed, select_digests
from woodfrog.operations import staging as staging_module
from woodfrog.operations.concurrent import Allowance
from woodfrog.operations.data import GpuData
from woodfrog.operations.kept import Kept
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.part_increment import PartIncrement
from woodfrog.operations.staging import Staging

from .check_chunk_capture import Filled
from .check_chunk_drain import chunks_of
from .conftest import MIB, View, noise

CHUNK = 64 << 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "PIECE_BYTES", 2 * MIB)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 5 * MIB) | st.sampled_from([CHUNK, 2 * MIB, 1]), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 400)),
)
def test_what_is_hashed_is_each_captured_chunk(
    view: View, filled: Filled, device: transfer.Device, sizes: list[int], chosen: set[int]
) -> None:
    data = [noise(size, size) for size in sizes]
    cut = Cut(sizes, CHUNK)
    positions = sorted(one for one in chosen if one < len(cut))
    if not positions:
        return
    memories = filled(data)
    pieces = [(memory, 0, size) for memory, size in zip(memories, sizes, strict=True)]
    staging = Staging(device, len(positions), CHUNK)
    try:
        transfer.capture_chunks(pieces, packed(positions), staging.places(), chunk_bytes=CHUNK)
        short = [(slot, cut.sizes[positions[slot]]) for slot in cut.short_among(positions)]
        found = transfer.hash_device(staging.hashed(short), chunk_bytes=CHUNK)
        digests = transfer.hash_device(pieces, chunk_bytes=CHUNK)
        assert found == select_digests(digests, positions)
        assert found == b"".join(transfer.blake3(chunks_of(data, CHUNK)[position]) for position in positions)
    finally:
        staging.release()
        for memory in memories:
            memory.release()


def test_memory_goes_back_piece_by_piece_and_what_is_left_can_still_be_read(
    view: View, filled: Filled, device: transfer.Device
) -> None:
    data = noise(7 * MIB, 3)
    [memory] = filled([data])
    free = device.free_bytes()
    staging = Staging(device, 112, CHUNK)
    transfer.capture_chunks([(memory, 0, len(data))], packed(range(112)), staging.places(), chunk_bytes=CHUNK)
    assert device.free_bytes() == free - staging.held_bytes == free - 8 * MIB
    staging.release_below(95)
    assert device.free_bytes() == free - 4 * MIB
    pieces, numbers = staging.holding(range(100, 110))
    transfer.drain_chunks(pieces, packed(numbers), view.arena, [(64 * MIB, 10 * CHUNK)], chunk_bytes=CHUNK)
    assert view.get(64 * MIB, 10 * CHUNK) == data[100 * CHUNK : 110 * CHUNK]
    with pytest.raises(WoodfrogError, match="given back"):
        staging.holding([60, 61])
    staging.release()
    staging.release()
    assert device.free_bytes() == free


def test_without_room_nothing_is_taken(device: transfer.Device) -> None:
    free = device.free_bytes()
    with pytest.raises(transfer.TransferError) as refused:
        Staging(device, free // CHUNK + 64, CHUNK)
    assert refused.value.code == 2  # CUDA_ERROR_OUT_OF_MEMORY
    assert device.free_bytes() == free


def test_slots_that_are_kept_are_found_and_hashed_between_pieces_that_were_given_back(
    view: View, filled: Filled, device: transfer.Device
) -> None:
    data = noise(9 * MIB + 100, 4)
    [memory] = filled([data])
    cut = Cut([len(data)], CHUNK)
    staging = Staging(device, len(cut), CHUNK)
    pieces = [(memory, 0, len(data))]
    transfer.capture_chunks(pieces, packed(range(len(cut))), staging.places(), chunk_bytes=CHUNK)
    short = [(len(cut) - 1, 100)]
    runs = [(3, 40), (70, 71), (140, len(cut))]
    wanted = [slot for begin, end in runs for slot in range(begin, end)]
    found = transfer.hash_device(staging.hashed(short, runs), chunk_bytes=CHUNK)
    assert found == select_digests(transfer.hash_device(pieces, chunk_bytes=CHUNK), wanted)
    held = staging.held_bytes
    slots = array("I", [5, 31, 100, 127, len(cut) - 1])
    staging.keep(slots)
    assert staging.held_bytes == held - 4 * MIB  # of five pieces, those that hold slots 32 to 63 and 128 to 143
    parts, numbers = staging.holding(slots)
    transfer.drain_chunks(parts, packed(numbers), view.arena, [(64 * MIB, 5 * CHUNK)], chunk_bytes=CHUNK)
    expected = b"".join(data[slot * CHUNK : (slot + 1) * CHUNK] for slot in slots)
    assert view.get(64 * MIB, 5 * CHUNK) == expected.ljust(5 * CHUNK, b"\0")
    staging.release()


def test_a_copy_that_is_not_what_was_hashed_does_not_leave_the_gpu(view: View, device: transfer.Device) -> None:
    size = 4 * MIB
    devices = SimpleNamespace(by_uuid=lambda uuid: device)
    data = GpuData(devices, [HandleNote(1, size, 0, "allocation")], {0: "gpu"})  # type: ignore[arg-type]
    data.create_all()
    try:
        [part], [cut] = data.parts, data.cuts(CHUNK)
        pieces = data.pieces(part)
        view.put(0, noise(size, 1))
        transfer.refill([(pieces[0][0], 0, 0, size)], view.arena)
        digests = transfer.hash_device(pieces, chunk_bytes=CHUNK)
        position = 17
        view.put(0, b"!")  # what was hashed and what is copied differ by this
        transfer.refill([(pieces[0][0], position * CHUNK + 5, 0, 1)], view.arena)
        increment = PartIncrement(
            SimpleNamespace(arenas=None),  # type: ignore[arg-type]
            data,
            part,
            cut,
            SimpleNamespace(chunk_bytes=CHUNK),  # type: ignore[arg-type]
            {},
            0,
            everything=False,
            in_background=lambda: False,
            turn=lambda: None,
            giving_way=lambda: None,
            cow=None,
        )
        allowance = Allowance({0: device.free_bytes()}, 0)
        for new, right in (([0, 5, position - 1], True), ([5, position, 40], False)):
            increment.found(digests, array("I", new), None)
            increment.plan_capture("copy", allowance)
            increment.capture(transfer.Progress(), transfer.Progress())
            if not right:
                with pytest.raises(WoodfrogError, match="not what was hashed"):
                    increment.drain(transfer.Progress(), transfer.Progress())
            increment.release()
    finally:
        data.release()


@pytest.mark.parametrize("damaged", [None, 2, 3])
def test_of_all_that_crossed_the_bus_what_is_known_is_compared_and_the_rest_is_stored(
    view: View, device: transfer.Device, damaged: int | None
) -> None:
    size = 4 * CHUNK
    devices = SimpleNamespace(by_uuid=lambda uuid: device)
    data = GpuData(devices, [HandleNote(1, size, 0, "allocation")], {0: "gpu"})  # type: ignore[arg-type]
    [part], [cut] = data.parts, data.cuts(CHUNK)
    stored: list[bytes] = []
    writer = SimpleNamespace(
        chunk_bytes=CHUNK, threads=1, write_gpu=lambda table, sources, progress: stored.append(table)
    )
    increment = PartIncrement(
        SimpleNamespace(arenas=SimpleNamespace(arena=lambda node: view.arena)),  # type: ignore[arg-type]
        data,
        part,
        cut,
        writer,  # type: ignore[arg-type]
        {},
        0,
        everything=True,
        in_background=lambda: False,
        turn=lambda: None,
        giving_way=lambda: None,
        cow=None,
    )
    view.put(0, noise(size, 1))
    digests = transfer.hash_arena(view.arena, [(0, size)], chunk_bytes=CHUNK)
    increment.found(digests, array("I", [0, 1]), None)
    increment._kept = [Kept(range(4), array("I", [CHUNK] * 4), array("Q", range(0, size, CHUNK)), array("i", [0] * 4))]
    if damaged is None:
        increment.store(transfer.Progress())
        assert [table[:32] + table[48:80] for table in stored] == [digests[: 2 * 32]]
        return
    view.put(damaged * CHUNK + 9, b"!")
    with pytest.raises(WoodfrogError, match="what arrived in host memory is not what was hashed"):
        increment.store(transfer.Progress())
    assert stored == []
