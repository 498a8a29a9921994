"""A process whose driver copies on a thread of its own, on demand (tests/sim/enter/copier.cpp)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ordered_program import OrderedProgram

MIB = 1 << 20
DEADLINE_S = 30.0
# Of one round: 32 pieces of 2 MiB but for the last words, saved and loaded.
ROUND_BYTES = 2 * (64 * MIB - 517 * 8)
# Where woodfrog-enter puts its code (native/enter/blob/layout.hpp), what is behind it, and how large that is.
PLACE = 0x1F0DF4160000
CODE_BYTES = 4096
FACTS, CONTROL, STACKS = PLACE + 0x1000, PLACE + 0x2000, PLACE + 0x3000
STACKS_BYTES = 16 * 16384


class Copier(OrderedProgram):
    """tests/sim/enter/copier.cpp as a process; see there."""

    def __init__(self, program: Path, driver: Path, *, fresh: bool = False) -> None:
        # Without a sanitizer that these tests run with: that is for woodfrog-enter, and forbids overlapping copies.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        super().__init__([str(program), str(driver), *["fresh"] * fresh], env=environment)

    def check(self) -> None:
        """A round of the driver's copies, every byte compared."""
        assert self.ask("c") == "right"

    def helpers(self) -> int:
        """Threads of woodfrog-enter in it."""
        return helping_threads(self.pid)

    def sleeping_helpers(self) -> int:
        """How many of them wait for a copy."""
        futex = "202"  # its number on x86-64
        found = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            is_helper = (task / "comm").read_text() == "woodfrog-copy\n"
            found += is_helper and (task / "syscall").read_text().split()[0] == futex
        return found

    def tracers(self) -> set[str]:
        """What traces its threads; "0": nobody."""
        return {
            line.split()[1]
            for status in Path(f"/proc/{self.pid}/task").glob("*/status")
            for line in status.read_text().splitlines()
            if line.startswith("TracerPid:")
        }

    def has_code(self) -> bool:
        """Whether anything of woodfrog-enter is mapped."""
        return has_code(self.pid)

    def is_at_work(self) -> bool:
        """Whether it is more than code that nobody is led to."""
        return is_at_work(self.pid)

    def check_clean(self) -> None:
        """Nothing of woodfrog-enter is at work in it, nobody traces it, and a round is right."""
        assert not self.is_at_work()
        assert self.tracers() == {"0"}
        self.check()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def wait_until(found: Callable[[], bool], what: str) -> None:
    """Look until it is so, or fail."""
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline, f"no {what}"
        os.sched_yield()


def helping_threads(pid: int) -> int:
    """How many threads of woodfrog-enter a process has; its own may end meanwhile."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += (task / "comm").read_text() == "woodfrog-copy\n"
    return found


def has_code(pid: int) -> bool:
    """Whether anything of woodfrog-enter is mapped in a process."""
    return _is_mapped(pid, PLACE, STACKS + STACKS_BYTES)


def is_at_work(pid: int) -> bool:
    """Whether threads of woodfrog-enter are in a process, or stacks for them, or its driver is led to that code."""
    if helping_threads(pid) or _is_mapped(pid, STACKS, STACKS + STACKS_BYTES):
        return True
    if not has_code(pid):
        return False
    slot = read_word(pid, FACTS)
    return slot != 0 and PLACE <= read_word(pid, slot) < PLACE + CODE_BYTES


def read_word(pid: int, address: int) -> int:
    """Eight bytes of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return int.from_bytes(memory.read(8), "little")


def _is_mapped(pid: int, begin: int, end: int) -> bool:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = [[int(word, 16) for word in line.split()[0].split("-")] for line in maps]
    return any(first < end and last > begin for first, last in ranges)
