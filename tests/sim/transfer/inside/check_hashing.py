"""Digests computed where the memory is: by the kernels, by threads in place, through a buffer. All are BLAKE3's.

On the simulated GPU the kernels are interpreted; on a real one they are what woodfrog uses.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import blake3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog._native import transfer

from .conftest import MIB, View, noise, rounded

Filled = Callable[..., list[transfer.Memory]]
Piece = tuple[transfer.Memory, int, int]
KIB = 1 << 10
VARIANTS = transfer.hash_variants()
ANY_GPU = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Where BLAKE3 and the kernels do something else: blocks of 64, leaves of 1024, 128 or 256 leaves a tile.
EDGES = [
    0,
    1,
    3,
    63,
    64,
    65,
    127,
    128,
    1023,
    1024,
    1025,
    2047,
    2048,
    2049,
    3 * KIB,
    5 * KIB - 1,
    31 * KIB,
    33 * KIB + 7,
]
POWERS = [64 * 2**k + d for k in range(4, 15) for d in (-64, -1, 0, 1, 64)]
TILES = [n * KIB + d for n in (127, 128, 129, 255, 256, 257, 511, 512, 513, 640) for d in (-1, 0, 1)]


def expected(data: bytes, pieces: list[Piece], chunk_bytes: int) -> bytes:
    return b"".join(
        blake3.blake3(data[start : min(start + chunk_bytes, offset + size)]).digest()
        for _, offset, size in pieces
        for start in range(offset, offset + size, chunk_bytes)
    )


def side_by_side(memory: transfer.Memory, sizes: list[int], gap: int = 16) -> list[Piece]:
    """Pieces of these sizes, each at a multiple of 16 with `gap` bytes or more before it."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append((memory, at, size))
        at += -(-size // 16) * 16 + gap
    assert at <= memory.size_bytes
    return pieces


def test_the_kernels_are_part_of_this_build() -> None:
    """Whoever tests woodfrog has a compiler for them; without one the tests below would have nothing to test."""
    assert len(VARIANTS) == len(set(VARIANTS)) >= 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 64 * MIB])
def test_a_kernel_gives_the_blake3_digest_of_every_length(filled: Filled, variant: str, chunk: int) -> None:
    data = noise(22 * MIB)
    (memory,) = filled([data])
    pieces = side_by_side(memory, EDGES + POWERS + TILES)
    assert transfer.hash_device(pieces, chunk_bytes=chunk, how="gpu", variant=variant) == expected(data, pieces, chunk)


@pytest.mark.parametrize("threads", [128, 256])
def test_a_kernel_joins_all_tiles_of_the_largest_chunks(filled: Filled, threads: int) -> None:
    variant = next(name for name in VARIANTS if name.endswith(f"_{threads}"))
    data = noise(4 * MIB) * 17
    (memory,) = filled([data])
    for piece in ((memory, 0, 66 * MIB + 77), (memory, 16, 32 * MIB - 1)):
        digests = transfer.hash_device([piece], chunk_bytes=64 * MIB, how="gpu", variant=variant)
        assert digests == expected(data, [piece], 64 * MIB)


@ANY_GPU
@given(
    sizes=st.lists(st.integers(0, 600 * KIB) | st.sampled_from(EDGES + POWERS + TILES), max_size=8),
    chunk=st.sampled_from([2**k for k in range(12, 22)]),
    variant=st.sampled_from(VARIANTS),
    shift=st.integers(0, 40),
)
def test_any_pieces_at_any_address_have_the_same_digests_in_every_way(
    filled: Filled, sizes: list[int], chunk: int, variant: str, shift: int
) -> None:
    data = noise(8 * MIB, 3)
    (memory,) = filled([data])
    pieces = [(m, offset + shift, size) for m, offset, size in side_by_side(memory, sizes, 64)]
    wanted = expected(data, pieces, chunk)
    assert transfer.hash_device(pieces, chunk_bytes=chunk, how="gpu", variant=variant) == wanted
    assert transfer.hash_device(pieces, chunk_bytes=chunk, how="copy", threads=2) == wanted
    assert transfer.hash_device(pieces, chunk_bytes=chunk) == wanted
    memory.release()


