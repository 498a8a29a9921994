"""Dumps in which the pages are copied by woodfrog's threads: the same files, the same promises."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from woodfrog import faults
from woodfrog.cpu import lazy_dump, pagemap, processes
from woodfrog.cpu.criu import Criu, Dumped, Restored
from woodfrog.cpu.pages_by import VARIABLE
from woodfrog.cpu.run import still_running
from woodfrog.errors import NoSpaceError, TimeoutExceededError, WoodfrogError
from woodfrog.operations.memory_folder import MemoryFolder

from .programs import (
    COUNTER,
    Program,
    Start,
    assert_gapless,
    growing,
    outgrowing,
    session_members,
    time_out_anywhere,
    wait_until,
)

PAGE = os.sysconf("SC_PAGE_SIZE")

# Memory of every kind that goes into files of pages, in two processes and five threads; each looks at its own all the
# time. The child was forked with the parent's memory and has written to a half of it since.
KINDS = """
import ctypes, mmap, os, threading, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the kernel writes a thread's processor into its memory
libc = ctypes.CDLL(None, use_errno=True)
size = 4 << 20
def mapped(fill, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, fd=-1):
    made = mmap.mmap(fd, size, flags)
    made[:] = bytes([fill]) * size
    return made
def address(made):
    return ctypes.addressof(ctypes.c_char.from_buffer(made))
memfd = os.memfd_create("held")
os.truncate(memfd, size)
own, hidden, locked = mapped(1), mapped(2), mapped(3)
shared, file = mapped(4, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), mapped(5, mmap.MAP_SHARED, memfd)
private_file = mapped(6, mmap.MAP_PRIVATE, memfd)
holes = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for offset in range(0, size, 8 * 4096):
    holes[offset:offset + 4096] = bytes([7]) * 4096
assert libc.mlock(ctypes.c_void_p(address(locked)), ctypes.c_size_t(size)) == 0
hidden_at = ctypes.c_void_p(address(hidden))
def protect(how):
    assert libc.mprotect(hidden_at, ctypes.c_size_t(size), how) == 0
