"""GPU memory from packs: every chunk as its digest says, or an error; zeros are set where they are."""

from __future__ import annotations

import errno
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator

import blake3
import pytest

from woodfrog._native import transfer

from .conftest import MIB, View, noise

Filled = Callable[..., list[transfer.Memory]]
CHUNK = 64 << 10
RING = (64 * MIB, 16 * MIB)


def digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def cut(data: bytes, chunk_bytes: int = CHUNK) -> list[bytes]:
    return [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("pack")
    yield fd
    os.close(fd)


def store(view: View, fd: int, index: transfer.ChunkIndex, pack: int, contents: list[bytes], compress: str) -> None:
    """Writes what the index misses of these chunks, from the arena."""
    digests = b"".join(map(digest, contents))
    sizes = struct.pack(f"<{len(contents)}I", *map(len, contents))
    packed = index.missing(digests, sizes)
    chunks = []
    for slot, at in enumerate(struct.unpack(f"<{len(packed) // 4}I", packed)):
        view.put(slot * CHUNK, contents[at])
        chunks.append(struct.pack("<32sQII", digest(contents[at]), slot * CHUNK, len(contents[at]), 0))
    records, _ = transfer.write_pack(fd, b"".join(chunks), [view.arena], compress=compress)
    index.add(pack, records)


def read_back(view: View, memory: transfer.Memory, size: int) -> bytes:
    transfer.drain([(memory, 0, 128 * MIB, size)], view.arena)
    return view.get(128 * MIB, size)


def sample(seed: int) -> bytes:
    """Runs of data and of zeros, long and short, some data twice."""
    generator = random.Random(seed)
    parts: list[bytes] = []
    for _ in range(40):
        size = generator.choice([CHUNK, 3 * CHUNK, 9 * CHUNK])
        kind = generator.choice(["noise", "zero", "text", "again"])
        if kind == "noise":
            parts.append(generator.randbytes(size))
        elif kind == "text":
            parts.append((b"abcdefgh%d" % generator.randrange(100)) * size)
            parts[-1] = parts[-1][:size]
        elif kind == "again" and parts:
            parts.append(generator.choice(parts))
        else:
            parts.append(bytes(size))
    return b"".join(parts)


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd", "auto"])
@pytest.mark.parametrize("threads", [0, 1])
def test_memory_is_what_it_was(view: View, filled: Filled, fd: int, compress: str, threads: int) -> None:
    contents = [sample(1), sample(2)[: 5 * MIB + 4321], noise(700, 3)]
    memories = filled([noise(len(data), 50) for data in contents])
    chunks = [chunk for data in contents for chunk in cut(data)]
    index = transfer.ChunkIndex(CHUNK)
    other = os.memfd_create("pack")
    store(view, fd, index, 7, chunks[: len(chunks) // 2], compress)
    store(view, other, index, 8, chunks, "none")
    digests = b"".join(map(digest, chunks))
    where = index.find(digests, struct.pack(f"<{len(chunks)}I", *map(len, chunks)))
    assert any(location[4] == transfer.ZERO for location in struct.iter_unpack("<QIIIIQ", where))
    progress = transfer.Progress()
    transfer.refill_from_packs(
        [(memory, 0, len(data)) for memory, data in zip(memories, contents, strict=True)],
        digests, where, {7: fd, 8: other}, view.arena, *RING,
        chunk_bytes=CHUNK, threads=threads, progress=progress,
    )  # fmt: skip
    os.close(other)
    for memory, data in zip(memories, contents, strict=True):
        assert read_back(view, memory, len(data)) == data
    assert progress.bytes_done == progress.bytes_total == sum(map(len, contents))


def test_what_is_around_a_piece_stays(view: View, filled: Filled, fd: int) -> None:
    (memory,) = filled([b"\xff" * 2 * MIB])
    data = noise(CHUNK + 100, 1) + bytes(5 * CHUNK)
    index = transfer.ChunkIndex(CHUNK)
    store(view, fd, index, 0, cut(data), "auto")
    digests = b"".join(map(digest, cut(data)))
    where = index.find(digests, struct.pack("<7I", *map(len, cut(data))))
    transfer.refill_from_packs(
        [(memory, 12345, len(data))], digests, where, {0: fd}, view.arena, *RING, chunk_bytes=CHUNK
    )
    assert read_back(view, memory, 2 * MIB) == (b"\xff" * 12345 + data).ljust(2 * MIB, b"\xff")


def test_zeros_need_neither_a_pack_nor_the_bus(view: View, filled: Filled) -> None:
    (memory,) = filled([b"\xff" * 64 * MIB])
    chunks = 64 * MIB // CHUNK
    digests = digest(bytes(CHUNK)) * chunks
    where = transfer.ChunkIndex(CHUNK).find(digests)
    view.put(RING[0], b"\xaa" * RING[1])
    transfer.refill_from_packs([(memory, 0, 64 * MIB)], digests, where, {}, view.arena, *RING, chunk_bytes=CHUNK)
    assert read_back(view, memory, 64 * MIB) == bytes(64 * MIB)
    assert view.get(*RING) == b"\xaa" * RING[1]


def test_several_devices_are_filled_at_once(view: View, filled: Filled, fd: int) -> None:
    contents = [noise(4 * MIB, 1) + bytes(4 * MIB), bytes(2 * MIB) + noise(4 * MIB, 2)]
    memories = [filled([b"\xff" * len(data)], transfer.Device(i))[0] for i, data in enumerate(contents)]
    chunks = [chunk for data in contents for chunk in cut(data)]
    index = transfer.ChunkIndex(CHUNK)
    store(view, fd, index, 0, chunks, "none")
    digests = b"".join(map(digest, chunks))
    pieces = [(memory, 0, len(data)) for memory, data in zip(memories, contents, strict=True)]
    transfer.refill_from_packs(pieces, digests, index.find(digests), {0: fd}, view.arena, *RING, chunk_bytes=CHUNK)
    for memory, data in zip(memories, contents, strict=True):
        assert read_back(view, memory, len(data)) == data


def test_a_damaged_chunk_never_reaches_the_gpu(view: View, filled: Filled, fd: int) -> None:
    data = noise(16 * MIB, 4)
    (memory,) = filled([bytes(16 * MIB)])
    index = transfer.ChunkIndex(CHUNK)
    store(view, fd, index, 0, cut(data), "none")
    digests = b"".join(map(digest, cut(data)))
    where = index.find(digests)
    damaged = 99
    offset = struct.unpack_from("<Q", where, damaged * 32)[0]
    os.pwrite(fd, b"damage", offset + 50)
    with pytest.raises(transfer.IntegrityError) as caught:
        transfer.refill_from_packs(
            [(memory, 0, 16 * MIB)], digests, where, {0: fd}, view.arena, *RING, chunk_bytes=CHUNK
        )
    assert caught.value.chunk == damaged
    there = read_back(view, memory, 16 * MIB)
    assert there[damaged * CHUNK : damaged * CHUNK + CHUNK] == bytes(CHUNK)
    # Whoever compares all of it afterwards gets what was stored, and finds it by its digest.
    transfer.refill_from_packs(
        [(memory, 0, 16 * MIB)], digests, where, {0: fd}, view.arena, *RING, chunk_bytes=CHUNK, check=False
    )
    found = transfer.hash_device([(memory, 0, 16 * MIB)], chunk_bytes=CHUNK)
    wrong = [at for at in range(len(digests) // 32) if found[at * 32 :][:32] != digests[at * 32 :][:32]]
    assert wrong == [damaged]


def test_a_missing_chunk_is_an_error_before_anything_moves(view: View, filled: Filled) -> None:
    (memory,) = filled([b"\xff" * 2 * MIB])
    digests = digest(bytes(CHUNK)) * 31 + digest(b"unknown")
    where = transfer.ChunkIndex(CHUNK).find(digests)
    with pytest.raises(transfer.TransferError, match="chunk 31 is in no pack") as caught:
        transfer.refill_from_packs([(memory, 0, 2 * MIB)], digests, where, {}, view.arena, *RING, chunk_bytes=CHUNK)
    assert caught.value.code == -errno.ENOENT
    assert read_back(view, memory, 2 * MIB) == b"\xff" * 2 * MIB


def test_cancelling_stops_it(view: View, filled: Filled, fd: int) -> None:
    data = noise(CHUNK, 4)
    (memory,) = filled([bytes(64 * MIB)])
    index = transfer.ChunkIndex(CHUNK)
    store(view, fd, index, 0, [data], "none")
    chunks = 64 * MIB // CHUNK
    progress = transfer.Progress()
    raised: list[BaseException] = []

    def refill() -> None:
        try:
            for _ in range(1000):
                transfer.refill_from_packs(
                    [(memory, 0, 64 * MIB)], digest(data) * chunks, index.find(digest(data) * chunks), {0: fd},
                    view.arena, *RING, chunk_bytes=CHUNK, progress=progress,
                )  # fmt: skip
        except transfer.CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=refill)
    thread.start()
    while progress.bytes_done == 0 and thread.is_alive():
        thread.join(0.001)
    progress.cancel()
    thread.join()
    assert len(raised) == 1
    memory.release()  # nothing uses it any more


@pytest.mark.parametrize(
    ("digests", "locations", "ring", "message"),
    [
        (31, 32, RING, "31 digests"),
        (32, 33, RING, "33 locations"),
        (32, 32, (64 * MIB, CHUNK - 4096), "no room for a chunk"),
        (32, 32, (64 * MIB + 1, MIB), "multiple of a page"),
    ],
)
def test_nonsense_is_refused(
    view: View, filled: Filled, digests: int, locations: int, ring: tuple[int, int], message: str
) -> None:
    (memory,) = filled([bytes(2 * MIB)])
    index = transfer.ChunkIndex(CHUNK)
    zero = digest(bytes(CHUNK))
    with pytest.raises(transfer.TransferError, match=message) as caught:
        transfer.refill_from_packs(
            [(memory, 0, 2 * MIB)], zero * digests, index.find(zero * locations), {}, view.arena, *ring,
            chunk_bytes=CHUNK,
        )  # fmt: skip
    assert caught.value.code == -errno.EINVAL
