"""A target that is told what of its memory is not captured yet: it waits before it writes that, and never for ever."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from interposer_agents import DEADLINE_S, Listener, Target

from woodfrog._native import transfer
from woodfrog.errors import WoodfrogError
from woodfrog.target.link import AgentLink, Guarded
from woodfrog.target.memory import Exported

MIB = 1 << 20
CHUNK = 64 << 10


@contextmanager
def returned(link: AgentLink) -> Iterator[Exported]:
    """The target's memory has been away and is back; its gate is closed."""
    link.quiesce(1, DEADLINE_S)
    with link.export_memory() as exported:
        link.release_memory()
        link.return_memory(exported.handles, list(exported.fds))
        yield exported


def guard_of(exported: Exported) -> tuple[transfer.Guard, list[Guarded]]:
    """Of all its memory nothing is captured."""
    sizes = [handle.size_bytes for handle in exported.handles]
    positions = array("I", range(sum(-(-size // CHUNK) for size in sizes)))
    guard = transfer.Guard([(sizes, positions.tobytes())], chunk_bytes=CHUNK)
    places = guard.places(0)
    return guard, [Guarded(one.handle, *place) for one, place in zip(exported.handles, places, strict=True)]


def test_a_write_waits_until_its_memory_is_captured(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    with listener.accept() as link:
        with returned(link) as exported:
            guard, handles = guard_of(exported)
            link.guard(handles, guard.fd)
        link.resume()
        whole = guard.left(0)

        def serve() -> None:
            while runs := guard.take_wanted(0, 16):
                guard.captured(0, runs)

        server = threading.Thread(target=serve)
        server.start()
        assert target.ask("fill") == "filled"
        guard.finish()
        server.join(DEADLINE_S)
        link.guard_end()
        assert guard.waits == 2  # one for each buffer
        assert guard.left(0) == whole - 2 * 4 * MIB // CHUNK  # whole units
        assert target.ask("check") == "ok"


@pytest.mark.parametrize("how", ["it is over", "guard_end", "detach", "the daemon is gone", "a new operation"])
def test_a_target_that_waits_goes_on_whatever_becomes_of_the_snapshot(
    target: Target, listener: Listener, how: str
) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    with listener.accept() as link:
        with returned(link) as exported:
            guard, handles = guard_of(exported)
            link.guard(handles, guard.fd)
        link.resume()
        target.send("fill")
        assert guard.take_wanted(0, 1)
        if how == "it is over":
            guard.finish()
        elif how == "guard_end":
            link.guard_end()
        elif how == "detach":
            link.detach()
        elif how == "a new operation":
            link.quiesce(2, DEADLINE_S)
            link.resume()
        else:
            link.close()
        assert target.answer() == "filled"
        assert target.ask("check") == "ok"


def test_pages_and_handles_that_make_no_sense_are_refused_and_the_target_runs_on(
    target: Target, listener: Listener
) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    with listener.accept() as link:
        guard = transfer.Guard([([2 * MIB], b"")], chunk_bytes=CHUNK)
        with pytest.raises(WoodfrogError, match="not possible while the target is running"):
            link.guard([], guard.fd)
        with returned(link) as exported:
            guard, handles = guard_of(exported)
            first = handles[0]
            for wrong, words in (
                (Guarded(first.handle + 1000, first.first, first.count), "does not know"),
                (Guarded(first.handle, first.first, 1 << 20), "not in its page"),
                (Guarded(first.handle, 0xFFFFFFFF, first.count), "not in its page"),
                (Guarded(first.handle, first.first, 0), "not in its page"),
            ):
                with pytest.raises(WoodfrogError, match=words):
                    link.guard([wrong], guard.fd)
            short = os.memfd_create("short")
            os.truncate(short, 100)
            wrong_page = os.memfd_create("wrong")
            os.truncate(wrong_page, 1 << 20)
            with mmap.mmap(wrong_page, 1 << 20) as page, mmap.mmap(guard.fd, 4096) as right:
                page[:64] = right[:64]
                struct.pack_into("<I", page, 12, 1 << 25)  # more units than there is room for
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (short, wrong_page, null):
                with pytest.raises(WoodfrogError, match="cannot be used"):
                    link.guard(handles, fd)
                os.close(fd)
        link.resume()
        assert target.ask("fill") == "filled"  # nothing is armed
        assert target.ask("check") == "ok"
        assert guard.waits == 0


def test_the_kernels_launched_meanwhile_are_told_and_the_page_is_gone_afterwards(
    target: Target, listener: Listener
) -> None:
    with listener.accept() as link:
        with returned(link) as exported:
            guard, handles = guard_of(exported)
            link.guard(handles, guard.fd)
        link.resume()
        maps = f"/proc/{target.pid}/maps"
        with open(maps) as file:
            assert "woodfrog-guard" in file.read()
        guard.finish()
        assert link.guard_end() == []
        assert link.guard_end() == []  # again is no error
        with open(maps) as file:
            assert "woodfrog-guard" not in file.read()
        assert not any("woodfrog-guard" in name for name in target.descriptors().values())
