"""GPU memory to files and back, with a digest for each chunk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from .conftest import MIB, View, noise

Filled = Callable[..., list[transfer.Memory]]
RING = (64 * MIB, 16 * MIB)


def digests_of(contents: list[bytes], chunk_bytes: int) -> bytes:
    """What the operations must return for these pieces."""
    return b"".join(
        blake3.blake3(data[at : at + chunk_bytes]).digest()
        for data in contents
        for at in range(0, len(data), chunk_bytes)
    )


def drain(view: View, pieces: list[tuple[transfer.Memory, int, int]], fd: int, at: int = 0, **options: int) -> bytes:
    return transfer.drain_to_file(pieces, fd, at, view.arena, *RING, chunk_bytes=options.pop("chunk", MIB), **options)


def refill(
    view: View, pieces: list[tuple[transfer.Memory, int, int]], fd: int, digests: bytes | None, at: int = 0
) -> None:
    transfer.refill_from_file(pieces, fd, at, view.arena, *RING, digests=digests, chunk_bytes=MIB)


def read_back(view: View, pieces: list[tuple[transfer.Memory, int, int]]) -> list[bytes]:
    at, extents = 0, []
    for memory, offset, size in pieces:
        extents.append((memory, offset, at, size))
        at += size
    transfer.drain(extents, view.arena)
    return [view.get(start, size) for _, _, start, size in extents]


def blank(view: View, pieces: list[tuple[transfer.Memory, int, int]]) -> None:
    total = sum(size for *_, size in pieces)
    view.put(0, bytes(total))
    starts = itertools.accumulate((size for *_, size in pieces), initial=0)
    transfer.refill([(m, o, at, size) for (m, o, size), at in zip(pieces, starts, strict=False)], view.arena)


def test_the_file_holds_the_bytes_and_the_digests_are_those_of_the_blake3_library(
    view: View, filled: Filled, file: int
) -> None:
    contents = [noise(size, size) for size in (2 * MIB, 5 * MIB + 1, 1, 4096, 3 * MIB - 7)]
    pieces = [(m, 0, len(data)) for m, data in zip(filled(contents), contents, strict=True)]
    digests = drain(view, pieces, file, 4096)
    assert digests == digests_of(contents, MIB)
    assert os.pread(file, 1 << 30, 0) == bytes(4096) + b"".join(contents)
    assert transfer.hash_memory(pieces, view.arena, *RING, chunk_bytes=MIB) == digests
    blank(view, pieces)
    refill(view, pieces, file, digests, 4096)
    assert read_back(view, pieces) == contents


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=8),
    chunk=st.sampled_from([4096, 8192, 1 << 16, 1 << 20]),
    slots=st.integers(1, 5),
    threads=st.integers(1, 5),
    at=st.integers(0, 20_000),
)
def test_any_sizes_chunks_ring_and_threads_give_the_same_bytes(
    view: View, device: transfer.Device, file: int, sizes: list[int], chunk: int, slots: int, threads: int, at: int
) -> None:
    contents = [noise(size, size) for size in sizes]
    memories = device.create_memories([2 * MIB] * len(sizes))
    view.put(0, b"".join(contents))
    starts = list(itertools.accumulate(sizes, initial=0))
    transfer.refill([(m, 3, a, n) for m, a, n in zip(memories, starts, sizes, strict=False)], view.arena)
    pieces = [(m, 3, size) for m, size in zip(memories, sizes, strict=True)]
    os.ftruncate(file, 0)
    ring = (64 * MIB, slots * chunk)
    digests = transfer.drain_to_file(pieces, file, at, view.arena, *ring, chunk_bytes=chunk, threads=threads)
    assert digests == digests_of(contents, chunk)
    assert os.pread(file, 1 << 30, at) == b"".join(contents)
    blank(view, pieces)
    transfer.refill_from_file(pieces, file, at, view.arena, *ring, digests=digests, chunk_bytes=chunk, threads=threads)
    assert read_back(view, pieces) == contents
    for memory in memories:
        memory.release()


def test_pieces_of_two_gpus_go_into_one_file(view: View, filled: Filled, file: int) -> None:
    contents = [noise(3 * MIB, seed) for seed in range(6)]
    memories = [filled([data], on=transfer.Device(i % 2))[0] for i, data in enumerate(contents)]
    pieces = [(memory, 0, 3 * MIB) for memory in memories]
    digests = drain(view, pieces, file)
    assert os.pread(file, 1 << 30, 0) == b"".join(contents)
    blank(view, pieces)
    refill(view, pieces, file, digests)
    assert read_back(view, pieces) == contents


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_a_descriptor_with_or_without_o_direct_serves_alike(
    view: View, filled: Filled, tmp_path: Path, flags: int
) -> None:
    data = noise(5 * MIB + 12345)
    pieces = [(filled([data])[0], 0, len(data))]
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT | flags, 0o600)
    digests = drain(view, pieces, fd)
    (tmp_path / "data").unlink()  # a file without a name serves as well
    blank(view, pieces)
    refill(view, pieces, fd, digests)
    assert read_back(view, pieces) == [data]
    os.close(fd)


@pytest.mark.parametrize("wrong", [0, 1, MIB - 1, MIB, 4 * MIB + 17, 8 * MIB - 1])
def test_one_wrong_byte_names_its_chunk(view: View, filled: Filled, file: int, wrong: int) -> None:
    data = noise(8 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    digests = drain(view, pieces, file)
    os.pwrite(file, bytes([data[wrong] ^ 0x10]), wrong)
    with pytest.raises(transfer.IntegrityError, match=f"chunk {wrong // MIB} ") as caught:
        refill(view, pieces, file, digests)
    assert caught.value.chunk == wrong // MIB
    assert isinstance(caught.value, transfer.TransferError)
    refill(view, pieces, file, None)  # whoever asks for no check gets none
    assert read_back(view, pieces)[0][wrong] == data[wrong] ^ 0x10


def test_the_first_of_many_wrong_chunks_is_named_whichever_thread_meets_it(
    view: View, filled: Filled, file: int
) -> None:
    data = noise(8 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    digests = drain(view, pieces, file, chunk=64 << 10)
    for wrong in range(37, 128):
        os.pwrite(file, b"wrong", wrong * (64 << 10))
    for _ in range(20):
        with pytest.raises(transfer.IntegrityError) as caught:
            transfer.refill_from_file(
                pieces, file, 0, view.arena, *RING, digests=digests, chunk_bytes=64 << 10, threads=6
            )
        assert caught.value.chunk == 37
        with pytest.raises(transfer.IntegrityError) as caught:
            transfer.read_to_arena(
                view.arena, [(0, len(data))], file, 0, digests=digests, chunk_bytes=64 << 10, threads=6
            )
        assert caught.value.chunk == 37


def test_a_wrong_chunk_never_reaches_the_gpu(view: View, filled: Filled, file: int) -> None:
    data = noise(MIB)
    pieces = [(filled([data])[0], 0, MIB)]
    digests = drain(view, pieces, file)
    os.pwrite(file, bytes(MIB), 0)
    with pytest.raises(transfer.IntegrityError):
        refill(view, pieces, file, digests)
    assert read_back(view, pieces) == [data]


def test_a_file_that_ends_too_early_is_an_error_that_says_where(view: View, filled: Filled, file: int) -> None:
    data = noise(4 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    digests = drain(view, pieces, file)
    os.ftruncate(file, 3 * MIB + 100)
    with pytest.raises(transfer.TransferError, match=f"ends at offset {3 * MIB + 100}") as caught:
        refill(view, pieces, file, digests)
    assert caught.value.code == -errno.ENODATA


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system; RLIMIT_FSIZE is tested for everybody")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_after_which_everything_serves_on(
    view: View, filled: Filled, small_disk: Path, file: int
) -> None:
    data = noise(20 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    fd = os.open(small_disk / "data", os.O_RDWR | os.O_CREAT, 0o600)
    for threads in (1, 4):
        with pytest.raises(transfer.TransferError, match="No space") as caught:
            drain(view, pieces, fd, threads=threads)
        assert caught.value.code == -errno.ENOSPC
        assert caught.value.call == "fallocate"  # before anything was copied
        assert os.fstat(fd).st_size == 0
    with pytest.raises(transfer.TransferError, match="No space"):
        transfer.write_arena(view.arena, [(0, 20 * MIB)], fd, 0, chunk_bytes=MIB)
    os.close(fd)
    other = os.open(small_disk.parent / "elsewhere", os.O_RDWR | os.O_CREAT, 0o600)
    digests = drain(view, pieces, other)
    assert digests == digests_of([data], MIB)
    os.close(other)


def test_a_write_that_fails_is_an_error_after_which_everything_serves_on(view: View, filled: Filled, file: int) -> None:
    data = noise(8 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, len(data))
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # room is there, but every write is refused
    for threads in (1, 4):
        with pytest.raises(transfer.TransferError, match="pwrite") as caught:
            drain(view, pieces, sealed, threads=threads)
        assert caught.value.code == -errno.EPERM
    os.close(sealed)
    assert drain(view, pieces, file) == digests_of([data], MIB)


def test_a_file_size_limit_is_an_error(view: View, filled: Filled, file: int) -> None:
    data = noise(8 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, before[1]))
    try:
        with pytest.raises(transfer.TransferError) as caught:
            drain(view, pieces, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == -errno.EFBIG
    assert drain(view, pieces, file) == digests_of([data], MIB)


def test_descriptors_that_cannot_serve_are_refused_before_anything_moves(
    view: View, filled: Filled, tmp_path: Path
) -> None:
    (memory,) = filled([noise(MIB)])
    pieces = [(memory, 0, MIB)]
    path = tmp_path / "data"
    path.write_bytes(b"as it was")
    read_end, write_end = os.pipe()
    refused = {
        "read-only": os.open(path, os.O_RDONLY),
        "appending": os.open(path, os.O_RDWR | os.O_APPEND),
        "neither": write_end,
    }
    for reason, fd in refused.items():
        with pytest.raises(transfer.TransferError, match=reason):
            drain(view, pieces, fd)
        os.close(fd)
    writing_only = os.open(path, os.O_WRONLY)
    with pytest.raises(transfer.TransferError, match="writing only"):
        refill(view, pieces, writing_only, bytes(32))
    os.close(writing_only)
    with pytest.raises(transfer.TransferError, match="Bad file descriptor"):
        drain(view, pieces, 999_999)
    os.close(read_end)
    assert path.read_bytes() == b"as it was"


def test_arguments_that_do_not_fit_together_are_refused(view: View, filled: Filled, file: int) -> None:
    (memory,) = filled([noise(4 * MIB)])
    pieces = [(memory, 0, 4 * MIB)]
    arena, size = view.arena, view.arena.size_bytes

    def attempt(where: tuple[int, int], reason: str, at: int = 0, chunk: int = MIB) -> None:
        with pytest.raises(transfer.TransferError, match=reason) as caught:
            transfer.drain_to_file(pieces, file, at, arena, *where, chunk_bytes=chunk)
        assert caught.value.code == -errno.EINVAL

    attempt((0, MIB - 1), "no room for a chunk")
    attempt((1, 4 * MIB), "multiple of a page")
    attempt((size - MIB, 2 * MIB), "does not lie within the arena")
    attempt((2**64 - 4096, 8192), "does not lie within the arena")
    attempt((0, 4 * MIB), "chunk size", chunk=5000)
    attempt((0, 4 * MIB), "larger than files can be", at=2**63)
    attempt((0, 4 * MIB), "larger than files can be", at=2**63 - MIB)
    for digests in (b"", bytes(32), bytes(32 * 5), bytes(127)):
        with pytest.raises(transfer.TransferError, match="bytes of digests for 4 chunks"):
            refill(view, pieces, file, digests)
    with pytest.raises(transfer.TransferError, match="does not lie within the memory"):
        drain(view, [(memory, 2 * MIB, 2 * MIB + 1)], file)
    assert os.fstat(file).st_size == 0


@pytest.mark.parametrize("operation", ["drain", "refill", "hash", "write", "read", "hash_file"])
def test_every_operation_can_be_cancelled(view: View, filled: Filled, file: int, operation: str) -> None:
    data = noise(8 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    digests = drain(view, pieces, file)
    ranges = [(0, len(data))]
    view.put(0, data)
    progress = transfer.Progress()
    small = {"chunk_bytes": MIB, "progress": progress}
    call: dict[str, Callable[[], object]] = {
        "drain": lambda: transfer.drain_to_file(pieces, file, 0, view.arena, *RING, **small),
        "refill": lambda: transfer.refill_from_file(pieces, file, 0, view.arena, *RING, digests=digests, **small),
        "hash": lambda: transfer.hash_memory(pieces, view.arena, *RING, **small),
        "write": lambda: transfer.write_arena(view.arena, ranges, file, 0, **small),
        "read": lambda: transfer.read_to_arena(view.arena, ranges, file, 0, digests=digests, **small),
        "hash_file": lambda: transfer.hash_file(file, 0, len(data), **small),
    }
    call[operation]()
    assert progress.bytes_done == progress.bytes_total == len(data)
    progress.cancel()
    with pytest.raises(transfer.CancelledError):
        call[operation]()
    assert progress.bytes_done < 2 * len(data)


def test_a_drain_cancelled_at_any_moment_ends_and_the_next_one_is_right(view: View, filled: Filled, file: int) -> None:
    data = noise(16 * MIB)
    pieces = [(filled([data])[0], 0, len(data))]
    for after in range(0, 17, 2):
        progress = transfer.Progress()

        def run(progress: transfer.Progress = progress) -> None:
            with contextlib.suppress(transfer.CancelledError):
                transfer.drain_to_file(
                    pieces, file, 0, view.arena, 64 * MIB, MIB, chunk_bytes=256 << 10, threads=3, progress=progress
                )

        thread = threading.Thread(target=run)
        thread.start()
        while progress.bytes_done < after * MIB and thread.is_alive():
            pass
        progress.cancel()
        thread.join(60)
        assert not thread.is_alive()
    assert drain(view, pieces, file) == digests_of([data], MIB)


def test_a_gpu_that_fails_in_the_middle_ends_the_drain_with_the_drivers_error(
    view: View, filled: Filled, file: int
) -> None:
    """The primary context is destroyed under the drain, as after a fatal GPU error."""
    import ctypes

    data = noise(32 * MIB)
    (memory,) = filled([data], on=transfer.Device(1))
    pieces = [(memory, 0, len(data))]
    cuda = ctypes.CDLL("libcuda.so.1")
    outcome: list[BaseException] = []
    progress = transfer.Progress()

    def run() -> None:
        try:
            while True:
                transfer.drain_to_file(
                    pieces, file, 0, view.arena, 64 * MIB, MIB, chunk_bytes=64 << 10, threads=2, progress=progress
                )
        except transfer.TransferError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while progress.bytes_done == 0:
        pass
    assert cuda.cuDevicePrimaryCtxReset_v2(1) == 0
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(outcome[0], transfer.TransferError)
    assert outcome[0].code > 0  # type: ignore[attr-defined]
    assert outcome[0].call.startswith("cu")  # type: ignore[attr-defined]
