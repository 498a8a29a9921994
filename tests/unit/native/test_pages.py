"""Pages from a file into a process with a userfaultfd (this one), and from a process that stands still into a file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from refused_calls import Call, Refusing, listen

from woodfrog._native import transfer

PAGE = os.sysconf("SC_PAGE_SIZE")
# linux/userfaultfd.h, asm/unistd_64.h
_USERFAULTFD = 323
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_MISSING = 1
_libc = ctypes.CDLL(None, use_errno=True)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def packed(*pieces: tuple[int, int, int]) -> bytes:
    return array("Q", [number for piece in pieces for number in piece]).tobytes()


@pytest.fixture
def uffd() -> Iterator[int]:
    fd = _libc.syscall(_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    fcntl.ioctl(fd, _UFFDIO_API, struct.pack("=QQQ", 0xAA, 0, 0))
    yield fd
    os.close(fd)


def registered(uffd: int, pages: int) -> mmap.mmap:
    memory = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fcntl.ioctl(uffd, _UFFDIO_REGISTER, struct.pack("=QQQQ", address_of(memory), pages * PAGE, _MISSING, 0))
    return memory


@pytest.fixture
def pages_file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    contents = b"".join(bytes([number % 251 + 1]) * PAGE for number in range(1024))
    (tmp_path / "pages").write_bytes(contents)
    fd = os.open(tmp_path / "pages", os.O_RDWR)
    yield fd, contents
    os.close(fd)


def test_pages_come_to_their_places_also_across_the_end_of_a_mapping(uffd: int, pages_file: tuple[int, bytes]) -> None:
    fd, contents = pages_file
    memory = registered(uffd, 1024)
    # Three mappings beside each other, as the kernel sees it, and one piece over all of them.
    _libc.mprotect(ctypes.c_void_p(address_of(memory) + 301 * PAGE), 5 * PAGE, mmap.PROT_READ)
    progress = transfer.Progress()
    transfer.fill_pages(uffd, fd, packed((address_of(memory), 1024 * PAGE, 0)), progress=progress)
    assert memory[:] == contents
    assert progress.bytes_done == progress.bytes_total == 1024 * PAGE


def test_many_threads_fill(uffd: int, pages_file: tuple[int, bytes]) -> None:
    """By itself it takes several: seen from beside, in one of some fillings."""
    memory = registered(uffd, 1024)
    pieces = packed((address_of(memory), 1024 * PAGE, 0))
    over = threading.Event()
    most = 0

    def look() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, len(list(Path("/proc/self/task").iterdir())))

    looking = threading.Thread(target=look)
    looking.start()
    usual = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(1000):
        transfer.fill_pages(uffd, pages_file[0], pieces)
        if most > usual:
            break
        memory.madvise(mmap.MADV_DONTNEED)
    over.set()
    looking.join()
    assert most > usual


def test_what_is_there_already_stays(uffd: int, pages_file: tuple[int, bytes]) -> None:
    fd, contents = pages_file
    memory = registered(uffd, 600)
    begin = address_of(memory)
    transfer.fill_pages(uffd, fd, packed((begin + 7 * PAGE, PAGE, 900 * PAGE)))
    transfer.fill_pages(uffd, fd, packed((begin, 300 * PAGE, 0), (begin + 300 * PAGE, 300 * PAGE, 400 * PAGE)))
    assert memory[: 7 * PAGE] == contents[: 7 * PAGE]
    assert memory[7 * PAGE : 8 * PAGE] == contents[900 * PAGE : 901 * PAGE]
    assert memory[8 * PAGE :] == contents[8 * PAGE : 300 * PAGE] + contents[400 * PAGE : 700 * PAGE]


def test_a_page_that_is_touched_before_comes_at_once_and_what_is_no_page_is_zero(
    uffd: int, pages_file: tuple[int, bytes]
) -> None:
    fd, contents = pages_file
    memory = registered(uffd, 64)
    begin = address_of(memory)
    stop, stopped = os.pipe()
    pieces = packed((begin + 2 * PAGE, 10 * PAGE, 5 * PAGE))
    answering = threading.Thread(target=transfer.answer_page_faults, args=(uffd, fd, pieces, stop))
    answering.start()
    # In a process of its own memory would be another; a thread without the GIL touches it: memcmp of libc does.
    wanted = ctypes.create_string_buffer(contents[8 * PAGE : 9 * PAGE], PAGE)
    assert _libc.memcmp(wanted, ctypes.c_void_p(begin + 5 * PAGE), PAGE) == 0
    zeros = ctypes.create_string_buffer(PAGE)
    for page in (0, 1, 12, 63):
        assert _libc.memcmp(zeros, ctypes.c_void_p(begin + page * PAGE), PAGE) == 0
    os.close(stopped)
    answering.join()
    os.close(stop)
    transfer.fill_pages(uffd, fd, pieces)
    assert memory[2 * PAGE : 12 * PAGE] == contents[5 * PAGE : 15 * PAGE]


class Changing:
    """Memory whose mappings change, as the kernel says it, for so many attempts to put a page there."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts
        self.asked = threading.Event()

    def __call__(self, call: Call) -> int:
        self.asked.set()
        self.left -= 1
        return errno.EAGAIN if self.left >= 0 else 0


