"""A restore whose pages woodfrog's threads are to fill, and that fails midway: nothing of it is restored."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from refused_calls import UFFDIO_COPY, UFFDIO_REGISTER, USERFAULTFD, Call, Refusing, listen

from woodfrog._native import transfer
from woodfrog.cpu import lazy_pages, pages_by, run
from woodfrog.cpu.criu import Criu, Restored
from woodfrog.cpu.lazy_pages import LazyPages
from woodfrog.errors import NoSpaceError, RefusedError, TargetState, WoodfrogError

from .programs import Program, Start, assert_gapless, dump_and_end, session_members

# Two processes, each with 8 MiB at an address that is nothing in the other: CRIU shares none of that between them.
PAIR = """
import mmap, os, time
child = os.fork() == 0
distance = mmap.mmap(-1, (1 + child) * (32 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched
mine = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
mine[:] = bytes([1 + child]) * len(mine)
n = 0
while True:
    assert mine[:] == bytes([1 + child]) * len(mine)
    n += 1
    if not child:
        print(n, flush=True)
    time.sleep(0.01)
"""


class From:
    """Refuses the calls of one kind from the nth on."""

    def __init__(self, what: int, nth: int, error: int) -> None:
        self._what, self._nth, self._error = what, nth, error
        self.seen = 0

    def __call__(self, call: Call) -> int:
        if call.what != self._what:
            return 0
        self.seen += 1
        return self._error if self.seen >= self._nth else 0


@pytest.fixture
def image(criu: Criu, start: Start, tmp_path: Path) -> tuple[Program, Path]:
    """Of a program that has ended: one of PAIR."""
    program = start(PAIR)
    program.wait_for_more(3)
    return program, dump_and_end(criu, program, tmp_path / "image").directory


@pytest.fixture
def nothing_is_restored(image: tuple[Program, Path], restore: Callable[[Path], Restored]) -> Iterator[None]:
    """Nor does anything stand in the way of restoring it afterwards."""
    program, directory = image
    before = program.log.read_bytes()
    yield
    assert session_members(program.pid) == []
    assert program.log.read_bytes() == before, "nothing of it ran"
    restored = restore(directory)
    assert len(restored.tasks) == 2
    program.wait_for_more(program.numbers()[-1] + 5)
    assert_gapless(program)


# CRIU asks for one userfaultfd to see whether there are any, then for one a process.
@pytest.mark.parametrize(
    ("what", "nth", "error", "kind"),
    [
        pytest.param(USERFAULTFD, 1, errno.EPERM, RefusedError, id="at all"),
        pytest.param(USERFAULTFD, 3, errno.EPERM, RefusedError, id="for the second process"),
        pytest.param(USERFAULTFD, 3, errno.ENOMEM, NoSpaceError, id="for the second process for want of memory"),
        pytest.param(UFFDIO_REGISTER, 2, errno.EINVAL, RefusedError, id="the second region"),
        pytest.param(UFFDIO_REGISTER, 2, errno.EPERM, RefusedError, id="the second region for want of rights"),
        pytest.param(UFFDIO_REGISTER, 9, errno.ENOMEM, NoSpaceError, id="a late region for want of memory"),
    ],
)
@pytest.mark.usefixtures("nothing_is_restored")
def test_a_hand_over_that_the_kernel_refuses_midway_is_told_with_the_way_out(
    criu: Criu, image: tuple[Program, Path], tmp_path: Path, what: int, nth: int, error: int, kind: type[WoodfrogError]
) -> None:
    directory = image[1]
    with Refusing(From(what, nth, error)) as refusing:
        refused = Criu(refusing.around(criu.path, tmp_path), criu.version)
        with pytest.raises(kind) as caught:
            refused.restore(directory, log_directory=tmp_path / "logs", timeout_s=60)
    assert refusing.refused
    assert caught.value.target_state == TargetState.NONE
    said = f"{caught.value.reason} {caught.value.advice}"
    assert ("userfaultfd" in said and f"{pages_by.VARIABLE}=criu" in said) == (kind is RefusedError), said
    assert ("memory" in caught.value.reason and "Free memory" in said) == (kind is NoSpaceError), said


@pytest.mark.parametrize("nth", [1, 3], ids=["at once", "with some there already"])
@pytest.mark.usefixtures("nothing_is_restored")
def test_memory_that_runs_out_while_pages_are_filled_is_told_as_such(
    criu: Criu, image: tuple[Program, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The kernel's answer to the copy itself, in the threads that fill."""
    fill_pages = transfer.fill_pages
    with Refusing(From(UFFDIO_COPY, nth, errno.ENOMEM)) as refusing:

        def watched(*arguments: Any, **options: Any) -> None:
            if not watching:
                watching.append(listen())  # this thread, which ends with the restore, and those that it makes
                refusing.watch(watching[0])
            fill_pages(*arguments, **options)

        watching: list[int] = []
        monkeypatch.setattr(transfer, "fill_pages", watched)
        with pytest.raises(NoSpaceError, match=r"memory ran out while the memory of the restored") as caught:
            criu.restore(image[1], log_directory=tmp_path / "logs", timeout_s=60)
        monkeypatch.undo()
    assert refusing.refused
    assert caught.value.target_state == TargetState.NONE
    assert "memory limit of the daemon's control group" in caught.value.advice


@pytest.mark.parametrize("whose", ["root", "child"])
@pytest.mark.usefixtures("nothing_is_restored")
def test_a_process_that_the_kernel_ends_for_want_of_memory_while_its_pages_are_filled_is_told_as_such(
    criu: Criu, image: tuple[Program, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """It does so by SIGKILL, and counts it."""
    program, directory = image
    fill_pages = transfer.fill_pages
    ended: list[int] = []

    def ending(*arguments: Any, **options: Any) -> None:
        if not ended:
            members = session_members(program.pid)
            ended.append(program.pid if whose == "root" else next(pid for pid in members if pid != program.pid))
            os.kill(ended[0], signal.SIGKILL)
        fill_pages(*arguments, **options)

    monkeypatch.setattr(transfer, "fill_pages", ending)
    monkeypatch.setattr(run, "_ended_for_memory", lambda: len(ended))
    with pytest.raises(NoSpaceError, match="ended a process for lack of memory during the CPU side's restore"):
        criu.restore(directory, log_directory=tmp_path / "logs", timeout_s=60)
    monkeypatch.undo()


@pytest.mark.usefixtures("nothing_is_restored")
def test_a_process_that_ends_when_criu_may_go_on_does_not_let_it_wait_for_ever(
    criu: Criu, image: tuple[Program, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU no longer looks for that then, and waits for what the process would have done next."""
    program, directory = image
    all_alive = LazyPages._all_alive

    def ending(self: LazyPages) -> bool:
        assert all_alive(self)
        os.kill(program.pid, signal.SIGKILL)
        (pidfd,) = (one for one in self._pidfds() if pid_of(one) == program.pid)
        assert select.select([pidfd], [], [], 60)[0]
        return True

    monkeypatch.setattr(LazyPages, "_all_alive", ending)
    monkeypatch.setattr(lazy_pages, "_END_S", 1.0)
    with pytest.raises(WoodfrogError, match="A process of the tree ended while it was being restored"):
        criu.restore(directory, log_directory=tmp_path / "logs", timeout_s=600)
    monkeypatch.undo()


def pid_of(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


@contextmanager
def few_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_criu_reads_the_pages_where_there_are_not_descriptors_enough(
    image: tuple[Program, Path], restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program, directory = image
    with few_descriptors():
        restore(directory)
    program.wait_for_more(program.numbers()[-1] + 5)
    assert_gapless(program)
    assert "lazy-pages: register" not in (tmp_path / "restore-logs" / "restore.log").read_text()