read, write = os.pipe()
child = os.fork()
if child == 0:
    own[:size // 2] = bytes([8]) * (size // 2)
expected = bytes([8]) * (size // 2) + bytes([1]) * (size // 2) if child == 0 else bytes([1]) * size
protect(mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0)
n = 0
def check():
    protect(1)
    assert hidden[:] == bytes([2]) * size
    protect(0)
    assert own[:] == expected and locked[:] == bytes([3]) * size and shared[:] == bytes([4]) * size
    assert file[:] == bytes([5]) * size and private_file[:] == bytes([6]) * size
    assert all(holes[i:i + 4096] == bytes([7]) * 4096 for i in range(0, size, 8 * 4096))
    assert not any(holes[4096:8 * 4096])
if child == 0:
    os.close(write)
    while got := os.read(read, 4):
        n += 1
        assert int.from_bytes(got, "little") == n
        if n % 20 == 1:
            check()
        print(n, flush=True)
    os._exit(1)
os.close(read)
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
while True:
    n += 1
    if n % 20 == 1:
        check()
    os.write(write, n.to_bytes(4, "little"))
    time.sleep(0.005)
"""
LARGE = "x = bytearray(b'ab' * (40 << 20))\n" + COUNTER


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: on few processors CRIU would do it."""
    monkeypatch.setenv(VARIABLE, "threads")


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, as in a checkpoint."""
    found = MemoryFolder.make(512 << 20)
    assert found is not None
    yield found.path
    found.close()


@pytest.fixture
def dump(criu: Criu, folder: Path) -> Callable[..., Dumped]:
    """Criu.dump with memory taken ahead."""

    def run(program: Program, *, leave_running: bool, timeout_s: float = 60) -> Dumped:
        assert lazy_dump.reserve(program.pid, folder / "ahead")
        return criu.dump(
            program.pid,
            folder / "image",
            leave_running=leave_running,
            pages_ahead=folder / "ahead",
            timeout_s=timeout_s,
        )

    return run


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """fault(action): while CRIU waits with the target standing still."""

    def set_up(action: str) -> None:
        state = tmp_path / "faults"
        state.mkdir()
        monkeypatch.setattr(faults, "_parsed", ("", {}))  # passes are counted anew
        monkeypatch.setenv("WOODFROG_FAULTS_STATE", str(state))
        monkeypatch.setenv("WOODFROG_FAULTS", f"{lazy_dump.FAULT_POINT}:{action}")

    return set_up


def pages_by_address(directory: Path) -> dict[int, dict[int, tuple[int, bytes]]]:
    """Per process the flags and the digest of each page, by address; all must be in its file, and nothing else."""
    found: dict[int, dict[int, tuple[int, bytes]]] = {}
    for pid, path in pagemap.paths(directory).items():
        name, entries = pagemap.read(path)
        listed = list(entries)
        assert all(entry.flags & pagemap.PRESENT for entry in listed)
        content = memoryview((directory / name).read_bytes())
        assert len(content) == sum(entry.pages for entry in listed) * PAGE
        found[pid] = {
            entry.address + page * PAGE: (
                entry.flags,
                hashlib.blake2b(content[offset + page * PAGE :][:PAGE]).digest(),
            )
            for entry, offset in pagemap.placed(listed)
            for page in range(entry.pages)
        }
    return found


def test_the_files_are_those_of_a_dump_by_criu_alone_and_can_be_restored(
    criu: Criu,
    start: Start,
    restore: Callable[[Path], Restored],
    dump: Callable[..., Dumped],
    tmp_path: Path,
) -> None:
    program = start(KINDS)
    program.wait_for_more(5)
    by_threads = dump(program, leave_running=False)
    alone = criu.dump(program.pid, tmp_path / "alone", leave_running=False)  # of what is stopped, and stays so
    assert sorted(path.name for path in by_threads.directory.iterdir()) == sorted(
        path.name for path in alone.directory.iterdir()
    )
    assert by_threads.size_bytes == pytest.approx(alone.size_bytes, rel=0.01)
    expected, got = pages_by_address(alone.directory), pages_by_address(by_threads.directory)
    assert expected.keys() == got.keys()
    assert len(expected) == 2
    for pid, pages in expected.items():
        assert pages.keys() == got[pid].keys()
        assert [hex(address) for address, page in pages.items() if got[pid][address] != page] == []
    assert pagemap.cuts(by_threads.directory).keys() == pagemap.cuts(alone.directory).keys()
    last = program.numbers()[-1]
    program.kill_all()
    restore(by_threads.directory)
    program.wait_for_more(last + 60)
    assert_gapless(program)


def test_criu_waits_with_the_target_standing_still_and_then_it_runs_on(
    start: Start, dump: Callable[..., Dumped], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(LARGE)
    program.wait_for_more(5)
    seen: list[set[str]] = []
    copy = lazy_dump._Pages._copy

    def watched(self: lazy_dump._Pages) -> list[lazy_dump._Copied]:
        threads = Path(f"/proc/{program.pid}/task").iterdir()
        seen.append({(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads})
        return copy(self)

    monkeypatch.setattr(lazy_dump._Pages, "_copy", watched)
    dump(program, leave_running=True)
    assert seen == [{"t"}], "stopped by its tracer"
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


def test_memory_and_children_that_came_after_the_memory_was_taken_are_saved_too(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], folder: Path
) -> None:
    grow = (
        "more = bytearray(b'xy' * (20 << 20))\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(write)\n"
        "    while os.read(read, 1):\n"
        "        os.write(2, b'' if more.count(b'y') == 20 << 20 else b'the child is not what it was')\n"
        "    os._exit(0)\n"
        "os.close(read)\n"
    )
    program = start(growing(grow, check="os.write(write, b'x') and more[-2:] == b'xy'"))
    assert lazy_dump.reserve(program.pid, folder / "ahead")
    ahead_bytes = sum(path.stat().st_size for path in (folder / "ahead").iterdir())
    program.grow()
    dumped = criu.dump(program.pid, folder / "image", leave_running=False, pages_ahead=folder / "ahead")
    assert len(dumped.tasks) == 2
    assert dumped.size_bytes > ahead_bytes + 2 * (40 << 20)
    last = program.numbers()[-1]
    program.kill_all()
    restore(dumped.directory)
    program.wait_for_more(last + 50)
    assert_gapless(program)


@pytest.mark.parametrize("leave_running", [True, False], ids=["leave running", "stop"])
@pytest.mark.parametrize(
    ("action", "expected", "says"),
    [
        ("error", faults.InjectedFaultError, "cpu.frozen"),
        ("enospc", NoSpaceError, "disk filled up"),
        ("hang", TimeoutExceededError, "did not end within 1 s"),
    ],
)
def test_a_failure_while_criu_waits_leaves_the_target_running(
    start: Start,
    dump: Callable[..., Dumped],
    fault: Callable[[str], None],
    action: str,
    expected: type[WoodfrogError],
    says: str,
    leave_running: bool,
) -> None:
    program = start(KINDS)
    program.wait_for_more(20)
    fault(action)
    with pytest.raises(expected, match=says) as caught:
        dump(program, leave_running=leave_running, timeout_s=1 if action == "hang" else 60)
    assert "killed" not in caught.value.advice
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


def test_a_dump_that_times_out_anywhere_leaves_the_target_running(
    start: Start, dump: Callable[..., Dumped], folder: Path
) -> None:
    program = start("x = bytearray(b'ab' * (50 << 20))\n" + KINDS)

    def one(leave_running: bool, timeout_s: float) -> None:
        try:
            dump(program, leave_running=leave_running, timeout_s=timeout_s)
        finally:
            shutil.rmtree(folder / "image")
            shutil.rmtree(folder / "ahead")

    time_out_anywhere(program, one, seed=5, attempts=40, longest_s=0.4)


def test_a_folder_that_is_full_is_told_as_such(criu: Criu, start: Start, small_folder: MemoryFolder) -> None:
    program = start(growing("x = bytearray(b'ab' * (90 << 20))\n"))
    image, ahead = small_folder.path / "image", small_folder.path / "ahead"
    assert lazy_dump.reserve(program.pid, ahead)
    program.grow()
    with outgrowing(small_folder, program):
        criu.dump(program.pid, image, leave_running=False, pages_ahead=ahead)


def test_a_process_that_is_killed_while_criu_waits_is_told_and_the_others_run_on(
    start: Start, dump: Callable[..., Dumped], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(KINDS)
    program.wait_for_more(20)
    (child,) = (member for member in session_members(program.pid) if member != program.pid)
    copy = lazy_dump._Pages._copy

    def killing(self: lazy_dump._Pages) -> list[lazy_dump._Copied]:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: child not in session_members(program.pid), "the child's end")
        return copy(self)

    monkeypatch.setattr(lazy_dump._Pages, "_copy", killing)
    with pytest.raises(WoodfrogError):
        dump(program, leave_running=True)
    # Its parent finds nobody at the other end of the pipe, and says so.
    wait_until(lambda: "BrokenPipeError" in program.log.read_text(), "the parent going on")


DUMPS = """
import sys
from pathlib import Path
from woodfrog.cpu import lazy_dump
from woodfrog.cpu.criu import find
from woodfrog.operations.memory_folder import MemoryFolder
folder = MemoryFolder.make(512 << 20).path
assert lazy_dump.reserve(int(sys.argv[1]), folder / "ahead")
find().dump(int(sys.argv[1]), folder / "image", leave_running=sys.argv[2] == "True", pages_ahead=folder / "ahead",
            log_directory=Path(sys.argv[3]))
"""


@pytest.mark.parametrize("leave_running", [True, False], ids=["leave running", "stop"])
def test_criu_lets_the_target_go_by_itself_when_who_copies_is_killed(
    start: Start, fault: Callable[[str], None], tmp_path: Path, leave_running: bool
) -> None:
    program = start(KINDS)
    program.wait_for_more(20)
    fault("kill")
    dumper = subprocess.run(
        [sys.executable, "-c", DUMPS, str(program.pid), str(leave_running), str(tmp_path / "logs")], check=False
    )
    assert dumper.returncode == -signal.SIGKILL
    (work,) = (tmp_path / "logs").glob("criu-*")
    wait_until(lambda: still_running(work) is None, "CRIU's end")
    assert "Dumping finished successfully" in (work / "dump.log").read_text()
    if not leave_running:  # what a new daemon does
        processes.resume(program.pid)
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)


def test_criu_does_it_alone_unless_the_threads_are_wished_and_can(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(LARGE)
    monkeypatch.setenv(VARIABLE, "criu")
    assert not lazy_dump.reserve(program.pid, folder / "ahead")
    monkeypatch.delenv(VARIABLE)
    assert not lazy_dump.reserve(program.pid, folder / "ahead")
    monkeypatch.setenv(VARIABLE, "threads")
    assert lazy_dump.reserve(program.pid, folder / "taken")
    monkeypatch.setattr(lazy_dump, "_most_descriptors", lambda: 1100)  # 80 MB are 76 pipes of 1 MiB with two ends each
    assert not lazy_dump.reserve(program.pid, folder / "ahead")
    assert not (folder / "ahead").exists()


def test_where_there_is_no_memory_to_take_ahead_nothing_is_left_of_it(start: Start, folder: Path) -> None:
    program = start(LARGE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert not lazy_dump.reserve(program.pid, folder / "ahead")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(folder.iterdir()) == []
