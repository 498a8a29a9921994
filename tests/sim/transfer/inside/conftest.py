"""What the checks share: GPUs, an arena that can be looked into, and memory with known contents."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from woodfrog._native import transfer

MIB = 1 << 20
ARENA_BYTES = 256 * MIB


class View:
    """An arena, and its bytes as Python sees them through the same memfd."""

    def __init__(self, size_bytes: int) -> None:
        self.arena = transfer.Arena(size_bytes)
        self.arena.register()
        self.bytes = mmap.mmap(self.arena.fd, size_bytes)

    def put(self, offset: int, data: bytes) -> None:
        self.bytes[offset : offset + len(data)] = data

    def get(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size]

    def close(self) -> None:
        self.bytes.close()
        self.arena.close()


@pytest.fixture
def view() -> Iterator[View]:
    view = View(ARENA_BYTES)
    yield view
    view.close()


@pytest.fixture
def device() -> transfer.Device:
    return transfer.Device(0)


@pytest.fixture
def filled(view: View, device: transfer.Device) -> Iterator[Callable[..., list[transfer.Memory]]]:
    """Makes Memories that hold given bytes; releases them in the end."""
    made: list[transfer.Memory] = []

    def fill(contents: Sequence[bytes], on: transfer.Device | None = None) -> list[transfer.Memory]:
        memories = (on or device).create_memories([rounded(len(data)) for data in contents])
        made.extend(memories)
        for memory, data in zip(memories, contents, strict=True):
            view.put(0, data)
            transfer.refill([(memory, 0, 0, len(data))], view.arena)
        view.put(0, bytes(max(map(len, contents), default=0)))
        return memories

    yield fill
    for memory in made:
        memory.release()


def rounded(size: int) -> int:
    """To the granularity of physical GPU memory."""
    return -(-size // (2 * MIB)) * (2 * MIB)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere, the same for the same seed."""
    return random.Random(seed).randbytes(size)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)
