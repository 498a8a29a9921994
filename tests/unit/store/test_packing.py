"""Filling several packs side by side: nothing is lost between the lanes, and one that fails ends them all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_places import Place

from woodfrog._native import transfer
from woodfrog.errors import UsageError
from woodfrog.faults import InjectedFaultError
from woodfrog.store import packing
from woodfrog.store.records import chunk_table
from woodfrog.store.store import Store

COUNT = 61


@pytest.fixture
def store(make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch) -> Store:
    opened = make_place("disk").open()
    monkeypatch.setattr(packing, "_LANE_BYTES", 4 * opened.chunk_bytes)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    return opened


@pytest.fixture
def chunks(tmp_path: Path, store: Store) -> tuple[bytes, int, bytes]:
    """Digests, a descriptor of the file they are in, and their table."""
    size = store.chunk_bytes
    (tmp_path / "data").write_bytes(os.urandom(COUNT * size))
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    digests = transfer.hash_pieces([(fd, at * size, size) for at in range(COUNT)], chunk_bytes=size)
    return digests, fd, chunk_table(digests, range(0, COUNT * size, size), [size] * COUNT, [0] * COUNT)


def test_every_chunk_of_every_lane_is_stored(
    store: Store, chunks: tuple[bytes, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, fd, table = chunks
    everybody = threading.Barrier(8, timeout=60)

    def when_all_are_there(*arguments: Any, **options: Any) -> tuple[bytes, bytes]:
        everybody.wait()
        return transfer.write_pack(*arguments, **options)

    monkeypatch.setattr(packing, "write_pack", when_all_are_there)
    with store.session() as session:
        session.write(table, [fd], compress="none")
        session.write(b"", [fd], compress="none")
        session.publish("lanes", lambda number: b"manifest")
    assert store.path is not None
    assert len(list(store.path.glob("packs/*/*"))) == 8
    with store.reader() as reader:
        assert len(reader.find(digests)) == 32 * COUNT
        arena = transfer.Arena(COUNT * store.chunk_bytes)
        located = reader.locate(digests)
        # Each chunk is compared with its digest on the way.
        transfer.refill_arena_from_packs(
            arena, [(0, COUNT * store.chunk_bytes)], digests, *located, chunk_bytes=store.chunk_bytes
        )


def test_a_lane_that_fails_says_why_and_leaves_nothing(
    store: Store, chunks: tuple[bytes, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, fd, table = chunks
    monkeypatch.setenv("WOODFROG_FAULTS", "store.pack.written:error:3")
    with pytest.raises(InjectedFaultError), store.session() as session:
        session.write(table, [fd], compress="none")
    monkeypatch.delenv("WOODFROG_FAULTS")
    assert store.path is not None
    files = [path for path in store.path.rglob("*") if path.is_file() and path.name != "reserve"]
    left = [path for path in files if path.stat().st_size >= store.chunk_bytes]
    assert left == []
    with store.session() as session:
        assert len(session.missing(digests)) == 4 * COUNT


def test_a_wrong_chunk_in_one_lane_is_refused(store: Store, chunks: tuple[bytes, int, bytes]) -> None:
    digests, fd, _ = chunks
    size = store.chunk_bytes
    wrong = chunk_table(
        digests[:-32] + bytes(32), range(0, COUNT * size, size), [size] * COUNT, [0] * COUNT
    )  # the last lane's last chunk
    with store.session() as session:
        directory = session.work_directory  # another thread may be at work there
        with pytest.raises(transfer.IntegrityError):
            session.write(wrong, [fd], compress="none")
        assert directory.is_dir()
        with pytest.raises(UsageError):
            session.flush()
    assert not directory.exists()


def test_a_store_in_memory_is_compressed_only_if_that_is_asked_for(make_place: Callable[..., Place]) -> None:
    stored = {}
    for compress in ("auto", "lz4"):
        opened = make_place("ram").open()
        size = opened.chunk_bytes
        with open(os.memfd_create("text"), "w+b") as file:
            file.write(b"woodfrog " * (size // 9) + bytes(size % 9))
            file.flush()
            digests = transfer.hash_pieces([(file.fileno(), 0, size)], chunk_bytes=size)
            with opened.session() as session:
                stored[compress] = session.write(
                    chunk_table(digests, [0], [size], [0]), [file.fileno()], compress=compress
                )
    assert stored["lz4"] < stored["auto"] // 2
    assert stored["auto"] == size
