"""Whatever a target writes between checkpoints: each image is its memory at that time, to the byte, and what is stored
is what changed, and nothing else.

More examples: WOODFROG_INCREMENT_EXAMPLES (default 4); each has several checkpoints of a living target.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product import Product
from scribbler import Scribbler
from scribbling import CHUNK, STEPS, check_images, do

from woodfrog._native import transfer
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.image.repository import ImageRepository
from woodfrog.store.records import digests_of

EXAMPLES = int(os.environ.get("WOODFROG_INCREMENT_EXAMPLES", "4"))


class Bench:
    """One target, one store, and what every image of it must hold."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.target: Scribbler = product.scribbler()
        self.stored: set[bytes] = set()  # every digest that is in a pack
        self.images: dict[str, dict[int, bytes]] = {}

    def checkpoint(self, **params: object) -> dict[str, object]:
        """One more image; what it stored must be exactly what the store lacked."""
        result = self.product.checkpoint(self.target.process, cpu=False, **params)
        before = self.stored
        found = self._in_packs()
        self.stored = set(found)
        assert len(found) == len(self.stored), "a chunk is stored twice"
        with ImageRepository(self.product.store_path) as images, images.open(result["image"]) as image:
            named = set(split(image.manifest.digests))
            zero = transfer.blake3(bytes(CHUNK))
            assert zero not in self.stored
            assert self.stored - before == named - before - {zero}
            assert result["new_chunks"] == len(self.stored - before)
            stats = image.manifest.stats.gpu
            assert stats.raw == stats.zero + stats.known + stats.new
            assert (result["gpu_new_bytes"], result["stored_bytes"]) == (stats.new, stats.stored)
        self.images[result["image"]] = {address: bytes(content) for address, content in self.target.memory.items()}
        return result

    def check_images(self) -> None:
        """Every image is still what the memory was at its time."""
        check_images(self.product, self.images)

    def clear(self) -> None:
        for address in list(self.target.memory):
            self.target.free(address)

    def _in_packs(self) -> list[bytes]:
        """Every digest in every pack, from the packs themselves."""
        found: list[bytes] = []
        for path in sorted((self.product.store_path / "packs").rglob("*")):
            if path.is_file():
                with path.open("rb") as pack:
                    records, name = transfer.scan_pack(pack.fileno(), contents=True)
                assert name.hex() == path.name
                found += split(digests_of(records))
        return found


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


@pytest.fixture(scope="module")
def bench(targets: Path) -> Iterator[Bench]:
    from product import new_root

    product = Product(new_root(), targets, daemon_arguments=["--arena", "128M"])
    yield Bench(product)
    product.close()


def test_each_image_is_the_memory_of_its_time_and_stores_exactly_what_is_new(bench: Bench) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(st.lists(st.lists(STEPS, max_size=6), min_size=2, max_size=4))
    def check(rounds: list[list[tuple[object, ...]]]) -> None:
        bench.clear()
        bench.images.clear()
        for steps in rounds:
            for step in steps:
                do(bench.target, step)
            bench.checkpoint()
        bench.check_images()

    check()


@pytest.mark.parametrize("size", [1, 64, CHUNK, CHUNK + 1, 1 << 20])
def test_a_write_dirties_the_chunks_that_it_touches_and_no_others(bench: Bench, size: int) -> None:
    bench.clear()
    address = bench.target.alloc(4 << 20)
    bench.target.write(address, 0, 4 << 20, seed=1000 + size)
    bench.checkpoint()
    for number, offset in enumerate((0, CHUNK - 1, 7 * CHUNK, (4 << 20) - size)):
        bench.target.write(address, offset, size, seed=size * 31 + number)
        touched = (offset + size - 1) // CHUNK - offset // CHUNK + 1
        result = bench.checkpoint()
        assert result["new_chunks"] == touched
        assert result["gpu_new_bytes"] == touched * CHUNK


