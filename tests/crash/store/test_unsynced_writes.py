"""A disk that loses everything that was not synced, at any moment: never an image that is accepted and broken, never
one that was announced and is gone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import file_ways
import pytest
import store_images
from recorded_disk import Recording, State
from store_images import CHUNK_BYTES
from store_worker import data_of

from woodfrog._native import transfer
from woodfrog.errors import WoodfrogError
from woodfrog.store import files
from woodfrog.store.open import open_store
from woodfrog.store.tiers.disk import DiskTier

ROUNDS = int(os.environ.get("WOODFROG_CRASH_ROUNDS", "3"))
SEEDS = {"a@1": 1, "a@2": 2, "b@1": 3, "a@3": 4, "c@1": 2}


def write(recording: Recording, place: Path, reference: str) -> None:
    name = reference.partition("@")[0]
    data = data_of(SEEDS[reference])
    with open_store(place, chunk_bytes=CHUNK_BYTES) as store, store.session() as session:
        store_images.store_data(session, data[: 9 * CHUNK_BYTES], "auto")
        if reference == "b@1":
            session.flush()
        store_images.store_data(session, data[9 * CHUNK_BYTES :])
        assert session.publish(name, lambda number: store_images.manifest(data, number)) == reference
    recording.mark(f"there {reference}")


def remove(recording: Recording, place: Path, reference: str) -> None:
    recording.mark(f"going {reference}")
    with open_store(place) as store:
        store.remove(reference)
    recording.mark(f"gone {reference}")


def life(recording: Recording, place: Path) -> None:
    """Everything that a store can do, once."""
    write(recording, place, "a@1")
    write(recording, place, "a@2")
    write(recording, place, "b@1")
    remove(recording, place, "a@2")
    with open_store(place) as store:
        store.prune(store_images.digests, grace_s=0, rewrite_above=0.05)
    write(recording, place, "a@3")
    with open_store(place) as store:
        store.repair(store_images.digests)
    remove(recording, place, "a@1")
    with open_store(place) as store:
        store.prune(store_images.digests, grace_s=0, rewrite_above=0.05)
    write(recording, place, "c@1")


@pytest.fixture(scope="module", params=file_ways.WAYS)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What is in a file counts as of its last fsync, so what rings write is recorded like all else: that nothing was
    still on its way then is what `check_complete` shows."""
    root = tmp_path_factory.mktemp("recorded") / "store"
    root.mkdir(0o700)
    recorded = Recording(root)
    before = transfer.uring_requests()
    with pytest.MonkeyPatch.context() as patch, file_ways.chosen(request.param):
        patch.setattr(DiskTier, "pack_bytes", 8 * CHUNK_BYTES)
        with recorded.recording(patch):
            life(recorded, root)
    assert files.is_in_memory(root) or (transfer.uring_requests() > before) == (request.param == "uring")
    return recorded


def judge(state: State, place: Path) -> None:
    """Opens what the cut left, and compares it with what had been said."""
    state.build(place)
    there = {mark.split()[1] for mark in state.marks if mark.startswith("there")}
    going = {mark.split()[1] for mark in state.marks if mark.startswith("going")}
    gone = {mark.split()[1] for mark in state.marks if mark.startswith("gone")}
    with open_store(place, chunk_bytes=CHUNK_BYTES) as store:
        found = set(store_images.references(store))
        assert there - going <= found, "an image that was announced is gone"
        assert not gone & found, "an image that was removed is back"
        assert store.verify(store_images.digests, sample=0) == []  # `read` compares the bytes
        for reference in found:
            assert store_images.read(store, reference) == data_of(SEEDS[reference])
        for name in {reference.partition("@")[0] for reference in there | gone}:
            highest = max(int(reference[2:]) for reference in there | gone if reference.startswith(name))
            assert store.next_number(name) > highest, "a number would be used twice"


def judge_all(recording: Recording, tree: Path, chosen: random.Random, keep: Sequence[float]) -> int:
    """Every prefix, with these probabilities for what was not synced; how many different states that were."""
    before: set[object] = set()
    for count in range(len(recording.steps) + 1):
        for probability in keep:
            state = State(recording, count, chosen, probability)
            picture = (tuple(state.marks), tuple((path, state.contents[inode]) for path, inode in state.files()))
            if picture not in before:
                before.add(picture)
                place = tree / f"{len(before)}"
                judge(state, place)
                shutil.rmtree(place)
    return len(before)


def test_every_step_was_recorded_and_nothing_that_counts_is_unsynced(recording: Recording) -> None:
    recording.check_complete()
    assert len(recording.steps) > 200


def test_whatever_a_power_cut_leaves_no_image_is_broken_or_lost(recording: Recording, memory: Path) -> None:
    # Nothing that was not synced, and some of it. (That everything is there is what killed processes leave.)
    keep = (0.0, *([0.5] * max(1, ROUNDS // 3)))
    assert judge_all(recording, memory, random.Random("cut"), keep) > len(recording.steps)


def test_the_test_finds_a_store_that_syncs_too_little(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with one promise left out each time."""
    for broken in ("files", "directories"):
        root, place = tmp_path / broken, memory / broken
        root.mkdir(0o700)
        place.mkdir()
        recorded = Recording(root)
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "pack_bytes", 8 * CHUNK_BYTES)

            def sync(descriptor: int, broken: str = broken) -> None:
                if Path(f"/proc/self/fd/{descriptor}").is_dir() == (broken == "files"):
                    os.fsync(descriptor)

            patch.setattr(files, "sync", sync)
            with recorded.recording(patch):
                write(recorded, root, "a@1")
        with pytest.raises((AssertionError, WoodfrogError)):
            judge_all(recorded, place, random.Random(broken), (0.0, 0.5))
