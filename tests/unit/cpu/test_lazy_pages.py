"""Which pages of a tree are left to woodfrog's threads: none that CRIU shares between a process and those below it."""

from __future__ import annotations

import os
import socket
import struct
from array import array
from pathlib import Path

import pytest

from woodfrog.cpu.images import Task
from woodfrog.cpu.lazy_pages import LazyPages
from woodfrog.errors import BadImageError

from .test_pagemap import BASE, LAZY, PAGE, PRESENT, entry, fields, image

BOTH = PRESENT | LAZY


def task(pid: int, parent: int) -> Task:
    return Task(pid, parent, pid, pid, (pid,))


def write(directory: Path, pid: int, *entries: bytes) -> None:
    (directory / f"pagemap-{pid}.img").write_bytes(image(fields(f1=pid), *entries))


def addresses(lazy: LazyPages, pid: int) -> list[int]:
    return [(one - BASE) // PAGE for one in array("Q", lazy._processes[pid].pieces).tolist()[::3]]


def test_lazy_pages_of_every_process_with_their_places(tmp_path: Path) -> None:
    write(tmp_path, 1, entry(BASE, 4), entry(BASE + 10 * PAGE, 2, BOTH), entry(BASE + 20 * PAGE, 3, BOTH))
    write(tmp_path, 2, entry(BASE + 30 * PAGE, 1, BOTH))
    lazy = LazyPages(tmp_path, [task(1, 0), task(2, 1)])
    assert addresses(lazy, 1) == [10, 20]
    assert array("Q", lazy._processes[1].pieces).tolist()[2::3] == [4 * PAGE, 6 * PAGE]
    assert addresses(lazy, 2) == [30]
    assert lazy.size_bytes == 6 * PAGE
    assert lazy.replaced == {}


def test_what_a_process_may_share_with_one_above_it_is_left_to_criu(tmp_path: Path) -> None:
    write(tmp_path, 1, entry(BASE, 4, BOTH), entry(BASE + 10 * PAGE, 2, BOTH), entry(BASE + 20 * PAGE, 9, BOTH))
    write(tmp_path, 2, entry(BASE + 40 * PAGE, 1, BOTH))
    write(tmp_path, 3, entry(BASE + 3 * PAGE, 9, BOTH), entry(BASE + 41 * PAGE, 1, BOTH))  # below 2, which is below 1
    write(tmp_path, 4, entry(BASE + 41 * PAGE, 1, BOTH))  # beside 3
    lazy = LazyPages(tmp_path, [task(1, 0), task(2, 1), task(3, 2), task(4, 2)])
    assert addresses(lazy, 1) == [20]
    assert addresses(lazy, 2) == [40]
    assert addresses(lazy, 3) == [41]
    assert addresses(lazy, 4) == [41]
    assert sorted(lazy.replaced) == ["pagemap-1.img", "pagemap-3.img"]
    (tmp_path / "pagemap-1.img").write_bytes(lazy.replaced["pagemap-1.img"])
    (tmp_path / "pagemap-3.img").write_bytes(lazy.replaced["pagemap-3.img"])
    again = LazyPages(tmp_path, [task(1, 0), task(2, 1), task(3, 2), task(4, 2)])
    assert addresses(again, 1) == [20]
    assert again.replaced == {}
    assert array("Q", again._processes[1].pieces).tolist()[2] == 6 * PAGE, "their places in the file stay"


def test_a_tree_without_such_pages_is_criu_s_own(tmp_path: Path) -> None:
    write(tmp_path, 1, entry(BASE, 4))
    assert LazyPages.of(tmp_path, [task(1, 0)]) is None


def test_a_pagemap_that_cannot_be_read_is_criu_s_own(tmp_path: Path) -> None:
    (tmp_path / "pagemap-1.img").write_bytes(b"nothing")
    with pytest.raises(BadImageError):
        LazyPages(tmp_path, [task(1, 0)])
    assert LazyPages.of(tmp_path, [task(1, 0)]) is None


def test_parents_that_go_in_a_circle_are_no_endless_search(tmp_path: Path) -> None:
    write(tmp_path, 1, entry(BASE, 4, BOTH))
    write(tmp_path, 2, entry(BASE, 4, BOTH))
    lazy = LazyPages(tmp_path, [task(1, 2), task(2, 1)])
    assert lazy.size_bytes == 0


def collected(lazy: LazyPages, *sent: bytes) -> bool:
    """What becomes of a hand-over in which CRIU sends that, and ends."""
    ours, criu = socket.socketpair()
    arrived, arrives = os.pipe()
    ended, ends = os.pipe()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    for word in sent:
        criu.send(word)
    criu.close()
    os.close(ends)
    try:
        return lazy._collect(ours, arrived, ended)
    finally:
        ours.close()
        for fd in (arrived, arrives, ended):
            os.close(fd)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([], id="at once"),
        pytest.param([b"\x01\x00"], id="within a number"),
        pytest.param([struct.pack("=i", 7)], id="before a number's userfaultfd"),
        pytest.param([struct.pack("=i", -7), struct.pack("=i", 7)], id="behind one that had ended at the dump"),
    ],
)
def test_criu_that_ends_in_its_hand_over_is_not_taken_for_a_failure_of_ours(tmp_path: Path, sent: list[bytes]) -> None:
    """Its log says why it did."""
    write(tmp_path, 7, entry(BASE, 4, BOTH))
    lazy = LazyPages(tmp_path, [task(7, 0)])
    assert not collected(lazy, *sent)
    assert lazy.failure is None


def test_a_hand_over_without_a_descriptor_is_a_failure_of_ours(tmp_path: Path) -> None:
    write(tmp_path, 7, entry(BASE, 4, BOTH))
    with pytest.raises(RuntimeError, match="no userfaultfd for process 7"):
        collected(LazyPages(tmp_path, [task(7, 0)]), struct.pack("=i", 7), b"x")
