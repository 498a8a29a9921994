"""Whole extents between GPU memory and the arena."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from .conftest import ARENA_BYTES, MIB, View, noise, rounded

Filled = Callable[..., list[transfer.Memory]]


def test_thousands_of_extents_of_random_sizes_arrive_where_they_belong(view: View, device: transfer.Device) -> None:
    generator = random.Random(7)
    memories = device.create_memories([2 * MIB * generator.randint(1, 4) for _ in range(20)])
    extents = []
    for memory in memories:
        cuts = sorted(generator.sample(range(memory.size_bytes), 150))
        extents += [(memory, a, b - a) for a, b in pairwise(cuts)]
    generator.shuffle(extents)
    assert len(extents) > 2900
    at, placed = 0, []
    for memory, offset, size in extents:
        placed.append((memory, offset, at, size))
        at += size + generator.choice([0, 0, 1, 4096])
    source = noise(at, 1)
    view.put(0, source)
    transfer.refill(placed, view.arena)
    progress = transfer.Progress()
    back = [(memory, offset, ARENA_BYTES // 2 + start, size) for memory, offset, start, size in placed]
    transfer.drain(back, view.arena, progress=progress, chunk_bytes=MIB)
    for _, _, start, size in placed:
        assert view.get(ARENA_BYTES // 2 + start, size) == source[start : start + size]
    assert progress.bytes_done == progress.bytes_total == sum(size for *_, size in placed)
    for memory in memories:
        memory.release()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=6),
    chunk=st.sampled_from([4096, 64 << 10, MIB, 64 * MIB]),
    gaps=st.lists(st.integers(0, 10000), min_size=6, max_size=6),
    together=st.booleans(),
)
def test_what_is_refilled_is_what_is_drained(
    view: View, device: transfer.Device, sizes: list[int], chunk: int, gaps: list[int], together: bool
) -> None:
    whole = [rounded(size) for size in sizes]
    memories = device.create_memories(whole) if together else [device.create_memory(size) for size in whole]
    at, extents, back = 0, [], []
    for memory, size, gap in zip(memories, sizes, gaps, strict=False):
        offset = min(gap, memory.size_bytes - size)
        extents.append((memory, offset, at, size))
        back.append((memory, offset, at + 32 * MIB, size))
        at += size + gap
    data = noise(at, at)
    view.put(0, data)
    view.put(32 * MIB, bytes(at))
    transfer.refill(extents, view.arena, chunk_bytes=chunk)
    transfer.drain(back, view.arena, chunk_bytes=chunk)
    seen = bytearray(at)
    for _, _, start, size in extents:
        seen[start : start + size] = data[start : start + size]
    assert view.get(32 * MIB, at) == seen  # and nothing between the extents was touched
    for memory in memories:
        memory.release()


def test_two_gpus_are_copied_in_one_call_and_in_two_at_once(view: View, filled: Filled) -> None:
    gpus = [transfer.Device(0), transfer.Device(1)]
    contents = [noise(8 * MIB, seed) for seed in range(4)]
    memories = [filled([data], on=gpus[i % 2])[0] for i, data in enumerate(contents)]
    assert [memory.ordinal for memory in memories] == [0, 1, 0, 1]
    extents = [(memory, 0, i * 8 * MIB, 8 * MIB) for i, memory in enumerate(memories)]
    transfer.drain(extents, view.arena)
    assert view.get(0, 32 * MIB) == b"".join(contents)

    progress = transfer.Progress(32 * MIB)
    shifted = [(memory, 0, start + 64 * MIB, size) for memory, _, start, size in extents]
    threads = [
        threading.Thread(target=transfer.drain, args=(shifted[i::2], view.arena), kwargs={"progress": progress})
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.get(64 * MIB, 32 * MIB) == b"".join(contents)
    assert progress.bytes_done == progress.bytes_total == 32 * MIB


def test_nothing_to_copy_is_no_error(view: View, device: transfer.Device) -> None:
    transfer.drain([], view.arena)
    assert device.create_memories([]) == []
    assert device.import_memories([], []) == []


@pytest.mark.parametrize(
    "extent",
    [
        (0, 0, 2 * MIB + 1),
        (2 * MIB, 0, 1),
        (1, 0, 2 * MIB),
        (2**64 - 1, 0, 2),
        (0, ARENA_BYTES, 1),
        (0, ARENA_BYTES - 1, 2),
        (0, 2**64 - 1, 2),
        (0, 0, 2**64 - 1),
    ],
)
def test_a_range_outside_the_memory_or_the_arena_is_refused_before_anything_moves(
    view: View, filled: Filled, extent: tuple[int, int, int]
) -> None:
    good, other = filled([noise(2 * MIB, 1), noise(2 * MIB, 2)])
    for move in (transfer.drain, transfer.refill):
        with pytest.raises(transfer.TransferError, match="does not lie within") as caught:
            move([(other, 0, 4 * MIB, 2 * MIB), (good, *extent)], view.arena)
        assert caught.value.code == -22
    assert view.get(4 * MIB, 2 * MIB) == bytes(2 * MIB)


def test_extents_that_overlap_are_refused(view: View, filled: Filled) -> None:
    (memory,) = filled([noise(4 * MIB)])
    with pytest.raises(transfer.TransferError, match="share the arena"):
        transfer.drain([(memory, 0, 0, MIB), (memory, MIB, MIB - 1, MIB)], view.arena)
    with pytest.raises(transfer.TransferError, match="share GPU memory"):
        transfer.refill([(memory, 0, 0, MIB), (memory, MIB - 1, 8 * MIB, MIB)], view.arena)


@pytest.mark.parametrize("chunk", [0, 1, 4095, 4097, (1 << 30) + 4096])
def test_a_chunk_size_that_makes_no_sense_is_refused(view: View, filled: Filled, chunk: int) -> None:
    (memory,) = filled([noise(MIB)])
    with pytest.raises(transfer.TransferError, match="chunk size"):
        transfer.drain([(memory, 0, 0, MIB)], view.arena, chunk_bytes=chunk)


def test_arguments_of_the_wrong_kind_are_type_errors(view: View, filled: Filled) -> None:
    (memory,) = filled([noise(MIB)])
    for extent in [(None, 0, 0, 1), (memory, -1, 0, 1), (memory, 0, 0), ("m", 0, 0, 1)]:
        with pytest.raises(TypeError):
            transfer.drain([extent], view.arena)  # type: ignore[list-item]


def test_a_cancelled_copy_raises_and_leaves_everything_usable(view: View, filled: Filled) -> None:
    data = noise(16 * MIB)
    (memory,) = filled([data])
    progress = transfer.Progress()
    progress.cancel()
    with pytest.raises(transfer.CancelledError) as caught:
        transfer.drain([(memory, 0, 0, len(data))], view.arena, progress=progress)
    assert caught.value.code == -125
    assert progress.bytes_done < len(data)
    transfer.drain([(memory, 0, 0, len(data))], view.arena)
    assert view.get(0, len(data)) == data


def test_a_copy_cancelled_from_another_thread_stops_between_two_chunks(view: View, filled: Filled) -> None:
    (memory,) = filled([noise(32 * MIB)])
    for _ in range(3):
        progress = transfer.Progress()
        outcome: list[str] = []

        def drain(progress: transfer.Progress = progress, outcome: list[str] = outcome) -> None:
            try:
                transfer.drain([(memory, 0, 0, 32 * MIB)], view.arena, chunk_bytes=4096, progress=progress)
                outcome.append("done")
            except transfer.CancelledError:
                outcome.append("cancelled")

        thread = threading.Thread(target=drain)
        thread.start()
        while progress.bytes_done == 0 and thread.is_alive():
            pass
        progress.cancel()
        thread.join()
        assert outcome == ["cancelled"] or progress.bytes_done == 32 * MIB
    memory.release()  # would raise if anything were still in flight


def test_memory_in_a_copy_cannot_be_released_nor_its_arena_closed(device: transfer.Device) -> None:
    """A copy may be over before we ask; then it is asked of the next one."""
    for _ in range(50):
        view = View(32 * MIB)
        memory = device.create_memory(32 * MIB)
        progress = transfer.Progress()
        thread = threading.Thread(
            target=transfer.drain,
            args=([(memory, 0, 0, 32 * MIB)], view.arena),
            kwargs={"chunk_bytes": 4096, "progress": progress},
        )
        thread.start()
        while progress.bytes_done == 0:
            pass
        codes = []
        for attempt in (memory.release, view.arena.unregister, view.arena.close):
            try:
                attempt()
            except transfer.TransferError as error:
                codes.append(error.code)
        running = progress.bytes_done < 32 * MIB
        thread.join()
        assert progress.bytes_done == 32 * MIB, "what was in use was taken away"
        memory.release()
        view.close()
        if running:
            assert codes == [-16, -16, -16]
            return
    pytest.fail("no copy was ever met while it ran")


def test_a_copy_over_the_border_between_two_registered_pieces_is_whole(device: transfer.Device) -> None:
    border = 1 << 30
    view = View(border + 64 * MIB)
    (memory,) = device.create_memories([8 * MIB])
    data = noise(8 * MIB, 5)
    for start in (border - 4 * MIB, border - 1, border - 8 * MIB + 1, border):
        view.put(start, data)
        transfer.refill([(memory, 0, start, len(data))], view.arena)
        view.put(start, bytes(len(data)))
        transfer.drain([(memory, 0, start, len(data))], view.arena)
        assert view.get(start, len(data)) == data
    memory.release()
    view.close()
