"""Some chunks of GPU memory to other memory of the same GPU, by the kernel or by copies."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from .check_chunk_drain import chunks_of, packed
from .conftest import MIB, View, noise

Filled = Callable[..., list[transfer.Memory]]
KIB = 1 << 10
GATHER = ["kernel", "none", "auto"]
AT = 64 * MIB


def read(view: View, memory: transfer.Memory) -> bytes:
    transfer.drain([(memory, 0, AT, memory.size_bytes)], view.arena)
    return view.get(AT, memory.size_bytes)


def check(
    view: View, filled: Filled, data: list[bytes], positions: list[int], chunk: int, *, per_memory: int, gather: str
) -> None:
    """The chunks are in their slots, what a short one leaves is zero, and slots beyond stay as they were."""
    memories = filled([one or b"\0" for one in data])
    pieces = [(memory, 0, len(one)) for memory, one in zip(memories, data, strict=True)]
    counts = [min(per_memory, len(positions) + 2 - first) for first in range(0, len(positions) + 2, per_memory)]
    places = filled([b"\xa5" * (count * chunk) for count in counts])
    slots = [(place, 0, count * chunk) for place, count in zip(places, counts, strict=True)]
    progress = transfer.Progress()
    transfer.capture_chunks(pieces, packed(positions), slots, chunk_bytes=chunk, gather=gather, progress=progress)
    found = b"".join(read(view, place)[: count * chunk] for place, count in zip(places, counts, strict=True))
    every = chunks_of(data, chunk)
    wanted = b"".join(every[position].ljust(chunk, b"\0") for position in positions) + b"\xa5" * (2 * chunk)
    assert found == wanted
    assert progress.bytes_done == progress.bytes_total == sum(len(every[position]) for position in positions)
    for memory in [*memories, *places]:
        memory.release()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_selection_is_copied_byte_for_byte(view: View, filled: Filled, data: st.DataObject) -> None:
    chunk = data.draw(st.sampled_from([4 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB]), "chunk")
    sizes = data.draw(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=4), "sizes")
    contents = [noise(size, size) for size in sizes]
    generator = random.Random(data.draw(st.integers(0, 1000), "seed"))
    density = data.draw(st.sampled_from([0.03, 0.3, 0.7, 0.97, 1.0]), "density")
    positions = [at for at in range(len(chunks_of(contents, chunk))) if generator.random() < density]
    # A granule of memory holds whole slots: neighbouring memories are neighbouring slots.
    per_memory = data.draw(st.integers(1, 2), "granules") * max(2 * MIB // chunk, 1)
    check(view, filled, contents, positions, chunk, per_memory=per_memory, gather=data.draw(st.sampled_from(GATHER)))


@pytest.mark.parametrize("gather", GATHER)
def test_long_runs_between_single_chunks_are_all_there(view: View, filled: Filled, gather: str) -> None:
    data = [noise(20 * MIB, 1), noise(5 * MIB + 123, 2)]
    chunk = 64 * KIB
    count = len(chunks_of(data, chunk))
    long = set(range(100, 140)) | set(range(200, 216)) | {count - 1}
    positions = [number for number in range(count) if number in long or number % 3 == 0]
    check(view, filled, data, positions, chunk, per_memory=64, gather=gather)


def test_what_makes_no_sense_is_refused_before_anything_moves(filled: Filled, device: transfer.Device) -> None:
    [memory, place] = filled([noise(2 * MIB), b"\xa5" * (2 * MIB)])
    [elsewhere] = filled([b"\xa5"], on=transfer.Device(1))
    pieces, slots = [(memory, 0, 2 * MIB)], [(place, 0, MIB)]
    for positions, into in (
        (list(range(32)), slots),  # 16 slots
        ([32], slots),  # no such chunk
        ([1, 1], slots),
        ([0], [(memory, 0, MIB)]),  # its own memory
        ([0], [(elsewhere, 0, MIB)]),  # another GPU's
        ([0], [(place, 8, MIB)]),  # not aligned
        ([0], [(place, MIB, 2 * MIB)]),  # past its end
        ([0, 1], [(place, 0, 64 * KIB), (place, 0, 64 * KIB)]),
    ):
        with pytest.raises(transfer.TransferError) as refused:
            transfer.capture_chunks(pieces, packed(positions), into, chunk_bytes=64 * KIB)
        assert refused.value.code == -errno.EINVAL, positions


def test_a_cancelled_capture_ends_and_its_memory_can_be_released(filled: Filled, device: transfer.Device) -> None:
    [memory, place] = filled([noise(8 * MIB), b"\xa5" * (8 * MIB)])
    progress = transfer.Progress()
    progress.cancel()
    positions = list(range(0, 128, 2))
    with pytest.raises(transfer.CancelledError):
        transfer.capture_chunks(
            [(memory, 0, 8 * MIB)],
            packed(positions),
            [(place, 0, 8 * MIB)],
            chunk_bytes=64 * KIB,
            gather="kernel",
            progress=progress,
        )
    memory.release()
    place.release()


def test_a_drain_in_the_background_brings_the_same_bytes(view: View, filled: Filled) -> None:
    data = noise(24 * MIB, 5)
    [memory] = filled([data])
    positions = [*range(0, 384, 5), 383]
    transfer.drain_chunks(
        [(memory, 0, len(data))], packed(positions), view.arena, [(AT, 32 * MIB)], chunk_bytes=64 * KIB, background=True
    )
    every = chunks_of([data], 64 * KIB)
    assert view.get(AT, len(positions) * 64 * KIB) == b"".join(every[position] for position in positions)