def watched(refusing: Refusing, work: Callable[[], object]) -> threading.Thread:
    """A thread that does it, and that `refusing` is asked about."""

    def run() -> None:
        refusing.watch(listen())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_pages_wait_for_mappings_that_change(uffd: int, pages_file: tuple[int, bytes]) -> None:
    fd, contents = pages_file
    memory = registered(uffd, 4)
    stop, stopped = os.pipe()
    pieces = packed((address_of(memory), 4 * PAGE, 0))
    with Refusing(Changing(20)) as refusing:
        answering = watched(refusing, lambda: transfer.answer_page_faults(uffd, fd, pieces, stop))
        wanted = ctypes.create_string_buffer(contents[2 * PAGE : 3 * PAGE], PAGE)
        assert _libc.memcmp(wanted, ctypes.c_void_p(address_of(memory) + 2 * PAGE), PAGE) == 0
        os.close(stopped)
        answering.join()
        watched(refusing, lambda: transfer.fill_pages(uffd, fd, pieces)).join()
    os.close(stop)
    assert len(refusing.refused) == 20
    assert memory[:] == contents[: 4 * PAGE]


def test_whoever_waits_for_mappings_that_change_can_be_told_to_stop(uffd: int, pages_file: tuple[int, bytes]) -> None:
    fd, _ = pages_file
    memory = registered(uffd, 4)
    pieces = packed((address_of(memory), 4 * PAGE, 0))
    stop, stopped = os.pipe()
    progress = transfer.Progress()
    cancelled: list[BaseException] = []

    def fill() -> None:
        try:
            transfer.fill_pages(uffd, fd, pieces, progress=progress)
        except transfer.CancelledError as failure:
            cancelled.append(failure)

    for_ever = Changing(1 << 60)
    with Refusing(for_ever) as refusing:
        filling = watched(refusing, fill)
        assert for_ever.asked.wait(60)
        progress.cancel()
        filling.join(60)
        for_ever.asked.clear()
        answering = watched(refusing, lambda: transfer.answer_page_faults(uffd, fd, pieces, stop))
        touching = threading.Thread(target=_libc.memchr, args=(ctypes.c_void_p(address_of(memory)), 1, 1))
        touching.start()
        assert for_ever.asked.wait(60)
        os.close(stopped)
        answering.join(60)
    assert not filling.is_alive()
    assert len(cancelled) == 1
    assert not answering.is_alive()
    os.close(stop)
    transfer.fill_pages(uffd, fd, pieces)  # and whoever touched it goes on
    touching.join()


def failure_of_filling(refusing: Refusing, uffd: int, fd: int, pieces: bytes) -> int:
    """The code of the TransferError, on one thread that `refusing` is asked about."""
    failures: list[int] = []

    def fill() -> None:
        with pytest.raises(transfer.TransferError) as caught:
            transfer.fill_pages(uffd, fd, pieces, threads=1)
        failures.append(caught.value.code)

    watched(refusing, fill).join()
    return failures[0]


def test_memory_that_runs_out_is_told(uffd: int, pages_file: tuple[int, bytes]) -> None:
    memory = registered(uffd, 4)
    with Refusing(lambda call: errno.ENOMEM) as refusing:
        code = failure_of_filling(refusing, uffd, pages_file[0], packed((address_of(memory), 4 * PAGE, 0)))
    assert code == -errno.ENOMEM


