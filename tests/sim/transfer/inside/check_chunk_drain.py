"""Some chunks of GPU memory to the arena, gathered by the kernel or copied one by one."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from .conftest import ARENA_BYTES, MIB, View, noise

Filled = Callable[..., list[transfer.Memory]]
Piece = tuple[transfer.Memory, int, int]
KIB = 1 << 10
GATHER = ["kernel", "none", "auto"]
AT = 64 * MIB  # ranges begin here; below it the fixtures put what they fill memories with


def packed(positions: list[int]) -> bytes:
    return struct.pack(f"<{len(positions)}I", *positions)


def chunks_of(data: list[bytes], chunk: int) -> list[bytes]:
    return [one[at : at + chunk] for one in data for at in range(0, len(one), chunk)]


def slots_of(ranges: list[tuple[int, int]], chunk: int) -> list[int]:
    return [offset + chunk * i for offset, size in ranges for i in range(size // chunk)]


def check(
    view: View, pieces: list[Piece], data: list[bytes], positions: list[int], ranges: list[tuple[int, int]],
    chunk: int, **options: object,
) -> None:  # fmt: skip
    """The chunks are in their slots, and nothing else of the arena has changed."""
    end = max((offset + size for offset, size in ranges), default=AT) + MIB
    before = bytearray(b"\xa5" * (end - AT))
    view.put(AT, bytes(before))
    progress = transfer.Progress()
    offsets = transfer.drain_chunks(
        pieces, packed(positions), view.arena, ranges, chunk_bytes=chunk, progress=progress, **options
    )  # type: ignore[arg-type]
    slots = slots_of(ranges, chunk)[: len(positions)]
    assert offsets == struct.pack(f"<{len(slots)}Q", *slots)
    after = bytearray(view.get(AT, end - AT))
    all_chunks = chunks_of(data, chunk)
    for position, slot in zip(positions, slots, strict=True):
        wanted = all_chunks[position]
        assert after[slot - AT : slot - AT + len(wanted)] == wanted, position
        after[slot - AT : slot - AT + chunk] = before[slot - AT : slot - AT + chunk]  # the rest of it is undefined
    assert after == before
    assert progress.bytes_done == progress.bytes_total == sum(len(all_chunks[position]) for position in positions)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_selection_arrives_byte_for_byte(view: View, filled: Filled, data: st.DataObject) -> None:
    chunk = data.draw(st.sampled_from([4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB]), "chunk")
    sizes = data.draw(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=4), "sizes")
    shift = data.draw(st.sampled_from([0, 16, 512, 3]), "shift")
    contents = [noise(size + shift, size) for size in sizes]
    memories = filled([one or b"\0" for one in contents])
    pieces = [(memory, shift, size) for memory, size in zip(memories, sizes, strict=True)]
    count = sum(-(-size // chunk) for size in sizes)
    density = data.draw(st.sampled_from([0.03, 0.3, 0.7, 0.97, 1.0]), "density")
    generator = random.Random(data.draw(st.integers(0, 1000), "seed"))
    positions = [number for number in range(count) if generator.random() < density]
    room, ranges, at = 0, [], AT
    while room < len(positions):
        slots = data.draw(st.integers(0, 40), "slots") + 1
        spare = data.draw(st.sampled_from([0, 0, 4096, 1]), "spare")
        ranges.append((at, slots * chunk + min(spare, chunk - 1)))
        at += -(-ranges[-1][1] // 4096) * 4096 + data.draw(st.sampled_from([0, 4096]), "gap")
        room += slots
    if data.draw(st.booleans(), "backwards"):
        ranges.reverse()
    if at > ARENA_BYTES - MIB:
        return
    check(
        view, pieces, [one[shift:] for one in contents], positions, ranges, chunk,
        gather=data.draw(st.sampled_from(GATHER), "gather"),
        staging_bytes=data.draw(st.sampled_from([0, chunk, 3 * chunk, 8 * MIB]), "staging"),
    )  # fmt: skip
    for memory in memories:
        memory.release()


@pytest.mark.parametrize("gather", GATHER)
def test_long_runs_between_single_chunks_are_all_there(view: View, filled: Filled, gather: str) -> None:
    data = [noise(40 * MIB, 1), noise(5 * MIB + 123, 2)]
    pieces = [(memory, 0, len(one)) for memory, one in zip(filled(data), data, strict=True)]
    chunk = 64 * KIB
    count = len(chunks_of(data, chunk))
    long = set(range(100, 140)) | set(range(300, 316)) | {count - 1}
    positions = [number for number in range(count) if number in long or number % 3 == 0]
    check(view, pieces, data, positions, [(AT, 32 * MIB)], chunk, gather=gather, staging_bytes=MIB)
    check(view, pieces, data, list(range(count)), [(AT, 48 * MIB)], chunk, gather=gather)


@pytest.mark.parametrize("gather", GATHER)
def test_chunks_of_two_gpus_take_slots_in_the_order_of_the_pieces(view: View, filled: Filled, gather: str) -> None:
    gpus = [transfer.Device(0), transfer.Device(1)]
    data = [noise(2 * MIB + 5, seed) for seed in range(4)]
    memories = [filled([one], on=gpus[i % 2])[0] for i, one in enumerate(data)]
    pieces = [(memory, 0, len(one)) for memory, one in zip(memories, data, strict=True)]
    positions = [number for number in range(len(chunks_of(data, 16 * KIB))) if number % 5 not in (1, 2)]
    check(view, pieces, data, positions, [(AT, 16 * MIB)], 16 * KIB, gather=gather, staging_bytes=256 * KIB)


def test_the_largest_chunks_are_copied_as_they_lie(view: View, filled: Filled) -> None:
    data = [noise(MIB) * 66 + b"end"]
    (memory,) = filled(data)
    pieces = [(memory, 0, len(data[0]))]
    for gather in GATHER:
        check(view, pieces, data, [0, 1], [(AT, 128 * MIB)], 64 * MIB, gather=gather)


def test_slots_beyond_one_registered_piece_of_the_arena_are_filled(device: transfer.Device) -> None:
    border = 1 << 30
    view = View(border + 16 * MIB)
    (memory,) = device.create_memories([4 * MIB])
    data = noise(4 * MIB, 9)
    view.put(0, data)
    transfer.refill([(memory, 0, 0, len(data))], view.arena)
    for gather in GATHER:
        ranges = [(border - MIB - 4096, 4 * MIB)]
        positions = list(range(0, 64, 2))
        view.put(ranges[0][0], bytes(4 * MIB))
        transfer.drain_chunks(
            [(memory, 0, len(data))], packed(positions), view.arena, ranges, chunk_bytes=64 * KIB, gather=gather
        )
        for position, slot in zip(positions, slots_of(ranges, 64 * KIB), strict=False):
            assert view.get(slot, 64 * KIB) == data[position * 64 * KIB :][: 64 * KIB]
    memory.release()
    view.close()


def test_a_gpu_with_no_memory_left_is_drained_all_the_same(view: View) -> None:
    gpu = transfer.Device(transfer.device_count() - 1)
    data = noise(4 * MIB)
    (memory,) = gpu.create_memories([4 * MIB])
    view.put(0, data)
    transfer.refill([(memory, 0, 0, len(data))], view.arena)
    hogs: list[transfer.Memory] = []
    for size in (256 * MIB, 16 * MIB, 2 * MIB):
        while True:
            try:
                hogs += gpu.create_memories([size])
            except transfer.TransferError as error:
                assert error.code == 2, "CUDA_ERROR_OUT_OF_MEMORY"  # noqa: PT017
                break
    pieces = [(memory, 0, len(data))]
    check(view, pieces, [data], list(range(1, 256, 2)), [(AT, 4 * MIB)], 16 * KIB, gather="kernel")
    for one in [memory, *hogs]:
        one.release()


@pytest.mark.parametrize("gather", GATHER)
def test_nothing_to_drain_is_no_error(view: View, filled: Filled, gather: str) -> None:
    data = [noise(MIB)]
    (memory,) = filled(data)
    check(view, [(memory, 0, MIB)], data, [], [(AT, MIB)], 16 * KIB, gather=gather)
    check(view, [(memory, 0, MIB)], data, [], [], 16 * KIB, gather=gather)
    assert transfer.drain_chunks([], b"", view.arena, [], chunk_bytes=16 * KIB, gather=gather) == b""


def refused(view: View, pieces: list[Piece], positions: bytes, ranges: list[tuple[int, int]], **options: object) -> str:
    before = view.get(AT, 4 * MIB)
    chunk = options.pop("chunk", 16 * KIB)
    for gather in GATHER:
        with pytest.raises(transfer.TransferError) as caught:
            transfer.drain_chunks(
                pieces, positions, view.arena, ranges, **{"chunk_bytes": chunk, "gather": gather} | options
            )  # type: ignore[arg-type]
        assert caught.value.code == -22
    assert view.get(AT, 4 * MIB) == before, "something was moved"
    return str(caught.value)


def test_arguments_that_make_no_sense_are_refused_before_anything_moves(view: View, filled: Filled) -> None:
    first, second = filled([noise(2 * MIB, 1), noise(2 * MIB, 2)])
    pieces = [(first, 0, MIB), (second, 0, 20 * KIB)]  # 64 chunks and 2
    fits = [(AT, 2 * MIB)]
    good = packed([0, 5, 65])
    assert "no array of u32" in refused(view, pieces, good[:-1], fits)
    assert "does not come after" in refused(view, pieces, packed([0, 5, 5]), fits)
    assert "does not come after" in refused(view, pieces, packed([0, 6, 5]), fits)
    assert "there is no chunk 66" in refused(view, pieces, packed([0, 66]), fits)
    assert "there is no chunk 4294967295" in refused(view, pieces, packed([2**32 - 1]), fits)
    assert "there is no chunk 0" in refused(view, [], packed([0]), fits)
    assert "there is no chunk 0" in refused(view, [(first, 0, 0)], packed([0]), fits)
    assert "slots" in refused(view, pieces, good, [(AT, 2 * 16 * KIB)])
    assert "slots" in refused(view, pieces, good, [(AT, 16 * KIB - 1), (AT + MIB, 16 * KIB - 1)])
    assert "slots" in refused(view, pieces, good, [])
    assert "multiple of a page" in refused(view, pieces, good, [(AT + 512, 2 * MIB)])
    assert "two ranges share" in refused(view, pieces, good, [(AT, MIB), (AT + MIB - 4096, MIB)])
    assert "two ranges share" in refused(view, pieces, good, [(AT, MIB), (AT, MIB)])
    assert "does not lie within" in refused(view, pieces, good, [(ARENA_BYTES - MIB, 2 * MIB)])
    assert "does not lie within" in refused(view, pieces, good, [(2**64 - 4096, 4096)])
    assert "does not lie within" in refused(view, pieces, good, [(0, 2**64 - 1)])
    assert "does not lie within" in refused(view, [*pieces, (first, 2 * MIB, 1)], good, fits)
    assert "does not lie within" in refused(view, [*pieces, (first, 2**64 - 1, 2)], good, fits)
    assert "staging" in refused(view, pieces, good, fits, staging_bytes=2**63)
    for chunk in (0, 1, 2048, 24 * KIB, 128 * MIB, 2**63):
        assert "power of two" in refused(view, pieces, good, fits, chunk=chunk)
    with pytest.raises(transfer.TransferError, match="none of auto"):
        transfer.drain_chunks(pieces, good, view.arena, fits, chunk_bytes=16 * KIB, gather="perhaps")
    for wrong in ([(None, 0, 1)], [(first, -1, 1)], [(first, 0)]):
        with pytest.raises(TypeError):
            transfer.drain_chunks(wrong, good, view.arena, fits, chunk_bytes=16 * KIB)  # type: ignore[arg-type]


@pytest.mark.parametrize("gather", GATHER)
def test_a_drain_cancelled_before_it_begins_moves_nothing(view: View, filled: Filled, gather: str) -> None:
    data = [noise(8 * MIB)]
    (memory,) = filled(data)
    pieces, positions = [(memory, 0, 8 * MIB)], list(range(0, 512, 2))
    progress = transfer.Progress()
    progress.cancel()
    view.put(AT, bytes(8 * MIB))
    with pytest.raises(transfer.CancelledError):
        transfer.drain_chunks(
            pieces, packed(positions), view.arena, [(AT, 8 * MIB)], chunk_bytes=16 * KIB, gather=gather,
            progress=progress,
        )  # fmt: skip
    assert view.get(AT, 8 * MIB) == bytes(8 * MIB)
    check(view, pieces, data, positions, [(AT, 8 * MIB)], 16 * KIB, gather=gather)


@pytest.mark.parametrize("gather", ["kernel", "none"])
def test_a_drain_cancelled_midway_stops_with_nothing_in_flight(view: View, filled: Filled, gather: str) -> None:
    """It may be over before it can be cancelled; then it is asked of the next one."""
    data = [noise(64 * MIB)]
    (memory,) = filled(data)
    pieces, positions = [(memory, 0, 64 * MIB)], list(range(0, 4096, 2))
    for _ in range(50):
        progress = transfer.Progress()
        ended = threading.Event()

        def cancel_once_begun(progress: transfer.Progress = progress, ended: threading.Event = ended) -> None:
            while progress.bytes_total == 0 and not ended.is_set():
                pass
            progress.cancel()

        other = threading.Thread(target=cancel_once_begun)
        other.start()
        try:
            transfer.drain_chunks(
                pieces, packed(positions), view.arena, [(AT, 32 * MIB)], chunk_bytes=16 * KIB, gather=gather,
                staging_bytes=64 * KIB, progress=progress,
            )  # fmt: skip
        except transfer.CancelledError:
            assert progress.bytes_done < progress.bytes_total == 32 * MIB
            # Sees it if anything is still written to the first range.
            ranges = [(AT + 32 * MIB, 8 * 16 * KIB), (AT, 16 * KIB)]
            check(view, pieces, data, positions[:9], ranges, 16 * KIB, gather=gather)
            break
        finally:
            ended.set()
            other.join()
    else:
        pytest.fail("no drain was ever cancelled midway")
    memory.release()  # would raise if anything were still in flight
    view.arena.unregister()


@pytest.mark.parametrize("gather", ["none", "kernel"])
def test_it_takes_no_more_of_the_bus_than_it_may(view: View, filled: Filled, gather: str) -> None:
    chunk, count = 64 * KIB, 128
    content = noise(2 * count * chunk, 5)
    pieces = [(memory, 0, len(content)) for memory in filled([content])]
    begin_s = time.monotonic()
    # Every other one, so that a kernel has something to gather, in buffers of 1 MiB.
    check(
        view, pieces, [content], list(range(0, 2 * count, 2)), [(AT, count * chunk)], chunk,
        gather=gather, staging_bytes=MIB, most_bytes_per_s=16 * MIB,
    )  # fmt: skip
    assert time.monotonic() - begin_s >= count * chunk / (16 * MIB)


def test_one_that_may_take_next_to_nothing_can_be_cancelled(view: View, filled: Filled) -> None:
    content = noise(4 * MIB, 6)
    (memory,) = filled([content])
    progress = transfer.Progress()
    cancel = threading.Timer(0.05, progress.cancel)
    cancel.start()
    with pytest.raises(transfer.CancelledError):
        transfer.drain_chunks(
            [(memory, 0, 4 * MIB)], packed(list(range(64))), view.arena, [(AT, 4 * MIB)], chunk_bytes=64 * KIB,
            gather="kernel", staging_bytes=64 * KIB, most_bytes_per_s=1, progress=progress,
        )  # fmt: skip
