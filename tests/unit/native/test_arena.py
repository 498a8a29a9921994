"""The arena keeps what is in it, whoever dies, and gives nothing of one user to another. No driver is needed here."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest

from woodfrog._native import transfer
from woodfrog.daemon.keeper_client import KeeperClient

from .conftest import Keeper

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[transfer.Arena]:
    arena = transfer.Arena(64 * MIB)
    yield arena
    arena.close()


def put(arena: transfer.Arena, offset: int, data: bytes) -> None:
    with mmap.mmap(arena.fd, arena.size_bytes) as view:
        view[offset : offset + len(data)] = data


def get(arena: transfer.Arena, offset: int, size: int) -> bytes:
    with mmap.mmap(arena.fd, arena.size_bytes) as view:
        return view[offset : offset + size]


def test_a_new_arena_takes_no_memory_until_it_is_populated(arena: transfer.Arena) -> None:
    assert arena.populated_bytes == 0
    progress = transfer.Progress()
    arena.populate(0, arena.size_bytes, progress)
    assert arena.populated_bytes == arena.size_bytes
    assert progress.bytes_done == progress.bytes_total == arena.size_bytes
    assert arena.registered_bytes == 0


def test_populating_keeps_what_is_there(arena: transfer.Arena) -> None:
    data = os.urandom(3 * MIB)
    put(arena, 5 * MIB, data)
    arena.populate(0, arena.size_bytes)
    assert get(arena, 5 * MIB, len(data)) == data


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 1), (1, 1), (63, 2), (4096, MIB), (77, 20 * MIB + 5)])
def test_clearing_wipes_exactly_the_range(arena: transfer.Arena, offset: int, size: int) -> None:
    data = b"\xee" * (32 * MIB)
    put(arena, 0, data)
    arena.clear(offset, size)
    assert get(arena, 0, len(data)) == data[:offset] + bytes(size) + data[offset + size :]


def test_clearing_what_was_never_touched_takes_no_memory(arena: transfer.Arena) -> None:
    put(arena, 20 * MIB, b"secret")
    before = arena.populated_bytes
    arena.clear(0, arena.size_bytes)
    assert arena.populated_bytes == before
    assert get(arena, 20 * MIB, 6) == bytes(6)


@pytest.mark.parametrize(("offset", "size"), [(0, 64 * MIB + 1), (64 * MIB, 1), (2**64 - 1, 2), (1, 2**64 - 1)])
def test_ranges_outside_are_refused(arena: transfer.Arena, offset: int, size: int) -> None:
    for call in (arena.populate, arena.clear):
        with pytest.raises(transfer.TransferError, match="does not lie within") as caught:
            call(offset, size)
        assert caught.value.code == -22


@pytest.mark.parametrize("size", [0, 1, PAGE + 1, 2**63, 2**64 - PAGE])
def test_sizes_that_make_no_sense_are_refused(size: int) -> None:
    with pytest.raises(transfer.TransferError):
        transfer.Arena(size)


def test_nobody_who_has_the_descriptor_can_shrink_the_arena(arena: transfer.Arena) -> None:
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)


def test_the_descriptor_is_not_inherited_by_programs_that_are_started(arena: transfer.Arena) -> None:
    assert not os.get_inheritable(arena.fd)


def test_an_adopted_arena_has_the_contents_and_its_own_descriptor(arena: transfer.Arena) -> None:
    data = os.urandom(MIB)
    put(arena, 7 * MIB, data)
    adopted = transfer.Arena(arena.size_bytes, fd=arena.fd)
    assert adopted.fd != arena.fd
    arena.close()
    assert arena.fd == -1
    assert get(adopted, 7 * MIB, MIB) == data
    adopted.close()


def test_a_descriptor_that_is_no_arena_of_that_size_is_not_adopted(arena: transfer.Arena, tmp_path: Path) -> None:
    with pytest.raises(transfer.TransferError, match="bytes, not"):
        transfer.Arena(arena.size_bytes * 2, fd=arena.fd)
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(MIB)
        with pytest.raises(transfer.TransferError, match="not a memfd"):
            transfer.Arena(MIB, fd=file.fileno())
    with pytest.raises(transfer.TransferError):
        transfer.Arena(MIB, fd=999_999)


DYING_DAEMON = """
import mmap, os, signal, sys
from woodfrog._native import transfer
from woodfrog.daemon.keeper_client import KeeperClient
arena = transfer.Arena(64 << 20)
view = mmap.mmap(arena.fd, 64 << 20)
view[5 << 20 : 6 << 20] = bytes(range(256)) * 4096
KeeperClient(sys.argv[1]).append("arena:0", [arena.fd])
view[9 << 20 : 10 << 20] = bytes(range(255, -1, -1)) * 4096
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_arena_in_the_keeper_survives_its_daemon_with_everything_written(keeper: Keeper) -> None:
    died = subprocess.run([sys.executable, "-c", DYING_DAEMON, str(keeper.socket)], check=False)
    assert died.returncode == -signal.SIGKILL
    with KeeperClient(keeper.socket) as client:
        (fd,) = client.fetch("arena:0")
    adopted = transfer.Arena(64 * MIB, fd=fd)
    os.close(fd)
    assert get(adopted, 5 * MIB, MIB) == bytes(range(256)) * 4096
    assert get(adopted, 9 * MIB, MIB) == bytes(range(255, -1, -1)) * 4096
    assert adopted.populated_bytes == 2 * MIB
    adopted.close()


