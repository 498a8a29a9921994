"""The benchmark's truth about increments: what changed, 64 bytes at a time, of memory whose every byte is known."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from woodfrog.image import chunks
from woodfrog.image.manifest import Allocations, Handle
from woodfrog.image.repository import ImageRepository

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "support"))

import small_images  # noqa: E402

CHUNK = small_images.CHUNK_BYTES
SIZE = 40 * CHUNK + 512


@pytest.fixture
def increments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TESTS.parent / "bench"))
    import increments

    return increments


def write(repository: ImageRepository, handles: dict[int, bytes]) -> str:
    """An image of GPU memory alone."""
    column = b"".join(map(small_images.digests, handles.values()))
    cut = chunks.Cut([len(memory) for memory in handles.values()], CHUNK)
    fds = [os.memfd_create("handle") for _ in handles]
    try:
        for fd, memory in zip(fds, handles.values(), strict=True):
            os.write(fd, memory)
        with repository.begin("bench") as writer:
            new, _ = writer.survey_gpu([column], [cut])
            columns = [chunks.select(one, new) for one in (cut.offsets(), cut.sizes, cut.pieces())]
            if new:
                writer.write_gpu(chunks.chunk_table(chunks.select_digests(column, new), *columns), fds)
            manifest = small_images.manifest(
                handles=[Handle(number, 0, len(memory), 0) for number, memory in handles.items()],
                digests=column,
                allocations=Allocations(),
                cpu=None,
                leave_running=True,
            )
            return writer.commit(manifest).reference
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_changed_lines_and_every_chunk_size_are_counted_exactly(
    increments: ModuleType, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    before = chosen.randbytes(SIZE)
    after = bytearray(before)
    for _ in range(12):
        at, size = chosen.randrange(SIZE), chosen.randrange(1, 3000)
        after[at : at + size] = bytes(byte ^ 1 for byte in after[at : at + size])
    added = chosen.randbytes(3 * CHUNK)
    with ImageRepository(tmp_path / "store") as repository:
        first, second = write(repository, {1: before}), write(repository, {1: bytes(after), 2: added})
        found = increments.changes(repository, first, second, most_bytes=1 << 30)

    def changed_bytes(block: int, whole: bool = True) -> int:
        blocks = [at for at in range(0, SIZE, block) if before[at : at + block] != bytes(after[at : at + block])]
        return sum(block if whole else min(block, SIZE - at) for at in blocks)

    assert found.changed_line_bytes == changed_bytes(64) + len(added)
    assert found.changed_chunk_bytes == changed_bytes(CHUNK, whole=False) + len(added)
    assert found.new_handle_bytes == len(added)
    assert found.sampled == 1
    assert found.sweep == {size: changed_bytes(size) + len(added) for size in increments.SWEEP_BYTES}


def test_a_sample_is_extrapolated_to_all_changed_chunks(increments: ModuleType, tmp_path: Path) -> None:
    before = random.Random(4).randbytes(40 * CHUNK)
    after = bytes(byte ^ 1 for byte in before)
    with ImageRepository(tmp_path / "store") as repository:
        first, second = write(repository, {1: before}), write(repository, {1: after})
        found = increments.changes(repository, first, second, most_bytes=4 * CHUNK)
    assert found.sampled == pytest.approx(0.1)
    assert found.changed_line_bytes == found.changed_chunk_bytes == len(after)


def test_equal_images_have_no_changes(increments: ModuleType, tmp_path: Path) -> None:
    memory = random.Random(5).randbytes(SIZE)
    with ImageRepository(tmp_path / "store") as repository:
        first, second = write(repository, {1: memory}), write(repository, {1: memory})
        found = increments.changes(repository, first, second, most_bytes=1 << 30)
    assert (found.changed_line_bytes, found.changed_chunk_bytes) == (0, 0)
    assert all(row["amplification"] is None for row in found.sweep_rows())