@ANY_GPU
@given(fill=st.sampled_from([0, 0xFF, 0x80]), size=st.integers(1, 200 * KIB), spot=st.integers(0, 200 * KIB))
def test_one_changed_bit_changes_its_chunk_and_no_other(
    view: View, device: transfer.Device, fill: int, size: int, spot: int
) -> None:
    (memory,) = device.create_memories([2 * MIB])
    view.put(0, bytes([fill]) * (2 * MIB))
    transfer.refill([(memory, 0, 0, 2 * MIB)], view.arena)
    pieces = [(memory, 0, size)]
    before = transfer.hash_device(pieces, chunk_bytes=16 * KIB, how="gpu")
    view.put(0, bytes([fill ^ 1]))
    transfer.refill([(memory, spot, 0, 1)], view.arena)
    after = transfer.hash_device(pieces, chunk_bytes=16 * KIB, how="gpu")
    changed = [i for i in range(len(before) // 32) if before[32 * i :][:32] != after[32 * i :][:32]]
    assert changed == ([spot // (16 * KIB)] if spot < size else [])
    memory.release()


def test_a_chunk_that_ends_with_its_memory_is_read_no_further(filled: Filled) -> None:
    """The simulated GPU's kernels end with an error at the first byte outside."""
    data = noise(2 * MIB)
    (memory,) = filled([data])
    for variant in VARIANTS:
        for size in (2 * MIB, 1, 15, 63, 65, 1023, 100_001):
            pieces = [(memory, 2 * MIB - size, size)]
            wanted = expected(data, pieces, 64 * KIB)
            assert transfer.hash_device(pieces, chunk_bytes=64 * KIB, how="gpu", variant=variant) == wanted


def test_more_pieces_than_one_launch_takes_are_all_hashed_in_order(filled: Filled) -> None:
    data = noise(2 * MIB)
    (memory,) = filled([data])
    generator = random.Random(5)
    pieces = [(memory, generator.randrange(MIB), generator.randrange(40)) for _ in range(20_000)]
    pieces += [(memory, 4 * KIB * generator.randrange(200), 9 * KIB) for _ in range(500)]
    progress = transfer.Progress()
    digests = transfer.hash_device(pieces, chunk_bytes=4 * KIB, how="gpu", progress=progress)
    assert digests == expected(data, pieces, 4 * KIB)
    assert progress.bytes_done == progress.bytes_total == sum(size for *_, size in pieces)


def test_more_chunks_than_one_launch_takes_are_all_hashed_in_order(filled: Filled) -> None:
    """The same memory again and again; a launch ends in the middle of a piece."""
    data = noise(2 * MIB)
    (memory,) = filled([data])
    pieces = [(memory, 16 * i % MIB, 19 * KIB) for i in range(13_500)]
    digests = transfer.hash_device(pieces, chunk_bytes=4 * KIB, how="gpu", variant="direct_128")
    assert len(digests) // 32 == 67_500
    assert digests == expected(data, pieces, 4 * KIB)


def test_the_memory_is_the_same_afterwards(filled: Filled, view: View) -> None:
    data = noise(4 * MIB)
    (memory,) = filled([data])
    for how in ("gpu", "copy", "auto"):
        transfer.hash_device([(memory, 5, 3 * MIB)], chunk_bytes=256 * KIB, how=how)
    transfer.read_device([(memory, 16, 3 * MIB + 5)])
    transfer.drain([(memory, 0, 0, len(data))], view.arena)
    assert view.get(0, len(data)) == data


def test_pieces_on_two_gpus_keep_their_order(filled: Filled) -> None:
    contents = [noise(MIB + seed, seed) for seed in range(4)]
    gpus = [transfer.Device(0), transfer.Device(1)]
    memories = [filled([data], on=gpus[i % 2])[0] for i, data in enumerate(contents)]
    pieces = [(memory, 0, len(data)) for memory, data in zip(memories, contents, strict=True)]
    wanted = b"".join(expected(data, [piece], 64 * KIB) for data, piece in zip(contents, pieces, strict=True))
    for how in ("gpu", "copy", "auto"):
        assert transfer.hash_device(pieces, chunk_bytes=64 * KIB, how=how) == wanted


def test_calls_at_the_same_time_do_not_disturb_each_other(filled: Filled) -> None:
    data = noise(4 * MIB)
    (memory,) = filled([data])
    outcomes: dict[int, bytes] = {}

    def work(number: int) -> None:
        pieces = [(memory, 16 * number, 2 * MIB + number)]
        for _ in range(3):
            outcomes[number] = transfer.hash_device(pieces, chunk_bytes=16 * KIB, how="gpu")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert outcomes[number] == expected(data, [(memory, 16 * number, 2 * MIB + number)], 16 * KIB)


def test_a_gpu_with_no_memory_left_is_hashed_all_the_same(view: View) -> None:
    gpu = transfer.Device(transfer.device_count() - 1)  # of two, one that no call before has kept buffers of
    data = noise(3 * MIB)
    (memory,) = gpu.create_memories([4 * MIB])
    view.put(0, data)
    transfer.refill([(memory, 0, 0, len(data))], view.arena)
    hogs: list[transfer.Memory] = []
    for size in (256 * MIB, 16 * MIB, 2 * MIB):  # from large to small until not even a table has room
        while True:
            try:
                hogs += gpu.create_memories([size])
            except transfer.TransferError as error:
                assert error.code == 2, "CUDA_ERROR_OUT_OF_MEMORY"  # noqa: PT017
                break
    pieces = [(memory, 0, len(data))]
    for chunk in (64 * KIB, MIB):
        assert transfer.hash_device(pieces, chunk_bytes=chunk, how="gpu") == expected(data, pieces, chunk)
    for one in [memory, *hogs]:
        one.release()


def test_nothing_to_hash_is_no_error(filled: Filled) -> None:
    (memory,) = filled([noise(MIB)])
    for how in ("gpu", "copy", "auto"):
        assert transfer.hash_device([], chunk_bytes=16 * KIB, how=how) == b""
        assert transfer.hash_device([(memory, 0, 0), (memory, MIB, 0)], chunk_bytes=16 * KIB, how=how) == b""


@pytest.mark.parametrize("chunk", [0, 1, 1024, 2048, 4095, 4097, 12 * KIB, 128 * MIB, 2**63])
def test_a_chunk_size_that_the_store_cannot_have_is_refused(filled: Filled, chunk: int) -> None:
    (memory,) = filled([noise(MIB)])
    with pytest.raises(transfer.TransferError, match="power of two") as caught:
        transfer.hash_device([(memory, 0, MIB)], chunk_bytes=chunk)
    assert caught.value.code == -22


@pytest.mark.parametrize("piece", [(0, 2 * MIB + 1), (2 * MIB, 1), (2**64 - 1, 2), (1, 2**64 - 1)])
def test_a_piece_outside_of_its_memory_is_refused(filled: Filled, piece: tuple[int, int]) -> None:
    good, other = filled([noise(2 * MIB, 1), noise(2 * MIB, 2)])
    for call in (
        lambda: transfer.hash_device([(other, 0, MIB), (good, *piece)], chunk_bytes=16 * KIB),
        lambda: transfer.read_device([(other, 0, MIB), (good, *piece)]),
    ):
        with pytest.raises(transfer.TransferError, match="does not lie within") as caught:
            call()
        assert caught.value.code == -22


def test_ways_and_kernels_that_do_not_exist_are_refused(filled: Filled) -> None:
    (memory,) = filled([noise(MIB)])
    for options in ({"how": "magic"}, {"variant": "faster"}, {"how": ""}):
        with pytest.raises(transfer.TransferError) as caught:
            transfer.hash_device([(memory, 0, MIB)], chunk_bytes=16 * KIB, **options)
        assert caught.value.code == -22


def test_a_cancelled_hash_raises_and_leaves_everything_usable(filled: Filled) -> None:
    data = noise(MIB)
    (memory,) = filled([data])
    pieces = [(memory, 0, MIB)]
    for how in ("gpu", "copy", "auto"):
        progress = transfer.Progress()
        progress.cancel()
        with pytest.raises(transfer.CancelledError):
            transfer.hash_device(pieces, chunk_bytes=16 * KIB, how=how, progress=progress)
        assert progress.bytes_done == 0
        assert transfer.hash_device(pieces, chunk_bytes=16 * KIB, how=how) == expected(data, pieces, 16 * KIB)


def test_a_hash_cancelled_between_two_launches_stops_there(filled: Filled) -> None:
    (memory,) = filled([noise(MIB)])
    pieces = [(memory, 0, 16)] * 70_000
    progress = transfer.Progress()
    outcome: list[str] = []

    def work() -> None:
        try:
            transfer.hash_device(pieces, chunk_bytes=4 * KIB, how="gpu", progress=progress)
            outcome.append("done")
        except transfer.CancelledError:
            outcome.append("cancelled")

    thread = threading.Thread(target=work)
    thread.start()
    while progress.bytes_done == 0 and thread.is_alive():
        pass
    progress.cancel()
    thread.join()
    assert outcome == ["cancelled"] or progress.bytes_done == progress.bytes_total
    memory.release()  # would raise if anything were still in flight


def test_a_gpu_says_how_it_is_hashed(filled: Filled, device: transfer.Device) -> None:
    assert device.hashes in ("gpu", "cpu")
    (memory,) = filled([noise(MIB)])
    if device.hashes == "gpu":  # the CPU cannot read a real GPU's memory, and must not try
        with pytest.raises(transfer.TransferError) as caught:
            transfer.hash_device([(memory, 0, MIB)], chunk_bytes=16 * KIB, how="cpu")
        assert caught.value.code == -95
    else:
        assert transfer.hash_device([(memory, 0, MIB)], chunk_bytes=MIB, how="cpu") == transfer.hash_device(
            [(memory, 0, MIB)], chunk_bytes=MIB, how="gpu"
        )
    assert rounded(MIB) == memory.size_bytes
