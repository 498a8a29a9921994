"""What a process says of itself is not believed: wrong tables of a driver, leftovers of a visitor that were changed."""

from __future__ import annotations

import contextlib
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from copier import CONTROL, FACTS, PLACE, Copier, read_word, wait_until

from woodfrog.driver.entering import Copies, Entered

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="woodfrog-enter enters x86-64 processes only")

FILE_BYTES = 1 << 16
NAMES_AT, SYMBOLS_AT, REFERENCES_AT, DYNAMIC_AT, SLOT_AT = 0x1000, 0x2000, 0x3000, 0x4000, 0x8000
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_PLTREL, DT_JMPREL = 0, 2, 5, 6, 10, 20, 23
DT_RELA = 7
R_X86_64_JUMP_SLOT = 7
# Maps the file as a driver's libraries are mapped (one part of it writable if told so), and waits.
PROGRAM = """
import mmap, sys
file = open(sys.argv[1], "rb")
read_only = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
print("ready", flush=True)
sys.stdin.read(1)
"""
# Its own memory where woodfrog-enter would put its code.
OCCUPIED = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
place = int(sys.argv[1])
assert libc.mmap(place, 12345 * 4096, 3, 0x100022, -1, 0) == place
ctypes.memset(place, 0x5a, 4096)
print("ready", flush=True)
sys.stdin.read(1)
sys.exit(ctypes.string_at(place, 4096) != bytes([0x5a]) * 4096)
"""


@dataclass(frozen=True)
class Library:
    """A driver as a file: its head, one reference to memcpy, and what is said of that."""

    magic: bytes = b"\x7fELF\x02\x01\x01"
    segments: int = 2
    segments_at: int = 64
    dynamic_at: int = DYNAMIC_AT
    dynamic_bytes: int = 16 * 7
    names_at: int = NAMES_AT
    name_bytes: int = 64
    symbols_at: int = SYMBOLS_AT
    references_at: int = REFERENCES_AT
    reference_bytes: int = 24
    kind: int = DT_RELA
    symbol: int = 1
    name: int = 1
    slot: int = SLOT_AT

    def pack(self) -> bytes:
        image = bytearray(FILE_BYTES)

        def put(at: int, what: bytes) -> None:
            image[at : at + len(what)] = what

        head = struct.pack(
            "<16sHHIQQQIHHHHHH", self.magic, 3, 62, 1, 0, self.segments_at, 0, 0, 64, 56, self.segments, 64, 0, 0
        )
        put(0, head)
        put(64, struct.pack("<IIQQQQQQ", PT_LOAD, 5, 0, 0, 0, FILE_BYTES, FILE_BYTES, 4096))
        size = self.dynamic_bytes
        put(
            120,
            struct.pack("<IIQQQQQQ", PT_DYNAMIC, 6, self.dynamic_at, self.dynamic_at, self.dynamic_at, size, size, 8),
        )
        put(NAMES_AT, b"\0memcpy\0")
        put(SYMBOLS_AT + 24, struct.pack("<IBBHQQ", self.name, 18, 0, 0, 0, 0))
        put(REFERENCES_AT, struct.pack("<QQq", self.slot, self.symbol << 32 | R_X86_64_JUMP_SLOT, 0))
        entries = [
            (DT_STRTAB, self.names_at), (DT_STRSZ, self.name_bytes), (DT_SYMTAB, self.symbols_at),
            (DT_JMPREL, self.references_at), (DT_PLTRELSZ, self.reference_bytes), (DT_PLTREL, self.kind), (DT_NULL, 0),
        ]  # fmt: skip
        put(DYNAMIC_AT, b"".join(struct.pack("<QQ", *entry) for entry in entries))
        return bytes(image)


RIGHT = Library()
NOWHERE = (1 << 63) - 4096
OTHER_PLACE = PLACE - (1 << 20)  # of another version (copier.cpp, order h)
WRONG = {
    "no head": replace(RIGHT, magic=b"\x7fELG\x02\x01\x01"),
    "32 bits": replace(RIGHT, magic=b"\x7fELF\x01\x01\x01"),
    "no segments": replace(RIGHT, segments=0),
    "too many segments": replace(RIGHT, segments=65535),
    "segments nowhere": replace(RIGHT, segments_at=NOWHERE),
    "tables nowhere": replace(RIGHT, dynamic_at=NOWHERE),
    "tables without end": replace(RIGHT, dynamic_bytes=1 << 62),
    "tables too short": replace(RIGHT, dynamic_bytes=16),
    "names nowhere": replace(RIGHT, names_at=NOWHERE),
    "names without end": replace(RIGHT, name_bytes=1 << 62),
    "too many names": replace(RIGHT, name_bytes=(16 << 20) + 1),
    "symbols nowhere": replace(RIGHT, symbols_at=NOWHERE),
    "references nowhere": replace(RIGHT, references_at=NOWHERE),
    "references without end": replace(RIGHT, reference_bytes=(1 << 64) - 8),
    "too many references": replace(RIGHT, reference_bytes=(8 << 20) + 24),
    "references without addends": replace(RIGHT, kind=17),
    "a symbol nowhere": replace(RIGHT, symbol=(1 << 32) - 1),
    "a name behind the names": replace(RIGHT, name=4096),
    "a name that is another": replace(RIGHT, name=2),
    "a reference across words": replace(RIGHT, slot=SLOT_AT + 3),
}


@contextlib.contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            reading = Path(f"/proc/{process.pid}/syscall")
            wait_until(lambda: reading.read_text().startswith("0 "), "wait for its input")
            yield process
        finally:
            process.kill()


def copies_of(pid: int, helpers: int = 2, step: str = "checkpoint") -> Copies:
    with Entered(pid, [pid], populate_threads=0, copy_threads=helpers, step=step) as visitor:
        pass
    (copies,) = visitor.visit.copies
    return copies


@pytest.mark.parametrize("what", WRONG)
def test_a_driver_with_wrong_tables_is_left_alone(tmp_path: Path, what: str) -> None:
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(WRONG[what].pack())
    with running(PROGRAM, file) as process:
        assert "in a way that woodfrog knows" in copies_of(process.pid).reason
        assert process.poll() is None


@pytest.mark.parametrize("slot", [SLOT_AT, NOWHERE, (1 << 64) - 8])
def test_a_reference_in_memory_that_cannot_be_written_is_left_alone(tmp_path: Path, slot: int) -> None:
    """With tables that are right: those above differ from these by one thing each."""
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(replace(RIGHT, slot=slot).pack())
    with running(PROGRAM, file) as process:
        assert "read-only" in copies_of(process.pid).reason
        assert process.poll() is None


def test_a_process_that_has_memory_of_its_own_there_keeps_it() -> None:
    with running(OCCUPIED, PLACE) as process:
        assert "something of its own" in copies_of(process.pid).reason
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 12345), (8, 0xFFFF_FFFF), (12, 4096)],
)
def test_leftovers_that_were_changed_are_told_and_left(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch, offset: int, value: int
) -> None:
    """The header's members (native/enter/blob/layout.hpp), one wrong each."""
    target = copier()
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", "copy_running")
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2) as visitor:
        assert visitor._process is not None
        assert visitor._process.wait(10) == -signal.SIGKILL
    monkeypatch.delenv("WOODFROG_ENTER_FAULT")
    # Once they sleep nothing reads the header any more until the driver copies.
    wait_until(lambda: target.sleeping_helpers() == 2, "sleep of its threads")
    size = 4 if offset else 8
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(PLACE + offset)
        before = memory.read(size)
        memory.seek(PLACE + offset)
        memory.write(value.to_bytes(size, "little"))
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2) as second:
        pass
    (copies,) = second.visit.copies
    assert "damaged" in copies.reason or "something of its own" in copies.reason
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(PLACE + offset)
        memory.write(before)
    target.check()
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2):
        wait_until(lambda: target.helpers() == 2, "threads that help")
    target.check_clean()