def test_a_closed_arena_says_so(arena: transfer.Arena) -> None:
    arena.close()
    arena.close()
    for call in (arena.populate, arena.clear):
        with pytest.raises(transfer.TransferError, match="closed"):
            call(0, 1)


def test_an_arena_at_work_cannot_be_closed(arena: transfer.Arena) -> None:
    progress = transfer.Progress()
    stop = threading.Event()

    unforeseen: list[transfer.TransferError] = []

    def work() -> None:
        while not stop.is_set():
            try:
                arena.clear(0, arena.size_bytes, progress)
            except transfer.TransferError as error:
                if error.code != -16:  # the other thread has the arena to itself for that moment
                    unforeseen.append(error)
                    return

    put(arena, 0, b"\xee" * arena.size_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    code = 0
    while code != -16:
        assert thread.is_alive(), unforeseen
        try:
            arena.unregister()  # asks for the arena as close() does, and can be asked for again
        except transfer.TransferError as error:
            code = error.code
    stop.set()
    thread.join()
    assert unforeseen == []


def test_cancelling_stops_populating(arena: transfer.Arena) -> None:
    progress = transfer.Progress()
    progress.cancel()
    assert progress.cancelled
    with pytest.raises(transfer.CancelledError):
        arena.populate(0, arena.size_bytes, progress)
    assert arena.populated_bytes == 0


def test_a_numa_node_that_exists_is_taken_and_one_that_does_not_is_refused() -> None:
    arena = transfer.Arena(MIB, numa_node=0)
    arena.populate(0, MIB)
    assert arena.numa_node == 0
    arena.close()
    for node in (999, 5000):
        with pytest.raises(transfer.TransferError):
            transfer.Arena(MIB, numa_node=node)


def test_ranges_written_to_a_file_come_back_where_they_were(arena: transfer.Arena, tmp_path: Path) -> None:
    generator = random.Random(11)
    ranges, at = [], 0
    while at < 20 * MIB:
        size = generator.choice([1, 100, 4096, 8192, MIB, 3 * MIB + 5])
        ranges.append((at, size))
        at += size + generator.choice([0, 0, 3, 4096])
    data = generator.randbytes(at)
    put(arena, 0, data)
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    digests = transfer.write_arena(arena, ranges, fd, 10, chunk_bytes=MIB)
    packed = b"".join(data[offset : offset + size] for offset, size in ranges)
    assert os.pread(fd, 1 << 30, 10) == packed
    expected = [
        blake3.blake3(data[start : min(start + MIB, offset + size)]).digest()
        for offset, size in ranges
        for start in range(offset, offset + size, MIB)
    ]
    assert digests == b"".join(expected)
    assert transfer.hash_arena(arena, ranges, chunk_bytes=MIB) == digests
    put(arena, 0, b"\xee" * at)
    transfer.read_to_arena(arena, ranges, fd, 10, digests=digests, chunk_bytes=MIB)
    restored = bytearray(b"\xee" * at)
    for offset, size in ranges:
        restored[offset : offset + size] = data[offset : offset + size]
    assert get(arena, 0, at) == restored
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4096, MIB, 3 * MIB + 7])
@pytest.mark.parametrize("offset", [0, 13, 4096])
def test_a_file_is_hashed_from_where_it_is_asked(tmp_path: Path, size: int, offset: int) -> None:
    data = os.urandom(size)
    (tmp_path / "data").write_bytes(bytes(offset) + data + b"more")
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    digests = transfer.hash_file(fd, offset, size, chunk_bytes=MIB)
    assert digests == b"".join(blake3.blake3(data[at : at + MIB]).digest() for at in range(0, size, MIB))
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    with pytest.raises(transfer.TransferError, match="too early"):
        transfer.hash_file(fd, offset, size + 5, chunk_bytes=MIB)
    os.close(fd)


def test_without_a_driver_everything_that_needs_one_says_so() -> None:
    code = (
        "from woodfrog._native import transfer as t\n"
        "for call in (t.driver_version, t.device_count, t.Arena(4096).register, t.Device(0).free_bytes):\n"
        "    try:\n"
        "        call()\n"
        "    except t.TransferError as error:\n"
        "        assert error.call == 'dlopen' and error.code == -2 and 'libcuda.so.1' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
    )
    # An empty library path and an unknown place for libcuda: a machine without a driver, even where there is one.
    environment = {**os.environ, "LD_LIBRARY_PATH": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    has_driver = any(Path(base, "libcuda.so.1").exists() for base in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"))
    assert done.returncode == 0 or has_driver, done.stderr
