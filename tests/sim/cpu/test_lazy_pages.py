"""Pages that woodfrog's threads put into processes that CRIU has made: right, all of them, before anything runs; or
nothing is restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from woodfrog._native import transfer
from woodfrog.cpu import pages_by
from woodfrog.cpu.criu import Criu, Restored
from woodfrog.cpu.lazy_pages import LazyPages
from woodfrog.errors import TimeoutExceededError, WoodfrogError
from woodfrog.target.reaper import Reaper

from .programs import Start, assert_gapless, dump_and_end, end, reap_session, wait_until

# Every page of its memory has a number of its own, or none; threads touch it as soon as they run again. What it may not
# read, what it never touched, what it gives back after the restore (when `begun` grows): zeros, not what was there.
KINDS = """
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None)
PAGE, COUNT = 4096, 3000
def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
def number(memory, page):
    return int.from_bytes(memory[page * PAGE:page * PAGE + 8], "little")
memory = mmap.mmap(-1, PAGE * COUNT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(COUNT):
    if page % 7:  # holes
        memory[page * PAGE:page * PAGE + 8] = (page + 1).to_bytes(8, "little")
closed, readable = 100, 200  # pages with another protection: mappings of their own, beside each other
libc.mprotect(ctypes.c_void_p(address(memory) + closed * PAGE), PAGE * 50, 0)
libc.mprotect(ctypes.c_void_p(address(memory) + readable * PAGE), PAGE * 50, 1)
locked = mmap.mmap(-1, PAGE * 64, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
assert libc.mlock(ctypes.c_void_p(address(locked)), PAGE * 64) == 0
locked[:8] = b"lockedxx"
def check(first, last):
    for page in range(first, last):
        if not closed <= page < closed + 50:
            assert number(memory, page) == (page + 1 if page % 7 else 0), page
def watch(part):
    while True:
        check(part * COUNT // 4, (part + 1) * COUNT // 4)
        time.sleep(0.001)
for part in range(4):
    threading.Thread(target=watch, args=(part,), daemon=True).start()
n = 0
while True:
    check(0, COUNT)
    assert locked[:8] == b"lockedxx" and not any(locked[8:])
    given_back = mmap.mmap(-1, PAGE * 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    given_back[:] = b"x" * len(given_back)
    libc.madvise(ctypes.c_void_p(address(given_back)), PAGE * 16, 4)
    assert not any(given_back[:])
    libc.mprotect(ctypes.c_void_p(address(memory) + closed * PAGE), PAGE * 50, 3)
    for page in range(closed, closed + 50):
        assert number(memory, page) == (page + 1 if page % 7 else 0), page
    libc.mprotect(ctypes.c_void_p(address(memory) + closed * PAGE), PAGE * 50, 0)
    n += 1
    print(n, flush=True)
    time.sleep(0.01)
"""

# Memory that a child has from its parent, copy-on-write, all but one page; each goes on checking its own.
FORKED = """
import mmap, os, time
PAGE, COUNT = 4096, 4096
memory = mmap.mmap(-1, PAGE * COUNT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = os.urandom(PAGE) * COUNT
expected = bytes(memory[:PAGE])
child = os.fork() == 0
mine = b"child " if child else b"parent"
memory[:6] = mine
n = 0
while True:
    assert memory[:6] == mine
    assert all(memory[page * PAGE:(page + 1) * PAGE] == expected for page in range(1, COUNT, 100))
    n += 1
    if not child:
        print(n, flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(params=["ours", "criu"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(pages_by.VARIABLE, "criu" if request.param == "criu" else "")
    return str(request.param)


def test_memory_of_every_kind_is_what_it_was(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path, way: str
) -> None:
    program = start(KINDS)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory
    restored = criu.restore(image, log_directory=tmp_path / "logs", timeout_s=60)
    reaper.adopt([task.pid for task in restored.tasks])
    program.wait_for_more(program.numbers()[-1] + 5)
    assert_gapless(program)
    registered = "lazy-pages: register" in (tmp_path / "logs" / "restore.log").read_text()
    assert registered == (way == "ours")
    end(restored)


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def test_what_a_child_shared_with_its_parent_it_shares_again(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path, way: str
) -> None:
    program = start(FORKED)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory
    restored = criu.restore(image, log_directory=tmp_path / "logs", timeout_s=60)
    reaper.adopt([task.pid for task in restored.tasks])
    program.wait_for_more(program.numbers()[-1] + 5)
    assert_gapless(program)
    # 16 MiB are the same for both; nobody has them for himself alone.
    assert len(restored.tasks) == 2
    assert all(private_bytes(task.pid) < 8 << 20 for task in restored.tasks), way
    end(restored)


# A child that has ended and is not waited for, beside memory of its parent's.
WITH_A_ZOMBIE = """
import mmap, os, time
child = os.fork()
if child == 0:
    os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = b"z" * len(memory)
n = 0
while not os.path.exists("wait"):
    assert memory[:] == b"z" * len(memory)
    n += 1
    print(n, flush=True)
    time.sleep(0.01)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * 1000, flush=True)
time.sleep(600)
"""


def test_a_child_that_had_ended_can_still_be_waited_for(
    start: Start, criu: Criu, restore: Callable[[Path], Restored], tmp_path: Path, way: str
) -> None:
    program = start(WITH_A_ZOMBIE)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    assert len(dumped.tasks) == 2
    restore(dumped.directory)
    program.wait_for_more(program.numbers()[-1] + 5)
    (program.directory / "wait").touch()
    wait_until(lambda: program.numbers()[-1] == 7000, f"the child's exit code, {way}")


@pytest.mark.parametrize("step", ["fill_pages", "answer_page_faults"])
def test_pages_that_cannot_be_filled_leave_nothing_restored(
    criu: Criu, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    program = start(KINDS)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(transfer, step, refuse)
    with pytest.raises(WoodfrogError, match="could not be filled: no more memory") as refused:
        criu.restore(image, log_directory=tmp_path / "logs", timeout_s=60)
    assert pages_by.VARIABLE in refused.value.advice
    assert not Path(f"/proc/{program.pid}").exists()


def test_criu_reads_the_pages_where_no_userfaultfd_is_to_be_had(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(KINDS)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory
    monkeypatch.setattr(transfer, "userfaultfd_trouble", lambda: "Operation not permitted")
    restored = criu.restore(image, log_directory=tmp_path / "logs", timeout_s=60)
    reaper.adopt([task.pid for task in restored.tasks])
    program.wait_for_more(program.numbers()[-1] + 5)
    assert_gapless(program)
    assert "lazy-pages: register" not in (tmp_path / "logs" / "restore.log").read_text()
    end(restored)


# Restores, and stands still while CRIU waits for its pages: it says so, and waits for its own end.
FILLS_FOR_EVER = """
import sys, threading
from pathlib import Path
from woodfrog.cpu.criu import find
from woodfrog.cpu.lazy_pages import LazyPages
def fill(self):
    print("filling", flush=True)
    threading.Event().wait()
LazyPages._fill = fill
find().restore(Path(sys.argv[1]), log_directory=Path(sys.argv[2]), timeout_s=600)
"""


def test_criu_ends_with_nothing_restored_when_who_fills_is_killed(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start(KINDS)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory
    arguments = [sys.executable, "-c", FILLS_FOR_EVER, str(image), str(tmp_path / "logs")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as filler:
        assert filler.stdout is not None
        assert filler.stdout.readline() == b"filling\n"
        assert Path(f"/proc/{program.pid}").exists()
        filler.send_signal(signal.SIGKILL)
    log = next((tmp_path / "logs").glob("*/restore.log"))
    wait_until(lambda: "Aborting restore due to post-restore script" in log.read_text(), "CRIU's giving up")
    reap_session(program.pid)  # once all of what it had made has ended
    assert len(program.numbers()) == program.numbers()[-1], "nothing of it ran"


def test_a_time_out_while_pages_are_filled_leaves_nothing(
    criu: Criu, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(KINDS)
    program.wait_for_more(3)
    image = dump_and_end(criu, program, tmp_path / "image").directory
    began, may_end = os.pipe()

    def wait(self: LazyPages) -> None:
        os.write(may_end, b"1")
        while Path(f"/proc/{program.pid}").exists():  # until CRIU's time is over
            os.sched_yield()
        raise OSError("the process has ended")

    monkeypatch.setattr(LazyPages, "_fill", wait)
    with pytest.raises(TimeoutExceededError):
        criu.restore(image, log_directory=tmp_path / "logs", timeout_s=2)
    assert os.read(began, 1) == b"1"
    os.close(began)
    os.close(may_end)
    assert not Path(f"/proc/{program.pid}").exists()
