"""What every store promises, whatever its tier: run over each of them (conftest.TIERS)."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import pytest
import store_images
from store_images import CHUNK_BYTES, digests_of, pattern, references, sizes_of
from store_places import Place

from woodfrog import faults
from woodfrog._native import transfer
from woodfrog._native.transfer import IntegrityError
from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError
from woodfrog.store import keys
from woodfrog.store import reader as reading
from woodfrog.store.open import open_store
from woodfrog.store.records import ABSENT, ZERO, chunk_table, pack_column
from woodfrog.store.store import Store
from woodfrog.store.tiers.protocol import Tier

DATA = pattern(5 * CHUNK_BYTES + 777, "data")
OTHER = DATA[: 2 * CHUNK_BYTES] + pattern(2 * CHUNK_BYTES, "other")


def missing(store: Store, data: bytes) -> list[int]:
    with store.session() as session:
        positions = session.missing(digests_of(data), sizes_of(data))
    return list(struct.unpack(f"<{len(positions) // 4}I", positions))


def test_a_tier_keeps_what_it_is_given_and_nothing_else(store: Store) -> None:
    tier = store.tier
    assert isinstance(tier, Tier)
    key = keys.index_key(bytes(32))
    assert tier.get(key, 100) is None
    assert tier.put_if_absent(key, b"first")
    assert not tier.put_if_absent(key, b"second")
    assert tier.get(key, 100) == b"first"
    with pytest.raises(BadImageError, match="5 bytes"):
        tier.get(key, 4)
    tier.replace(key, b"third")
    assert tier.get(key, 100) == b"third"
    (listed,) = tier.list(keys.INDEX)
    assert (listed.key, listed.size_bytes) == (key, 5)
    assert abs(listed.modified_unix_s - tier.clock_s()) < 3600
    tier.delete([key, keys.index_key(b"\1" * 32)])
    assert tier.get(key, 100) is None
    assert list(tier.list(keys.INDEX)) == []


def test_of_many_who_put_one_key_exactly_one_succeeds(place: Place) -> None:
    tiers = [place.open().tier for _ in range(4)]
    key = keys.manifest_key("raced", 1)
    start = threading.Barrier(8)
    won: list[bytes] = []

    def put(number: int) -> None:
        start.wait()
        if tiers[number % 4].put_if_absent(key, b"%d" % number):
            won.append(b"%d" % number)

    threads = [threading.Thread(target=put, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tiers[0].get(key, 10)] == won


def test_a_pack_reads_back_whole_and_only_in_its_own_size(store: Store) -> None:
    tier = store.tier
    data = pattern(300_000, "pack")
    name = bytes(range(32))
    file = tier.new_file()
    os.write(file.fd, data)
    tier.put_files([(keys.pack_key(name), file)])
    file.close()
    pack = tier.open_pack(keys.pack_key(name), len(data))
    pack.fetch([(0, 10), (200_000, 100_000)])
    assert os.pread(pack.fd, 10, 0) == data[:10]
    assert os.pread(pack.fd, 200_000, 200_000) == data[200_000:]
    pack.close()
    pack.close()
    with pytest.raises(BadImageError, match="300000"):
        tier.open_pack(keys.pack_key(name), len(data) + 1)
    with pytest.raises(NotFoundError):
        tier.open_pack(keys.pack_key(b"\1" * 32), 1)


@pytest.mark.parametrize("batch", [CHUNK_BYTES, 3 * CHUNK_BYTES, 1 << 30])
def test_chunks_can_be_read_batch_by_batch_while_the_rest_arrives(
    store: Store, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_BYTES", batch)
    data = DATA + bytes(2 * CHUNK_BYTES) + DATA[:CHUNK_BYTES] + b"short"
    store_images.write(store, data)
    found, sizes = digests_of(data), sizes_of(data)
    with store.reader() as reader:
        arriving = reader.locate_ahead(found, sizes)
        assert [first for first, _ in arriving.batches[1:]] == [end for _, end in arriving.batches[:-1]]
        assert (arriving.batches[0][0], arriving.batches[-1][1]) == (0, len(found) // 32)
        fd = os.memfd_create("read")
        for number, (first, end) in enumerate(arriving.batches):
            arriving.wait(number)
            begin, stop = first * CHUNK_BYTES, min(end * CHUNK_BYTES, len(data))
            transfer.extract_from_packs(
                [(fd, begin, stop - begin)], found[first * 32 : end * 32],
                arriving.locations[first * 32 : end * 32], arriving.packs, chunk_bytes=CHUNK_BYTES,
            )  # fmt: skip
        assert os.pread(fd, len(data) + 1, 0) == data
        os.close(fd)
        assert reader.locate_ahead(b"", b"").packs == {}
        with pytest.raises(BadImageError, match="1 of 1"):
            reader.locate_ahead(digests_of(OTHER[-CHUNK_BYTES:]))
    assert list(store.tier.spool.iterdir()) == []


def test_a_pack_takes_the_place_of_a_damaged_one_of_its_name(store: Store) -> None:
    tier = store.tier
    key = keys.pack_key(bytes(32))
    for data in (b"damaged", b"correct", b"shorter", b"correct"):
        file = tier.new_file()
        os.write(file.fd, data)
        tier.put_files([(key, file)])
        file.close()
    assert tier.get(key, 100) == b"correct"
    assert list(tier.spool.iterdir()) == []


@pytest.mark.parametrize("compress", ["none", "auto", "zstd"])
def test_what_is_published_is_there_for_everybody_and_whole(place: Place, store: Store, compress: str) -> None:
    data = DATA + b"text that compresses " * 5000 + bytes(3 * CHUNK_BYTES)
    assert store_images.write(store, data, compress=compress) == "small@1"
    for other in (store, place.open()):
        assert store_images.read(other, "small") == data
        (entry,) = other.list()
        assert (entry.reference, entry.name, entry.number) == ("small@1", "small", 1)
        assert entry.size_bytes == len(store_images.manifest(data, 1))
        assert abs(entry.created_unix_s - store.tier.clock_s()) < 3600
        assert other.verify(store_images.digests) == []


def test_nothing_can_be_seen_before_it_is_published(place: Place, store: Store) -> None:
    with store.session() as session:
        store_images.store_data(session, DATA)
        assert references(store) == []
        assert store_images.index_keys(store) == []
        with pytest.raises(NotFoundError):
            store.read("small")
        # Another session must not rely on what this one may still drop.
        assert missing(place.open(), DATA) == [0, 1, 2, 3, 4, 5]


def test_an_aborted_session_leaves_no_image_and_gives_its_room_back(store: Store) -> None:
    with store.session() as session:
        store_images.store_data(session, DATA)
        work = session.work_directory
        (work / "file").write_bytes(b"x")
    assert references(store) == []
    assert store_images.pack_keys(store) == []
    assert not work.exists()
    assert list(store.tier.spool.iterdir()) == []
    session.abort()


def test_a_session_that_has_ended_does_no_more(store: Store) -> None:
    with store.session() as session:
        session.publish("small", lambda number: store_images.manifest(b"", number))
        for late in (
            lambda: session.missing(b""),
            lambda: session.write(b"", []),
            session.flush,
            lambda: session.publish("small", lambda _: b""),
            lambda: session.work_directory,
        ):
            with pytest.raises(UsageError):
                late()
    assert references(store) == ["small@1"]


def test_what_the_store_has_is_not_stored_again(store: Store) -> None:
    store_images.write(store, DATA)
    packs = store_images.pack_keys(store)
    assert missing(store, DATA) == []
    assert missing(store, OTHER) == [2, 3]
    store_images.write(store, DATA, "again")
    assert store_images.pack_keys(store) == packs
    store_images.write(store, OTHER, "other")
    assert len(store_images.pack_keys(store)) == len(packs) + 1
    for reference, data in (("small", DATA), ("again", DATA), ("other", OTHER)):
        assert store_images.read(store, reference) == data


def test_equal_chunks_of_one_image_are_stored_once(store: Store) -> None:
    repeated = DATA[:CHUNK_BYTES] * 4
    assert missing(store, repeated) == [0]
    with store.session() as session:
        store_images.store_data(session, repeated)
        assert session.stored_bytes == CHUNK_BYTES
        assert session.missing(digests_of(repeated)) == b""  # its own, although nobody else may rely on them
        store_images.store_data(session, DATA)
        assert session.stored_bytes == len(DATA)
        session.publish("small", lambda number: store_images.manifest(repeated, number))
    assert store_images.read(store, "small") == repeated


def test_zeros_are_stored_nowhere(store: Store) -> None:
    data = bytes(3 * CHUNK_BYTES + 100)
    assert missing(store, data) == []
    store_images.write(store, data)
    assert store_images.pack_keys(store) == []
    assert store_images.read(store, "small") == data
    with store.reader() as reader:
        assert list(pack_column(reader.find(digests_of(data), sizes_of(data)))) == [ZERO] * 4
        assert reader.locate(digests_of(data), sizes_of(data)).packs == {}
    assert store.prune(store_images.digests).images == 1


def test_a_chunk_that_is_not_what_its_digest_says_is_refused_and_ends_the_session(store: Store) -> None:
    descriptor = store_images.memory_file(DATA[:CHUNK_BYTES])
    try:
        with store.session() as session:
            with pytest.raises(IntegrityError):
                session.write(chunk_table(bytes(32), [0], [CHUNK_BYTES], [0]), [descriptor])
            with pytest.raises(UsageError):
                session.flush()
    finally:
        os.close(descriptor)
    assert store_images.pack_keys(store) == []


def test_what_was_flushed_is_found_by_others_and_stays_after_an_abort(place: Place, store: Store) -> None:
    with store.session() as session:
        store_images.store_data(session, DATA)
        session.flush()
        assert missing(place.open(), DATA) == []
    assert missing(place.open(), DATA) == []
    assert references(store) == []


def test_many_flushes_and_packs_make_one_image(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store.tier), "pack_bytes", 4 * CHUNK_BYTES)
    data = pattern(40 * CHUNK_BYTES, "many")
    with store.session() as session:
        for at in range(0, len(data), 20 * CHUNK_BYTES):
            store_images.store_data(session, data[at : at + 20 * CHUNK_BYTES])
            session.flush()
        session.publish("small", lambda number: store_images.manifest(data, number))
    assert len(store_images.pack_keys(store)) >= 10
    assert store_images.read(store, "small") == data
    assert store.verify(store_images.digests) == []


def test_an_image_that_names_what_was_never_stored_is_not_published(store: Store) -> None:
    with store.session() as session:
        store_images.store_data(session, DATA)
        with pytest.raises(BadImageError, match="2 chunks"):
            session.publish("small", lambda _: b"m", [(digests_of(OTHER), sizes_of(OTHER))])
    assert references(store) == []


def test_a_manifest_that_cannot_be_made_leaves_no_image(store: Store) -> None:
    def fail(number: int) -> bytes:
        raise BadImageError("contradicts itself")

    with store.session() as session, pytest.raises(BadImageError, match="contradicts"):
        session.publish("small", fail)
    assert references(store) == []


def test_numbers_rise_and_a_bare_name_is_the_newest(store: Store) -> None:
    assert [store_images.write(store, DATA) for _ in range(3)] == ["small@1", "small@2", "small@3"]
    assert store_images.write(store, OTHER, "other") == "other@1"
    with store.read("small") as opened:
        assert opened.reference == "small@3"
    assert store.resolve("small") == "small@3"
    assert store.next_number("small") == 4
    assert references(store) == ["other@1", "small@1", "small@2", "small@3"]
    assert [entry.reference for entry in store.list("other")] == ["other@1"]


def test_a_number_is_never_used_again(place: Place, store: Store) -> None:
    for _ in range(2):
        store_images.write(store, DATA)
    assert store.remove("small@2") == "small@2"
    assert store_images.write(place.open(), DATA) == "small@3"
    store.remove("small@3")
    assert store.remove("small") == "small@1"
    assert references(store) == []
    assert store_images.write(store, DATA) == "small@4"


def test_a_mark_that_is_no_number_stops_numbers_from_being_used_twice(place: Place, store: Store) -> None:
    store_images.write(store, DATA)
    store.remove("small@1")
    place.damage(keys.mark_key("small"), lambda _: b"seven")
    with store.session() as session, pytest.raises(BadImageError, match=r"small/[.]mark"):
        session.publish("small", lambda number: b"")


def test_many_writers_at_once_each_get_a_number(place: Place) -> None:
    stores = [place.open() for _ in range(4)]
    start = threading.Barrier(4)
    written: list[str] = []

    def work(store: Store) -> None:
        start.wait()
        written.append(store_images.write(store, DATA))

    threads = [threading.Thread(target=work, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == [f"small@{number}" for number in range(1, 5)]
    assert all(store_images.read(stores[0], reference) == DATA for reference in written)


def test_a_manifest_is_made_again_when_someone_takes_its_number(place: Place, store: Store) -> None:
    asked: list[int] = []

    def manifest(number: int) -> bytes:
        asked.append(number)
        if number == 1:
            store_images.write(place.open(), OTHER)
        return store_images.manifest(DATA, number)

    with store.session() as session:
        store_images.store_data(session, DATA)
        assert session.publish("small", manifest) == "small@2"
    assert asked == [1, 2]
    assert store_images.read(store, "small@1") == OTHER
    assert store_images.read(store, "small@2") == DATA


@pytest.mark.parametrize("name", ["", ".mark", "../x", "a/b", "a@1", "a b", "x" * 64, "ä"])
def test_a_name_that_could_lead_elsewhere_is_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.next_number(name)
    with store.session() as session, pytest.raises(UsageError):
        session.publish(name, lambda number: b"")
    with pytest.raises(UsageError):
        store.read(f"{name}@1")


def test_what_is_not_there_is_said_to_be_not_there(store: Store) -> None:
    for action in (lambda: store.read("small"), lambda: store.read("small@7"), lambda: store.remove("small@7")):
        with pytest.raises(NotFoundError, match="small"):
            action()
    for _ in range(2):
        store_images.write(store, DATA)
    with pytest.raises(UsageError, match="several"):
        store.remove("small")


def test_a_reader_names_how_many_chunks_are_missing(store: Store) -> None:
    store_images.write(store, DATA)
    with store.reader() as reader:
        with pytest.raises(BadImageError, match="2 of 4 chunks"):
            reader.locate(digests_of(OTHER))
        assert list(pack_column(reader.find(digests_of(OTHER))))[2:] == [ABSENT] * 2
    with pytest.raises(UsageError):
        reader.locate(b"")


def test_nothing_is_deleted_while_someone_reads_or_writes(place: Place, store: Store) -> None:
    store_images.write(store, DATA)
    other = place.open()

    def refused() -> None:
        for delete in (
            lambda: other.remove("small@1", wait_s=0),
            lambda: other.prune(store_images.digests, wait_s=0),
            lambda: other.repair(store_images.digests, wait_s=0),
        ):
            with pytest.raises(RefusedError, match=f"process {os.getpid()} on .*(read|write) an image"):
                delete()

    with store.read("small"):
        refused()
    with store.reader():
        refused()
    with store.session():
        refused()
        with store.session(), store.reader():
            refused()
        refused()
    assert references(other) == ["small@1"]
    other.remove("small@1", wait_s=0)


def test_nobody_begins_while_the_store_is_held_alone(place: Place, store: Store) -> None:
    lock = place.open().tier.acquire(exclusive=True, purpose="prune the store", wait_s=0)
    for begin in (lambda: store.session(wait_s=0), lambda: store.reader(wait_s=0)):
        with pytest.raises(RefusedError, match="prune the store"):
            begin()
    lock.release()
    store.session(wait_s=0).abort()


def test_whoever_waits_gets_the_lock_when_it_is_free(place: Place, store: Store) -> None:
    session = store.session()
    waiting = threading.Event()
    removed: list[object] = []
    other = place.open()

    def prune() -> None:
        waiting.set()
        removed.append(other.prune(store_images.digests, wait_s=120))

    thread = threading.Thread(target=prune)
    thread.start()
    waiting.wait()
    session.abort()
    thread.join()
    assert len(removed) == 1


def test_whoever_has_ended_has_left_no_lock_behind(store: Store) -> None:
    store_images.write(store, DATA)
    store.reader().close()
    assert list(store.tier.list(keys.LOCKS)) == []


def test_opening_again_finds_the_same_store(place: Place, store: Store) -> None:
    again = place.open()
    assert (again.id, again.chunk_bytes, again.url) == (store.id, CHUNK_BYTES, store.url)
    assert store.is_current()


def test_a_copy_to_any_tier_is_the_same_image_and_sends_only_what_lacks(
    place: Place, store: Store, make_place: Callable[[str], Place]
) -> None:
    data = DATA + b"compresses well " * 10_000 + bytes(CHUNK_BYTES + 5)
    store_images.write(store, data, compress="auto")
    for tier in ("disk", "s3"):
        to = make_place(tier).open()
        store_images.write(to, OTHER, "there")
        copied = store.copy_image("small", to, store_images.digests)
        assert (copied.reference, copied.already_there) == ("small@1", False)
        assert store_images.read(to, "small@1") == data
        assert copied.copied_chunks == len({chunk for chunk in store_images.cut(data) if any(chunk)}) - 2
        again = store.copy_image("small", to, store_images.digests)
        assert (again.copied_chunks, again.already_there) == (0, True)
        # And back, under a name of its own.
        back = to.copy_image("small", store, store_images.digests, name="back")
        assert (back.reference, back.copied_chunks) == ("back@1", 0)
        assert store_images.read(store, "back@1") == data
        store.remove("back@1")
        store.tier.delete([keys.mark_key("back")])
        assert to.verify(store_images.digests) == []


def test_an_interrupted_copy_goes_on_where_it_was(
    store: Store, make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_parsed", ("", {}))  # passes are counted anew
    to = make_place("s3" if store.local else "disk").open()
    monkeypatch.setattr(type(to.tier), "pack_bytes", 4 * CHUNK_BYTES)
    data = pattern(20 * CHUNK_BYTES, "long")
    store_images.write(store, data)
    monkeypatch.setenv("WOODFROG_FAULTS", "store.copy.flushed:error:3")
    with pytest.raises(faults.InjectedFaultError):
        store.copy_image("small", to, store_images.digests)
    monkeypatch.delenv("WOODFROG_FAULTS")
    assert references(to) == []
    copied = store.copy_image("small", to, store_images.digests)
    assert 0 < copied.copied_chunks <= 8
    assert store_images.read(to, "small@1") == data


def test_a_copy_never_replaces_another_image_nor_a_removed_one(
    store: Store, make_place: Callable[[str], Place]
) -> None:
    to = make_place("disk").open()
    store_images.write(store, DATA)
    store_images.write(to, OTHER)
    with pytest.raises(RefusedError, match="another image small@1"):
        store.copy_image("small", to, store_images.digests)
    assert store_images.read(to, "small@1") == OTHER
    to.remove("small@1")
    with pytest.raises(RefusedError, match="not used twice"):
        store.copy_image("small", to, store_images.digests)
    copied = store.copy_image(
        "small", to, store_images.digests, name="small", rename=lambda _, name, number: store_images.manifest(DATA, 2)
    )
    assert copied.reference == "small@2"


def test_stores_with_other_chunk_sizes_do_not_copy(store: Store, tmp_path: object) -> None:
    store_images.write(store, DATA)
    with (
        open_store(f"{tmp_path}/larger", chunk_bytes=2 * CHUNK_BYTES) as to,
        pytest.raises(RefusedError, match=r"chunks of 16384 bytes and .* of 32768"),
    ):
        store.copy_image("small", to, store_images.digests)