def test_code_of_another_version_is_told_and_left_to_itself(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed visitor of an older woodfrog leaves: the driver copies through that code, and would again after us,
    with nobody there any more who brings the reference back. Once it leads to the C library nothing is in the way."""
    target = copier()
    assert copies_of(target.pid).reason == ""
    slot = read_word(target.pid, FACTS)
    before = read_word(target.pid, slot)
    assert target.ask("h") == "right"
    assert copies_of(target.pid).reason == ""  # it lies there, and nobody is led to it
    write_word(target.pid, slot, OTHER_PLACE + 16)
    for step in ("checkpoint", "restore"):
        copies = copies_of(target.pid, step=step)
        assert copies.threads == copies.copies == 0
        expected = "(WFCOPY01) is in it: its driver copies alone" if step == "checkpoint" else "was not seen"
        assert expected in copies.reason
        assert read_word(target.pid, slot) == OTHER_PLACE + 16
        target.check_clean()
    write_word(target.pid, OTHER_PLACE, 0)
    assert "leads to code that is no file's" in copies_of(target.pid).reason
    target.check_clean()
    write_word(target.pid, slot, before)
    assert copies_of(target.pid).reason == ""
    target.check_clean()


def test_code_of_another_version_at_the_same_place_is_told(copier: Callable[..., Copier]) -> None:
    """There is none: another version has another place (tests/unit/native/test_enter_blob.py)."""
    target = copier()
    assert copies_of(target.pid).reason == ""
    write_word(target.pid, PLACE, int.from_bytes(b"WFCOPY77", "little"))
    copies = copies_of(target.pid)
    assert "another version of woodfrog (WFCOPY77) is in it: its driver copies alone" in copies.reason
    assert copies.copies == 0
    target.check_clean()


# Offset of the words that say which stacks are in use (blob::Control).
STACK_WORDS = CONTROL + 256 + 3 * 8 + 8 + 8 * 4 + 3 * 8
STACK_WORD_BYTES = 4


def write_word(pid: int, address: int, value: int, size: int = 8) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(value.to_bytes(size, "little"))


def killed_visit(
    target: Copier, monkeypatch: pytest.MonkeyPatch, point: str = "copy_running", *, idle_s: int = 60
) -> None:
    """A visitor that ends there; what it had begun goes on."""
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    visitor = Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2)
    visitor._command[1:1] = ["--idle", str(idle_s)]
    with visitor:
        assert visitor._process is not None
        assert visitor._process.wait(10) == -signal.SIGKILL
    monkeypatch.delenv("WOODFROG_ENTER_FAULT")


def test_memory_of_the_programs_is_never_copied_by_other_threads(copier: Callable[..., Copier]) -> None:
    """A page of it may be protected, and the program's handler wants the fault on the thread that made the call."""
    target = copier()
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2) as visitor:
        wait_until(lambda: target.helpers() == 2, "threads that help")
        assert target.ask("p") == "right"
        target.check()
    assert visitor.visit.copies[0].copies >= 4
    target.check_clean()