def test_the_same_value_written_again_is_clean(bench: Bench) -> None:
    bench.clear()
    address = bench.target.alloc(2 << 20)
    bench.target.write(address, 0, 2 << 20, seed=77)
    bench.checkpoint()
    bench.target.write(address, 0, 2 << 20, seed=77)
    result = bench.checkpoint()
    assert (result["new_chunks"], result["gpu_new_bytes"]) == (0, 0)
    assert result["parent"] == str(result["image"]).replace(
        result["image"].split("@")[1], str(int(result["image"].split("@")[1]) - 1)
    )


def test_memory_of_zeros_is_neither_moved_nor_stored(bench: Bench) -> None:
    bench.clear()
    bench.target.alloc(8 << 20)
    result = bench.checkpoint()
    assert result["new_chunks"] == 0
    assert result["gpu_zero_bytes"] >= 8 << 20


def test_memory_that_was_freed_and_allocated_anew_is_known_by_its_contents(bench: Bench) -> None:
    bench.clear()
    first = bench.target.alloc(2 << 20)
    bench.target.write(first, 0, 2 << 20, seed=99)
    bench.checkpoint()
    second = bench.target.alloc(2 << 20)
    bench.target.copy(second, 0, first, 0, 2 << 20)
    bench.target.free(first)
    result = bench.checkpoint()
    assert result["new_chunks"] == 0
    bench.check_images()


def test_a_full_checkpoint_moves_everything_and_stores_only_what_is_new(bench: Bench) -> None:
    bench.clear()
    address = bench.target.alloc(4 << 20)
    bench.target.write(address, 0, 4 << 20, seed=5)
    bench.checkpoint()
    bench.target.write(address, 9 * CHUNK, 1, seed=6)
    result = bench.checkpoint(incremental=False)
    assert result["new_chunks"] == 1
    bench.check_images()


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd", "zstd:5"])
def test_how_chunks_are_compressed_changes_nothing_but_their_size(bench: Bench, compress: str) -> None:
    bench.clear()
    address = bench.target.alloc(1 << 20)
    bench.target.fill(address, 0, 1 << 20, 3)
    bench.target.write(address, 0, CHUNK // 2, seed=len(compress) + 400)
    bench.checkpoint(compress=compress)
    bench.check_images()


def test_what_does_not_fit_the_arena_goes_in_batches_and_is_right(make_product: Callable[..., Product]) -> None:
    bench = Bench(make_product(daemon_arguments=["--arena", "64M"]))
    addresses = [bench.target.alloc(24 << 20) for _ in range(4)]
    for number, address in enumerate(addresses):
        bench.target.write(address, 0, 24 << 20, seed=number)
    assert bench.checkpoint()["ring"] is True
    for address in addresses:
        bench.target.write(address, 3 * CHUNK, 64, seed=50)
    result = bench.checkpoint()
    assert (result["ring"], result["new_chunks"]) == (False, 4)
    assert bench.checkpoint(incremental=False)["ring"] is True
    bench.check_images()


def test_a_target_restored_from_an_increment_has_its_memory_and_goes_on_from_there(
    make_product: Callable[..., Product],
) -> None:
    product = make_product()
    bench = Bench(product)
    addresses = [bench.target.alloc(size) for size in (64, CHUNK + 100, 3 << 20)]
    for number, address in enumerate(addresses):
        bench.target.write(address, 0, len(bench.target.memory[address]), seed=number)
    bench.checkpoint()
    bench.target.write(addresses[2], 2 * CHUNK + 5, 64, seed=9)
    image = product.checkpoint(bench.target.process, stop=True)["image"]
    bench.target.process = product.restore(image, bench.target.process.log, verify=True)
    assert bench.target.shown(product.root) == bench.target.memory
    bench.target.write(addresses[0], 0, 64, seed=10)
    result = product.checkpoint(bench.target.process, cpu=False)
    assert (result["parent"], result["new_chunks"]) == (image, 1)
