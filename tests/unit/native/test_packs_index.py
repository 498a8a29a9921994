"""The index knows where every chunk is, through additions and removals, from several threads, in bounded memory."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer
from woodfrog.store.records import made_up_records

from . import packing
from .packing import KIB, PAGE, RECORD, Location, digest

CHUNK_BYTES = 64 * KIB
NOWHERE = Location(0, 0, 0, 0, transfer.ABSENT)


def name(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def entry(number: int, pack: int = 0) -> packing.Record:
    """A plausible record for digest `number`, different in every pack."""
    generator = random.Random(number * 1000 + pack)
    raw = generator.randint(2, CHUNK_BYTES)
    encoding = generator.randint(0, 3)
    stored = raw if encoding == 0 else generator.randint(1, raw - 1)
    return packing.Record(name(number), generator.randrange(2**55), stored, raw, encoding, 0)


def packed(numbers: Sequence[int], pack: int = 0) -> bytes:
    return b"".join(RECORD.pack(*entry(number, pack)) for number in numbers)


def expected(number: int, pack: int) -> Location:
    _, offset, stored, raw, encoding, _ = entry(number, pack)
    return Location(offset, stored, raw, encoding, pack)


def find(index: transfer.ChunkIndex, numbers: Sequence[int]) -> list[Location]:
    return packing.locations(index.find(b"".join(map(name, numbers))))


def test_what_was_added_is_found_and_nothing_else() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    for pack in range(10):
        index.add(pack, packed(range(pack * 500, pack * 500 + 500), pack))
    assert len(index) == 5000
    assert find(index, range(5000)) == [expected(number, number // 500) for number in range(5000)]
    assert find(index, range(5000, 6000)) == [NOWHERE] * 1000
    digests = index.digests()
    assert sorted(digests[at : at + 32] for at in range(0, len(digests), 32)) == sorted(map(name, range(5000)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 4), st.lists(st.integers(0, 40), max_size=30)),
            st.tuples(st.just("remove"), st.integers(0, 5), st.just([])),
        ),
        max_size=25,
    )
)
def test_the_index_agrees_with_a_dictionary(steps: list[tuple[str, int, list[int]]]) -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    model: dict[int, set[int]] = {}
    for what, pack, numbers in steps:
        if what == "add":
            index.add(pack, packed(numbers, pack))
            for number in numbers:
                model.setdefault(number, set()).add(pack)
            continue
        for packs in model.values():
            packs.discard(pack)
        gone = [number for number, packs in model.items() if not packs]
        assert index.remove_pack(pack) == len(gone)
        for number in gone:
            del model[number]
    assert len(index) == len(model)
    for number, location in enumerate(find(index, range(41))):
        if number not in model:
            assert location == NOWHERE
        else:
            assert location.pack in model[number]
            assert location == expected(number, location.pack)


def test_a_digest_that_two_packs_hold_survives_the_removal_of_either() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    for pack in (5, 1, 9):
        index.add(pack, packed([1, 2], pack))
    assert len(index) == 2
    assert find(index, [1]) == [expected(1, 5)]
    assert index.remove_pack(5) == 0
    assert find(index, [1])[0].pack in (1, 9)
    assert index.remove_pack(1) == 0
    assert find(index, [1, 2]) == [expected(1, 9), expected(2, 9)]
    assert index.remove_pack(9) == 2
    assert find(index, [1, 2]) == [NOWHERE] * 2
    assert index.remove_pack(9) == 0


def test_missing_names_the_first_of_each_unknown_chunk() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    index.add(0, packed([10, 11]))
    zero, short = digest(bytes(CHUNK_BYTES)), digest(bytes(777))
    wanted = [name(1), name(10), name(2), name(1), zero, short, name(2), name(3), name(11), short]
    digests = b"".join(wanted)
    assert packing.numbers(index.missing(digests)) == [0, 2, 5, 7]
    lengths = [CHUNK_BYTES] * 5 + [777] + [CHUNK_BYTES] * 3 + [777]
    assert packing.numbers(index.missing(digests, packing.sizes(lengths))) == [0, 2, 7]
    assert index.missing(b"") == b""


def test_missing_is_the_same_for_so_many_digests_that_several_threads_look_them_up() -> None:
    generator = random.Random(5)
    names = [generator.randbytes(32) for _ in range(50_000)]
    index = transfer.ChunkIndex(CHUNK_BYTES)
    index.add(0, made_up_records(b"".join(names[:20_000])))
    wanted = generator.choices(names, k=200_000)
    known = set(names[:20_000])
    expected = []
    for position, one in enumerate(wanted):
        if one not in known:
            known.add(one)
            expected.append(position)
    assert packing.numbers(index.missing(b"".join(wanted))) == expected
    assert packing.numbers(index.missing(b"".join(wanted), packing.sizes([CHUNK_BYTES] * len(wanted)))) == expected


def test_zeros_are_known_from_the_start() -> None:
    for size in (PAGE, CHUNK_BYTES, 64 << 20):
        index = transfer.ChunkIndex(size)
        (location,) = packing.locations(index.find(digest(bytes(size))))
        assert location == Location(0, 0, size, 0, transfer.ZERO)
    index = transfer.ChunkIndex(CHUNK_BYTES)
    found = packing.locations(index.find(digest(bytes(5)) + digest(bytes(CHUNK_BYTES)), packing.sizes([5, 9])))
    assert found == [Location(0, 0, 5, 0, transfer.ZERO), Location(0, 0, CHUNK_BYTES, 0, transfer.ZERO)]
    assert packing.locations(index.find(name(1), packing.sizes([2**32 - 1]))) == [NOWHERE]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: transfer.ChunkIndex(0), "chunk size 0"),
        (lambda: transfer.ChunkIndex((64 << 20) + 1), "chunk size"),
        (lambda: transfer.ChunkIndex(PAGE).add(0, b"x" * 55), "multiple of 56"),
        (lambda: transfer.ChunkIndex(PAGE).add(transfer.ZERO, b""), "pack's number"),
        (lambda: transfer.ChunkIndex(PAGE).add(0, RECORD.pack(bytes(32), 2**56, 1, 1, 0, 0)), "record 0"),
        (lambda: transfer.ChunkIndex(PAGE).add(0, RECORD.pack(bytes(32), 0, 1, 1, 0, 1)), "record 0"),
        (lambda: transfer.ChunkIndex(PAGE).find(b"x" * 33), "multiple of 32"),
        (lambda: transfer.ChunkIndex(PAGE).find(b"x" * 32, b""), "0 sizes for 1 digests"),
        (lambda: transfer.ChunkIndex(PAGE).missing(b"x" * 31), "multiple of 32"),
    ],
)
def test_nonsense_is_refused(act: object, message: str) -> None:
    with pytest.raises(transfer.TransferError, match=message) as caught:
        act()  # type: ignore[operator]
    assert caught.value.code == -errno.EINVAL


def test_bad_records_add_nothing() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    with pytest.raises(transfer.TransferError, match="record 3 makes no sense"):
        index.add(0, packed([1, 2, 3]) + RECORD.pack(bytes(32), 0, 0, 1, 0, 0))
    assert len(index) == 0


@pytest.mark.timeout(300)
def test_digests_chosen_to_collide_do_not_slow_it_down() -> None:
    # Equal in all but 4 bytes, wherever these are: an index that used part of the digest as its hash would take hours.
    generator = random.Random(3)
    for place in (0, 8, 28):
        index = transfer.ChunkIndex(CHUNK_BYTES)
        base = generator.randbytes(32)
        names = [base[:place] + (i << 12).to_bytes(4, "little") + base[place + 4 :] for i in range(200_000)]
        index.add(0, b"".join(RECORD.pack(value, 0, 1, 1, 0, 0) for value in names))
        assert len(index) == 200_000
        assert index.missing(b"".join(names)) == b""


def test_memory_stays_near_sixty_bytes_a_chunk() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    generator = random.Random(1)
    for pack in range(50):
        index.add(pack, b"".join(RECORD.pack(generator.randbytes(32), 0, 1, 1, 0, 0) for _ in range(4000)))
    assert len(index) == 200_000
    assert index.memory_bytes <= 64 * 200_000 + (1 << 20)


def test_threads_may_use_one_index_at_once() -> None:
    index = transfer.ChunkIndex(CHUNK_BYTES)
    index.add(0, packed(range(2000)))
    known = b"".join(map(name, range(2000)))
    where = index.find(known)
    failures: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            if index.find(known) != where or index.missing(known) != b"":
                failures.append("a look-up during a change saw something else")
                return

    def change(pack: int) -> None:
        mine = packed(range(pack * 10_000, pack * 10_000 + 3000), pack)
        for _ in range(10):
            index.add(pack, mine)
            if index.remove_pack(pack) != 3000:
                failures.append("another number of chunks was removed than added")

    lookers = [threading.Thread(target=look) for _ in range(2)]
    changers = [threading.Thread(target=change, args=(pack,)) for pack in (1, 2, 3)]
    for thread in lookers + changers:
        thread.start()
    for thread in changers:
        thread.join()
    done.set()
    for thread in lookers:
        thread.join()
    assert failures == []
    assert len(index) == 2000