def test_a_thread_that_was_on_its_way_into_the_code_comes_there_after_the_visit(copier: Callable[..., Copier]) -> None:
    """One that a signal had interrupted there, for as long as its handler takes."""
    target = copier()
    assert copies_of(target.pid).reason == ""
    target.check_clean()
    assert target.ask("l") == "right"
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2):
        wait_until(lambda: target.helpers() == 2, "threads that help")
        assert target.ask("l") == "right"
    target.check_clean()


def test_threads_whose_visitor_was_killed_end_when_nothing_is_copied(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copier()
    killed_visit(target, monkeypatch, idle_s=1)
    wait_until(lambda: target.helpers() == 0, "end of the threads")
    slot = read_word(target.pid, FACTS)
    assert not PLACE <= read_word(target.pid, slot) < PLACE + 4096
    target.check()
    copies_of(target.pid)
    target.check_clean()


def test_threads_go_on_helping_while_there_is_something_to_copy(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time after which they end is of those that sleep, and 60 s by default."""
    target = copier()
    killed_visit(target, monkeypatch)
    target.check()
    assert target.helpers() == 2
    assert read_word(target.pid, FACTS + 3 * 8) == 60


def test_a_stack_that_may_be_in_use_is_left(copier: Callable[..., Copier]) -> None:
    """Of a visitor that was killed as it made the thread: nobody knows whether there is one."""
    target = copier()
    assert copies_of(target.pid).reason == ""
    write_word(target.pid, STACK_WORDS + 5 * STACK_WORD_BYTES, 1, STACK_WORD_BYTES)
    copies = copies_of(target.pid)
    assert copies.threads == 2
    assert "its stack stays" in copies.reason
    assert target.helpers() == 0
    assert target.is_at_work()
    target.check()
    write_word(target.pid, STACK_WORDS + 5 * STACK_WORD_BYTES, 0, STACK_WORD_BYTES)
    assert copies_of(target.pid).reason == ""
    target.check_clean()


def test_a_reference_that_is_told_wrongly_stays_where_it_is(
    copier: Callable[..., Copier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process says it is elsewhere: nothing is written there, and the code that it leads to stays."""
    target = copier()
    killed_visit(target, monkeypatch)
    slot = read_word(target.pid, FACTS)
    place = STACK_WORDS + 256  # a word that nobody uses
    write_word(target.pid, place, 4711)
    wait_until(lambda: target.sleeping_helpers() == 2, "sleep of its threads")
    write_word(target.pid, FACTS, place)
    assert "changed by somebody else" in copies_of(target.pid).reason
    assert read_word(target.pid, place) == 4711
    assert PLACE <= read_word(target.pid, slot) < PLACE + 4096
    assert target.helpers() == 0
    target.check()


def test_the_drivers_state_is_known_when_it_is_restored(copier: Callable[..., Copier]) -> None:
    """From the visit beside its checkpoint, by whatever woodfrog that was; and forgotten after the restore."""
    target = copier()

    def visit(step: str) -> Entered:
        return Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2, step=step)

    with visit("checkpoint") as checkpoint:
        assert target.ask("w") == "right"
    assert checkpoint.visit.copies[0].copied_bytes > 0
    with visit("restore") as restore:
        wait_until(lambda: target.helpers() == 2, "threads that help")
        assert target.ask("r") == "right"
    assert restore.visit.copies[0].reason == ""
    assert restore.visit.copies[0].copied_bytes > 0
    with visit("restore") as again:
        target.check()
    assert "was not seen" in again.visit.copies[0].reason
    assert again.visit.copies[0].copies == 0
    target.check_clean()


def test_memory_that_is_not_the_drivers_any_more_is_not_taken_for_it(copier: Callable[..., Copier]) -> None:
    """What was saved was loaded without us: another mapping may be there by now, or none."""
    target = copier()
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2):
        assert target.ask("w") == "right"
    assert target.ask("r") == "right"
    with Entered(target.pid, [target.thread], populate_threads=0, copy_threads=2, step="restore") as visitor:
        target.check()
    assert "was not seen" in visitor.visit.copies[0].reason
    target.check_clean()


def test_a_driver_that_has_not_called_memcpy_yet_is_left_alone(copier: Callable[..., Copier]) -> None:
    """Its reference leads to the loader, which would write the function's address over ours."""
    target = copier(fresh=True)
    assert "has not called memcpy yet" in copies_of(target.pid).reason
    assert not target.has_code()
    target.check()
    assert copies_of(target.pid).reason == ""
    target.check_clean()
