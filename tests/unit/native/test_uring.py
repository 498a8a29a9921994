"""io_uring under packs: that it is used, leaves nothing behind, and comes to the same ends as threads do when the disk
or the kernel says no."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import file_ways
import pytest

from woodfrog._native import transfer

from . import packing
from .packing import CHUNK, KIB, MIB, PAGE, digest, filled, new_file, noise, reading

CHUNK_BYTES = 64 * KIB
CLOSED_BY_EXEC = 0o2000000  # O_CLOEXEC, as /proc/self/fdinfo shows it


@pytest.fixture
def uring() -> Iterator[None]:
    with file_ways.chosen("uring"):
        yield


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with new_file(tmp_path) as descriptor:
        if not _can_pass_the_cache(descriptor):
            pytest.skip("this file system has no O_DIRECT: nothing is ever in flight")
        yield descriptor


def _can_pass_the_cache(descriptor: int) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return not os.path.realpath(f"/proc/self/fd/{descriptor}").startswith("/dev/shm")


@contextmanager
def arena_of(size_bytes: int) -> Iterator[tuple[transfer.Arena, mmap.mmap]]:
    """An arena and its bytes."""
    arena = transfer.Arena(size_bytes)
    arena.populate(0, size_bytes)
    with mmap.mmap(arena.fd, size_bytes) as view:
        yield arena, view
    arena.close()


def rings() -> list[int]:
    """This process's descriptors of io_urings."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "io_uring" in str(entry.readlink()):
                found.append(int(entry.name))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def test_packs_are_written_and_read_through_a_ring_and_it_is_gone_afterwards(uring: None, fd: int) -> None:
    contents = [noise(CHUNK_BYTES, i) for i in range(300)]
    with filled(contents) as source:
        before = transfer.uring_requests()
        packed, name = transfer.write_pack(fd, source.chunks, [source.arena])
        after_writing = transfer.uring_requests()
        assert after_writing - before >= len(contents) * CHUNK_BYTES // MIB
        target = transfer.Arena(len(contents) * CHUNK_BYTES)
        with reading(fd) as readable:  # one that may be written too is a copy: that is read through the cache
            transfer.refill_arena_from_packs(
                target, [(0, target.size_bytes)], source.digests, packing.locate(packed), {0: readable},
                chunk_bytes=CHUNK_BYTES,
            )  # fmt: skip
        assert transfer.uring_requests() > after_writing
        with mmap.mmap(target.fd, target.size_bytes) as there:
            assert there[:] == b"".join(contents)
    assert transfer.scan_pack(fd, contents=True)[1] == name
    assert rings() == []


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for way in file_ways.WAYS:
        path = tmp_path / way
        with file_ways.chosen(way), filled([noise(CHUNK_BYTES - 100 * (i % 3), i) for i in range(300)]) as source:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            transfer.write_pack(descriptor, source.chunks, [source.arena], compress="auto", threads=1)
            os.close(descriptor)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_chunks_that_lie_scattered_in_many_packs_are_read_together(uring: None, tmp_path: Path) -> None:
    """More runs, and more to decode, than may be in flight at once."""
    contents = [noise(4 * KIB, i) if i % 2 else bytes([i % 251, i // 251]) * (2 * KIB) for i in range(1500)]
    order = [(i * 389) % len(contents) for i in range(len(contents))]
    descriptors = [os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(3)]
    with filled(contents) as source:
        index = transfer.ChunkIndex(4 * KIB)
        for number, descriptor in enumerate(descriptors):
            some = source.chunks[number * 500 * CHUNK.size : (number + 1) * 500 * CHUNK.size]
            records, _ = transfer.write_pack(descriptor, some, [source.arena], compress="auto")
            index.add(number, records)
        digests = b"".join(digest(contents[i]) for i in order)
        readable = {i: os.open(tmp_path / f"{i}", os.O_RDONLY) for i in range(3)}
        with arena_of(len(order) * 4 * KIB) as (target, there):
            transfer.refill_arena_from_packs(
                target, [(0, len(there))], digests, index.find(digests), readable, chunk_bytes=4 * KIB
            )
            assert there[:] == b"".join(contents[i] for i in order)
        assert transfer.check_packs(digests, index.find(digests), readable) == []
    for descriptor in [*descriptors, *readable.values()]:
        os.close(descriptor)


def shared_queues() -> tuple[int, int]:
    """How many mappings of rings this process has, and how many of them a forked child would get too."""
    queues = shared = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "io_uring" in line:
            inside = True
        elif inside and line.startswith("VmFlags:"):
            inside = False
            queues += 1
            shared += "dc" not in line.split()
    return queues, shared


def test_no_child_gets_a_ring(uring: None, fd: int) -> None:
    """CRIU, which refuses processes with one, is started beside whatever the daemon writes."""
    data = noise(CHUNK_BYTES)
    with filled([data]) as source:
        chunks = CHUNK.pack(digest(data), 0, len(data), 0) * 20_000
        progress = transfer.Progress()
        ended: list[BaseException] = []

        def write() -> None:
            try:
                transfer.write_pack(fd, chunks, [source.arena], threads=1, progress=progress)
            except transfer.CancelledError as error:
                ended.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        seen: list[int] = []
        # A ring, its two mappings, and both marked: a child that is forked in that very moment would have them until it
        # executes another program, as all of ours do.
        while thread.is_alive() and not ((seen := rings()) and shared_queues() == (2, 0)):
            thread.join(0.001)
        assert seen, "no ring was seen while 1.2 GiB were written"
        flags = Path(f"/proc/self/fdinfo/{seen[0]}").read_text().split("flags:")[1].split()[0]
        child = subprocess.run(
            [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{e}') for e in "
             "os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{e}')])"],
            stdout=subprocess.PIPE, text=True, check=True, close_fds=False,
        )  # fmt: skip
        pid = os.fork()
        if pid == 0:
            os._exit("io_uring" in Path("/proc/self/maps").read_text())
        forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        still = rings()
        progress.cancel()
        thread.join()
    assert still, "the rings were gone before the child was"
    assert len(ended) == 1
    assert int(flags, 8) & CLOSED_BY_EXEC
    assert "io_uring" not in child.stdout
    assert forked == 0, "a forked child has a ring's queues in its memory"
    assert rings() == []
    assert os.fstat(fd).st_size == 0


def test_nothing_is_in_flight_after_a_cancelled_read(uring: None, fd: int) -> None:
    """What the caller writes into its memory afterwards stays."""
    data = [noise(CHUNK_BYTES, i) for i in range(512)]
    with filled(data) as source, arena_of(len(data) * CHUNK_BYTES) as (target, there), reading(fd) as readable:
        packed, _ = transfer.write_pack(fd, source.chunks, [source.arena])
        locations = packing.locate(packed)
        for _ in range(20):
            progress = transfer.Progress()

            def read(progress: transfer.Progress = progress) -> None:
                transfer.refill_arena_from_packs(
                    target, [(0, len(there))], source.digests, locations, {0: readable}, chunk_bytes=CHUNK_BYTES,
                    progress=progress,
                )  # fmt: skip

            with ThreadPoolExecutor(1) as pool:
                reading_it = pool.submit(read)
                while progress.bytes_done == 0 and not reading_it.done():
                    pass
                progress.cancel()
                failure = reading_it.exception()
            there[:] = b"\xaa" * len(there)
            assert transfer.check_packs(source.digests, locations, {0: readable}) == []  # reads as much once more
            assert there[:] == b"\xaa" * len(there)
            if isinstance(failure, transfer.CancelledError):
                return
            assert failure is None
    pytest.fail("none of 20 reads was cancelled half way")


@pytest.mark.usefixtures("uring")
def test_a_write_that_is_cut_short_is_finished_or_fails_as_by_threads(fd: int) -> None:
    """A limit of the file's size in the middle of a request: the kernel writes what fits, then nothing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with filled([noise(CHUNK_BYTES, i) for i in range(64)]) as source:
        first, _ = transfer.write_pack(fd, source.chunks[: 8 * CHUNK.size], [source.arena])
        length = os.fstat(fd).st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + MIB + MIB // 2 + PAGE, before[1]))
        try:
            with pytest.raises(transfer.TransferError) as caught:  # compressed, so no room is taken before
                transfer.write_pack(fd, source.chunks, [source.arena], compress="lz4")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.code == -errno.EFBIG
        assert os.fstat(fd).st_size == length
        assert transfer.scan_pack(fd, contents=True)[0] == first


@pytest.mark.parametrize("way", file_ways.WAYS)
def test_a_disk_that_fails_in_the_middle_is_told_and_costs_the_chunks_that_it_has_lost(
    tmp_path: Path, way: str
) -> None:
    """A loop device whose file is cut short: from there on the disk has read and write errors."""
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(64 * MIB)
    device = subprocess.run(
        ["losetup", "--find", "--show", str(disk)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    try:
        contents = [noise(CHUNK_BYTES, i) for i in range(256)]
        with file_ways.chosen(way), filled(contents) as source:
            pack = tmp_path / "pack"
            descriptor = os.open(pack, os.O_RDWR | os.O_CREAT, 0o600)
            packed, _ = transfer.write_pack(descriptor, source.chunks, [source.arena])
            os.close(descriptor)
            whole = pack.read_bytes()
            on_device = os.open(device, os.O_RDWR | os.O_DIRECT)
            os.write(on_device, mapped(whole))
            os.fsync(on_device)
            os.close(on_device)
            os.truncate(disk, 9 * MIB)
            # In the page cache of the device there may be what the file has lost.
            readable = os.open(device, os.O_RDONLY)
            os.posix_fadvise(readable, 0, 0, os.POSIX_FADV_DONTNEED)
            before = transfer.uring_requests()
            lost = transfer.check_packs(source.digests, packing.locate(packed), {0: readable})
            assert (transfer.uring_requests() > before) == (way == "uring")
            records = list(packing.RECORD.iter_unpack(packed))
            expected = [i for i, (_, offset, stored, *_) in enumerate(records) if offset + stored > 9 * MIB]
            assert lost == expected
            assert len(lost) > 50
            os.close(readable)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def mapped(data: bytes) -> mmap.mmap:
    """In memory that O_DIRECT can be used on."""
    memory = mmap.mmap(-1, -(-len(data) // PAGE) * PAGE)
    memory[: len(data)] = data
    return memory


# A filter of seccomp: this system call (x86-64, aarch64 have the same numbers for these) fails with this error.
FORBIDDING = """
    import ctypes, struct, sys
    number, error = int(sys.argv[1]), int(sys.argv[2])
    program = b"".join(struct.pack("<HBBI", *line) for line in (
        (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000),
    ))
    buffer = ctypes.create_string_buffer(program, len(program))
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    filters = Program(4, ctypes.addressof(buffer))
    assert libc.prctl(22, 2, ctypes.byref(filters), 0, 0) == 0
"""
SETUP, ENTER = 425, 426


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (SETUP, errno.EPERM, "forbidden"),
        (SETUP, errno.ENOSYS, "no io_uring"),
        (SETUP, errno.EMFILE, "Too many open files"),
        (ENTER, errno.EAGAIN, None),  # found out when it is too late to do without: each request is then made by hand
        (ENTER, errno.EPERM, None),
    ],
)
def test_a_kernel_that_does_not_allow_it_is_no_failure(tmp_path: Path, call: int, error: int, said: str | None) -> None:
    program = textwrap.dedent(FORBIDDING) + textwrap.dedent(
        """
        import os
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        from tests.unit.native import packing
        from woodfrog._native import transfer
        data = [packing.noise(65536, i) for i in range(64)]
        with packing.new_file(Path(sys.argv[4])) as fd, packing.filled(data) as source:
            records, name = transfer.write_pack(fd, source.chunks, [source.arena])
            assert transfer.scan_pack(fd, contents=True) == (records, name)
            print(transfer.file_io(), transfer.uring_requests(), transfer.uring_trouble())
            if transfer.uring_trouble():
                transfer.choose_file_io("uring")
                try:
                    transfer.scan_pack(fd, contents=True)
                except transfer.TransferError as error:
                    print(error.code)
        """
    )
    root = Path(__file__).resolve().parents[3]
    finished = subprocess.run(
        [sys.executable, "-c", program, str(call), str(error), str(root), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, check=True, cwd=root, env={**os.environ, "WOODFROG_FILE_IO": ""},
    )  # fmt: skip
    lines = finished.stdout.splitlines()
    if said is None:
        assert lines == ["uring 0 None"]
    else:
        assert lines[0].startswith("threads 0 ")
        assert said in lines[0]
        assert lines[1] == str(-error), "what was asked for and cannot be had is an error"


def test_the_environment_says_which_way(tmp_path: Path) -> None:
    program = "from woodfrog._native import transfer; print(transfer.file_io())"
    for way in file_ways.WAYS:
        said = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "WOODFROG_FILE_IO": way}, stdout=subprocess.PIPE,
            text=True, check=True,
        ).stdout  # fmt: skip
        assert said.strip() == way
    with pytest.raises(transfer.TransferError, match="auto, uring or threads"):
        transfer.choose_file_io("aio")