def test_a_file_whose_pages_can_no_longer_be_read_is_told(uffd: int) -> None:
    """It becomes shorter with the first copy, of 1 MiB."""
    memory = registered(uffd, 512)
    fd = os.memfd_create("pages")
    os.truncate(fd, 512 * PAGE)

    def shorten(call: Call) -> int:
        os.truncate(fd, 256 * PAGE)
        return 0

    with Refusing(shorten) as refusing:
        code = failure_of_filling(refusing, uffd, fd, packed((address_of(memory), 512 * PAGE, 0)))
    os.close(fd)
    assert code == -errno.EIO


def test_memory_that_is_not_registered_is_an_error(uffd: int, pages_file: tuple[int, bytes]) -> None:
    memory = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with pytest.raises(transfer.TransferError, match="UFFDIO_COPY"):
        transfer.fill_pages(uffd, pages_file[0], packed((address_of(memory), 4 * PAGE, 0)))


@pytest.mark.parametrize(
    "pieces",
    [
        b"1234567",
        packed((PAGE, PAGE + 1, 0)),
        packed((PAGE, 0, 0)),
        packed((2 * PAGE, PAGE, 0), (PAGE, PAGE, PAGE)),
        packed((PAGE, 2 * PAGE, 0), (2 * PAGE, PAGE, 0)),
        packed((2**64 - PAGE, 2 * PAGE, 0)),
        packed((PAGE, PAGE, 2**64 - PAGE)),
        packed((PAGE, PAGE, 1024 * PAGE)),
    ],
    ids=["cut off", "no whole page", "empty", "backwards", "overlapping", "address", "offset", "behind the file's end"],
)
def test_pieces_that_make_no_sense_are_refused(uffd: int, pages_file: tuple[int, bytes], pieces: bytes) -> None:
    for call in (
        lambda: transfer.fill_pages(uffd, pages_file[0], pieces),
        lambda: transfer.save_pages(os.getpid(), pages_file[0], pieces),
    ):
        with pytest.raises(transfer.TransferError) as refused:
            call()
        assert refused.value.code == -22


STANDS_STILL = """
import ctypes, mmap, os, signal
memory = mmap.mmap(-1, 4096 * 2000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(2000):
    memory[page * 4096:(page + 1) * 4096] = bytes([page % 251 + 1]) * 4096
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 700 * 4096), 4096 * 9, 0)
print(address, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped() -> Iterator[tuple[int, int]]:
    """A process that stands still, and where its 2000 pages are; it may not read nine of them itself."""
    with subprocess.Popen([sys.executable, "-c", STANDS_STILL], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = int(process.stdout.readline())
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid, address
        process.send_signal(signal.SIGKILL)


def test_pages_of_a_process_that_stands_still_are_saved(stopped: tuple[int, int], tmp_path: Path) -> None:
    pid, address = stopped
    with (tmp_path / "saved").open("w+b") as file:
        file.truncate(2100 * PAGE)
        pieces = packed((address, 600 * PAGE, 100 * PAGE), (address + 650 * PAGE, 1350 * PAGE, 750 * PAGE))
        transfer.save_pages(pid, file.fileno(), pieces)
        saved = file.read()
    expected = b"".join(bytes([page % 251 + 1]) * PAGE for page in range(2000))
    assert saved[: 100 * PAGE] == bytes(100 * PAGE)
    assert saved[100 * PAGE : 700 * PAGE] == expected[: 600 * PAGE]
    assert saved[700 * PAGE : 750 * PAGE] == bytes(50 * PAGE)
    assert saved[750 * PAGE :] == expected[650 * PAGE :]


def test_what_is_no_memory_of_the_process_is_an_error(stopped: tuple[int, int], tmp_path: Path) -> None:
    with (tmp_path / "saved").open("w+b") as file:
        file.truncate(4 * PAGE)
        with pytest.raises(transfer.TransferError):
            transfer.save_pages(stopped[0], file.fileno(), packed((PAGE, 4 * PAGE, 0)))


def test_a_process_that_is_gone_is_an_error(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with (tmp_path / "saved").open("w+b") as file:
        file.truncate(4 * PAGE)
        with pytest.raises(transfer.TransferError) as refused:
            transfer.save_pages(process.pid, file.fileno(), packed((PAGE, 4 * PAGE, 0)))
    assert refused.value.code == -3
