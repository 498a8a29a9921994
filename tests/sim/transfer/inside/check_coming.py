"""Memory that is copied while the rest of it is still made: nothing is missing, and a failure leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from woodfrog._native import transfer
from woodfrog.faults import InjectedFaultError
from woodfrog.operations.coming import GROUP_ALLOCATIONS
from woodfrog.operations.data import GpuData, close_all
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.space import Piece, Space

from .conftest import MIB, View, noise

# Three groups on the first device, one on the second; of different sizes, so that they do not come in their order.
SIZES = [(1 + number % 2) * 2 * MIB for number in range(2 * GROUP_ALLOCATIONS + 3)]
HANDLES = [
    *(HandleNote(number, size, 0, "allocation") for number, size in enumerate(SIZES)),
    HandleNote(100, 4 * MIB, 1, "allocation"),
    HandleNote(101, 2 * MIB, 1, "allocation"),
]
UUIDS = {0: "0", 1: "1"}


@pytest.fixture
def arenas(view: View) -> SimpleNamespace:
    return SimpleNamespace(arena=lambda node: view.arena)


@pytest.fixture
def new_data() -> Iterator[Callable[[], GpuData]]:
    devices = SimpleNamespace(by_uuid=lambda uuid: transfer.Device(int(uuid)))
    made: list[GpuData] = []

    def new() -> GpuData:
        made.append(GpuData(devices, HANDLES, UUIDS))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for data in made:
        data.release()


def spaces_from(arenas: SimpleNamespace, begin: int, data: GpuData) -> list[Space]:
    """Room for each part, in two extents that lie the wrong way round."""
    spaces = []
    for part in data.parts:
        half = part.size_bytes // (4 * MIB) * 2 * MIB
        extents = [Piece(0, begin + half, part.size_bytes - half), Piece(0, begin, half)]
        spaces.append(Space(arenas, extents, 0))  # type: ignore[arg-type]
        begin += part.size_bytes
    return spaces


def linear(view: View, space: Space) -> bytes:
    return b"".join(view.get(extent.offset, extent.size) for extent in space.extents)


def free_bytes() -> list[int]:
    return [transfer.Device(ordinal).free_bytes() for ordinal in (0, 1)]


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_comes_later_is_copied_as_well(
    view: View, arenas: SimpleNamespace, new_data: Callable[[], GpuData]
) -> None:
    before = free_bytes()
    created = new_data()
    view.put(0, noise(created.size_bytes))
    source = spaces_from(arenas, 0, created)
    created.create_first()
    assert 0 < len(created.memories) < len(HANDLES)
    progress = created.new_progress(whole=True)
    created.refill(arenas, source, progress)  # type: ignore[arg-type]
    assert len(created.memories) == len(HANDLES)
    assert progress.bytes_done == progress.bytes_total == created.size_bytes
    fds = created.export_all()
    try:
        imported = new_data()
        imported.import_first(fds)
        assert 0 < len(imported.memories) < len(HANDLES)
        there = spaces_from(arenas, 128 * MIB, imported)
        progress = imported.new_progress(whole=True)
        imported.drain(arenas, there, progress)  # type: ignore[arg-type]
        assert progress.bytes_done == created.size_bytes
        assert [linear(view, space) for space in there] == [linear(view, space) for space in source]
    finally:
        close_all(fds)
    imported.release()
    created.release()
    assert free_bytes() == before


def test_copying_begins_before_the_rest_is_made(view: View, arenas: SimpleNamespace) -> None:
    """The second group is made only once something of the first has been copied."""
    device = transfer.Device(0)
    calls: list[int] = []

    def create(sizes: list[int], nodes: list[int]) -> list[transfer.Memory]:
        calls.append(len(sizes))
        deadline = time.monotonic() + 30
        while len(calls) > 1 and progress.bytes_done == 0:
            assert time.monotonic() < deadline, "nothing is copied before everything is there"
            time.sleep(0.001)
        return device.create_memories(sizes, nodes)

    devices = SimpleNamespace(by_uuid=lambda uuid: SimpleNamespace(create_memories=create))
    data = GpuData(devices, HANDLES[:-2], {0: "0"})  # type: ignore[arg-type]
    progress = data.new_progress(whole=True)
    try:
        data.create_first()
        data.refill(arenas, spaces_from(arenas, 0, data), progress)  # type: ignore[arg-type]
        assert calls == [GROUP_ALLOCATIONS, GROUP_ALLOCATIONS, 3]
        assert progress.bytes_done == data.size_bytes
    finally:
        data.release()


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failure_on_the_way_leaves_nothing_behind(
    arenas: SimpleNamespace, new_data: Callable[[], GpuData], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    before, fds, threads = free_bytes(), open_fds(), threading.active_count()
    monkeypatch.setenv("WOODFROG_FAULTS", f"coming.made:error:{nth}")
    data = new_data()

    def create() -> None:
        data.create_first()
        data.refill(arenas, spaces_from(arenas, 0, data), data.new_progress(whole=True))  # type: ignore[arg-type]

    with pytest.raises(InjectedFaultError):
        create()
    assert threading.active_count() == threads
    data.release()
    assert (free_bytes(), open_fds()) == (before, fds)


def test_nothing_more_is_made_after_a_cancelled_copy(arenas: SimpleNamespace, new_data: Callable[[], GpuData]) -> None:
    before, fds = free_bytes(), open_fds()
    data = new_data()
    data.create_first()
    progress = data.new_progress(whole=True)
    progress.cancel()
    with pytest.raises(transfer.CancelledError):
        data.refill(arenas, spaces_from(arenas, 0, data), progress)  # type: ignore[arg-type]
    assert len(data.memories) < len(HANDLES)
    data.release()
    assert (free_bytes(), open_fds()) == (before, fds)
