"""prune, verify, repair and retention, on every tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import store_images
from store_images import CHUNK_BYTES, pattern, references
from store_places import Place

from woodfrog.errors import BadImageError, UsageError
from woodfrog.store.entries import Entry
from woodfrog.store.open import open_store
from woodfrog.store.retention import Policy, plan
from woodfrog.store.store import Store

A = pattern(6 * CHUNK_BYTES, "a")
B = pattern(6 * CHUNK_BYTES + 99, "b")
MIXED = A[:CHUNK_BYTES] + pattern(CHUNK_BYTES, "m")


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def everything(store: Store) -> dict[str, int]:
    return {listed.key: listed.size_bytes for prefix in ("packs/", "index/") for listed in store.tier.list(prefix)}


def test_prune_deletes_what_no_image_needs_and_nothing_else(store: Store) -> None:
    store_images.write(store, A, "a")
    only_a = store_images.pack_keys(store)
    store_images.write(store, B, "b")
    store.remove("b@1")
    before = everything(store)
    planned = store.prune(store_images.digests, dry_run=True, grace_s=0)
    assert everything(store) == before
    done = store.prune(store_images.digests, grace_s=0)
    assert done.executed
    assert not planned.executed
    assert [pack.action for pack in done.packs] == [pack.action for pack in planned.packs]
    assert sorted(pack.action for pack in done.packs) == ["delete", "keep"]
    assert done.freed_bytes == sum(size for key, size in before.items() if key in set(before) - set(only_a)) - sum(
        size for key, size in before.items() if key.startswith("index/")
    )
    assert store_images.pack_keys(store) == only_a
    assert len(store_images.index_keys(store)) == 1
    assert store_images.read(store, "a") == A
    assert store.verify(store_images.digests) == []
    again = store.prune(store_images.digests, grace_s=0)
    assert again.freed_bytes == 0
    assert any("delete" in line for line in planned.lines())


def test_prune_leaves_what_is_young(store: Store) -> None:
    store_images.write(store, A, "a")
    store.remove("a@1")
    before = everything(store)
    assert store.prune(store_images.digests, grace_s=3600).freed_bytes == 0
    assert everything(store) == before
    # A session that was told that they are there finds them.
    with store.session() as session:
        assert session.missing(store_images.digests_of(A)) == b""


def test_a_pack_of_which_little_is_needed_is_rewritten(store: Store) -> None:
    data = A + b"compresses" * 20_000
    store_images.write(store, data, "a", compress="auto")
    kept = data[: 2 * CHUNK_BYTES] + data[-CHUNK_BYTES:]
    store_images.write(store, kept, "kept")
    store.remove("a@1")
    before = sum(everything(store).values())
    done = store.prune(store_images.digests, grace_s=0)
    assert [pack.action for pack in done.packs if pack.live_chunks].count("rewrite") == 1
    assert sum(everything(store).values()) < before
    assert store_images.read(store, "kept") == kept
    assert store.verify(store_images.digests) == []


def test_small_packs_are_joined(store: Store) -> None:
    pieces = [pattern(2 * CHUNK_BYTES, f"piece {number}") for number in range(9)]
    for number, data in enumerate(pieces):
        store_images.write(store, data, f"piece-{number}")
    assert len(store_images.pack_keys(store)) == 9
    store.prune(store_images.digests, grace_s=0)
    assert len(store_images.pack_keys(store)) == 1
    assert len(store_images.index_keys(store)) == 1
    for number, data in enumerate(pieces):
        assert store_images.read(store, f"piece-{number}") == data


def test_a_chunk_that_was_stored_twice_is_kept_once(place: Place, store: Store) -> None:
    # Two writers that cannot see each other's chunks.
    with store.session() as one, place.open().session() as two:
        store_images.store_data(one, A)
        store_images.store_data(two, A + B)
        one.publish("one", lambda number: store_images.manifest(A, number))
        two.publish("two", lambda number: store_images.manifest(A + B, number))
    assert len(store_images.pack_keys(store)) == 2
    store.prune(store_images.digests, grace_s=0)
    assert len(store_images.pack_keys(store)) == 1
    assert store_images.read(store, "one") == A
    assert store_images.read(store, "two") == A + B


def test_prune_deletes_nothing_if_a_manifest_cannot_be_read(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, B, "b")
    place.damage("images/a/1", lambda data: data[:-1])
    before = everything(store)
    with pytest.raises(BadImageError, match="a@1"):
        store.prune(store_images.digests, grace_s=0)
    assert everything(store) == before


def test_prune_deletes_nothing_if_an_image_lacks_chunks(store: Store) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, B, "b")
    store.tier.delete(store_images.index_keys(store)[:1])
    packs = store_images.pack_keys(store)
    with pytest.raises(BadImageError, match="nothing was deleted"):
        store.prune(store_images.digests, grace_s=0)
    assert store_images.pack_keys(store) == packs


def test_a_store_that_lost_its_index_is_whole_after_repair(store: Store) -> None:
    for name, data in (("a", A), ("b", B), ("mixed", MIXED)):
        store_images.write(store, data, name)
    store.tier.delete(store_images.index_keys(store))
    with pytest.raises(BadImageError, match="chunks are not in the store"):
        store_images.read(store, "a")
    report = store.repair(store_images.digests)
    assert report.all_well
    assert report.indexed_again == report.packs == 3
    for name, data in (("a", A), ("b", B), ("mixed", MIXED)):
        assert store_images.read(store, name) == data
    assert store.verify(store_images.digests) == []
    assert store.repair(store_images.digests).indexed_again == 0


def test_a_damaged_index_is_found_and_replaced(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    (key,) = store_images.index_keys(store)
    place.damage(key, flip(200))
    fresh = place.open()
    problems = fresh.verify(store_images.digests)
    assert {problem.kind for problem in problems} == {"index-damaged", "image-incomplete"}
    # What cannot be found counts as missing, and is stored again rather than relied upon.
    with fresh.session() as session:
        assert len(session.missing(store_images.digests_of(A))) == 6 * 4
    report = fresh.repair(store_images.digests)
    assert list(report.damaged_indexes) == [key]
    assert report.all_well
    assert fresh.verify(store_images.digests) == []
    assert store_images.read(fresh, "a") == A


def test_a_damaged_chunk_costs_the_images_that_have_it_and_no_others(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, MIXED, "mixed")
    (first,) = (key for key in store_images.pack_keys(store) if len(store.tier.get(key, 1 << 30) or b"") > len(A))
    data = store.tier.get(first, 1 << 30)
    assert data is not None
    place.damage(first, flip(data.index(A[3 * CHUNK_BYTES :][:64])))
    problems = store.verify(store_images.digests)
    assert [(problem.kind, problem.where, problem.chunks) for problem in problems] == [
        ("pack-damaged", first, 1),
        ("image-incomplete", "a@1", 1),
    ]
    report = store.repair(store_images.digests)
    assert report.salvaged == {first: 5}
    assert report.incomplete == {"a@1": 1}
    assert first not in store_images.pack_keys(store)
    assert store_images.read(store, "mixed") == MIXED
    with pytest.raises(BadImageError, match="1 of 6 chunks"):
        store_images.read(store, "a")
    # Storing the same data again mends the image.
    store_images.write(store, A, "again")
    assert store_images.read(store, "a") == A
    assert store.verify(store_images.digests) == []


def test_a_damaged_pack_is_neither_copied_nor_rewritten_nor_deleted(
    place: Place, store: Store, make_place: Callable[[str], Place]
) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, A[: 4 * CHUNK_BYTES], "part")
    (key,) = store_images.pack_keys(store)
    data = store.tier.get(key, 1 << 30)
    assert data is not None
    place.damage(key, flip(data.index(A[3 * CHUNK_BYTES :][:64])))
    to = make_place("disk").open()
    with pytest.raises(BadImageError, match="damaged in the store that it comes from"):
        store.copy_image("a", to, store_images.digests)
    assert references(to) == []
    store.remove("a@1")
    done = store.prune(store_images.digests, grace_s=0)
    assert any("damaged" in note for note in done.notes)
    assert store_images.pack_keys(store) == [key]


def test_a_damaged_header_costs_nothing_as_long_as_the_index_is_there(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    (key,) = store_images.pack_keys(store)
    place.damage(key, flip(40))
    assert [(problem.kind, problem.chunks) for problem in store.verify(store_images.digests)] == [("pack-damaged", 0)]
    report = store.repair(store_images.digests)
    assert (report.salvaged, report.all_well) == ({key: 6}, True)
    assert store.verify(store_images.digests) == []
    assert store_images.read(store, "a") == A


def test_a_damaged_header_costs_its_segment(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    (key,) = store_images.pack_keys(store)
    place.damage(key, flip(40))
    store.tier.delete(store_images.index_keys(store))
    report = store.repair(store_images.digests)
    assert report.incomplete == {"a@1": 6}
    assert list(report.hopeless) == [key]
    assert store_images.pack_keys(store) == [key]  # nothing was found in it, so it is left for someone to look at


def test_a_pack_that_was_cut_is_told_and_what_is_in_it_is_not_relied_upon(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    (key,) = store_images.pack_keys(store)
    place.damage(key, lambda data: data[:-4096])
    fresh = place.open()
    assert [problem.kind for problem in fresh.verify(store_images.digests)] == ["pack-size", "image-incomplete"]
    with fresh.session() as session:
        assert len(session.missing(store_images.digests_of(A))) == 6 * 4
    store_images.write(fresh, A, "again")
    assert store_images.read(fresh, "a") == A


def test_a_lost_pack_is_told_with_the_images_that_need_it(store: Store) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, B, "b")
    before = store_images.pack_keys(store)
    store_images.write(store, MIXED, "mixed")
    (lost,) = set(store_images.pack_keys(store)) - set(before)
    store.tier.delete([lost])
    problems = store.verify(store_images.digests, sample=0)
    assert [(problem.kind, problem.where) for problem in problems] == [
        ("pack-missing", lost),
        ("image-incomplete", "mixed@1"),
    ]
    assert store_images.read(store, "b") == B


def test_a_sample_looks_at_every_pack_and_reads_less(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    store_images.write(store, B, "b")
    for key in store_images.pack_keys(store):
        place.damage(key, lambda data: data[:4096] + bytes(len(data) - 4096))
    problems = store.verify(sample=0.01)
    assert [(problem.kind, problem.chunks) for problem in problems] == [("pack-damaged", 1)] * 2


def test_retention_keeps_the_last_and_the_young(store: Store) -> None:
    for _ in range(4):
        store_images.write(store, A)
    store_images.write(store, B, "other")
    chosen = store.plan_retention(Policy(keep_last=2))
    assert [entry.reference for entry in chosen.remove] == ["small@1", "small@2"]
    assert references(store) == ["other@1", "small@1", "small@2", "small@3", "small@4"]
    assert store.plan_retention(Policy(keep_last=1, keep_within_s=3600)).remove == []
    assert store.apply_retention(chosen) == ["small@1", "small@2"]
    assert references(store) == ["other@1", "small@3", "small@4"]
    assert store_images.write(store, A) == "small@5"


def test_a_policy_never_removes_the_newest_of_a_name_and_says_why_it_keeps() -> None:
    entries = [Entry(f"x@{number}", "x", number, 1, 1000.0 * number) for number in (1, 2, 3)]
    chosen = plan(entries, Policy(keep_within_s=10), now_unix_s=1e6)
    assert [entry.number for entry in chosen.remove] == [1, 2]
    assert [(kept.entry.number, kept.reason) for kept in chosen.keep] == [(3, "the newest of its name")]
    chosen = plan(entries, Policy(keep_last=1, keep_within_s=1500), now_unix_s=3500.0)
    assert [kept.reason for kept in chosen.keep] == ["young enough", "among the last 1"]
    assert chosen.lines()[0] == "remove x@1"
    for wrong in ({}, {"keep_last": 0}, {"keep_within_s": -1.0}):
        with pytest.raises(UsageError):
            Policy(**wrong)


def test_a_store_opened_once_sees_what_others_prune_and_write(place: Place, store: Store) -> None:
    store_images.write(store, A, "a")
    other = open_store(place.url)
    other.remove("a@1")
    other.prune(store_images.digests, grace_s=0)
    other.close()
    with store.session() as session:
        assert len(session.missing(store_images.digests_of(A))) == 6 * 4
    store_images.write(store, A, "a")
    assert store_images.read(store, "a@2") == A
