"""Random programs for a scribbler, and what an image of it holds."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from product import Product
from scribbler import Scribbler

from woodfrog._native import transfer
from woodfrog.image.image import Image
from woodfrog.image.manifest import member_of
from woodfrog.image.repository import ImageRepository

CHUNK = 64 << 10  # the store's default
LARGEST = 3 << 20


def contents(image: Image, scratch: Path, process: int = 0) -> dict[int, bytes]:
    """The allocations of a process (by its place among those that use the GPU) out of an image, by address, from the
    packs. Of memory that several handles share those of the one that stands for it."""
    manifest = image.manifest
    paths = [scratch / f"handle-{handle.id:x}" for handle in manifest.handles]
    files = [path.open("w+b") for path in paths]
    try:
        located = image.locate_gpu()
        transfer.extract_from_packs(
            [(file.fileno(), 0, handle.size) for file, handle in zip(files, manifest.handles, strict=True)],
            manifest.digests,
            located.locations,
            located.packs,
            chunk_bytes=manifest.chunk_bytes,
        )
        whole = {handle.id: file.read() for handle, file in zip(manifest.handles, files, strict=True)}
    finally:
        for file, path in zip(files, paths, strict=True):
            file.close()
            path.unlink()
    return {
        row.address: whole[row.handle][row.offset : row.offset + row.size]
        for row in manifest.allocations.rows()
        if row.handle in whole and member_of(row.handle) == process
    }


def check_images(product: Product, images: dict[str, dict[int, bytes]]) -> None:
    """Each image, by its reference, holds exactly that memory, verifies, and accounts for every byte."""
    with ImageRepository(product.store_path) as store:
        for reference, memory in images.items():
            with store.open(reference) as image:
                assert contents(image, product.root) == memory, reference
                assert image.verify() == []
                stats = image.manifest.stats.gpu
                assert stats.raw == stats.zero + stats.known + stats.new


SIZES = st.sampled_from([1, 64, 4096, CHUNK - 1, CHUNK, CHUNK + 64, 5 * CHUNK, LARGEST]) | st.integers(1, LARGEST)
PLACES = st.integers(0, 1 << 30)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), SIZES),
    st.tuples(st.just("free"), PLACES),
    st.tuples(st.just("write"), PLACES, PLACES, st.sampled_from([64, 4096, CHUNK]) | st.integers(1, 300_000), PLACES),
    st.tuples(st.just("fill"), PLACES, PLACES, SIZES, st.sampled_from([0, 0, 0x5A])),
    st.tuples(st.just("same"), PLACES),
    st.tuples(st.just("copy"), PLACES, PLACES),
)


def do(target: Scribbler, step: tuple[object, ...]) -> None:
    """One step of an example, its numbers brought into range; without memory there is only `alloc`."""
    verb, *numbers = step
    if verb == "alloc" or not target.memory:
        target.alloc(int(numbers[0]) % LARGEST + 1)  # type: ignore[call-overload]
        return
    addresses = sorted(target.memory)
    address = addresses[int(numbers[0]) % len(addresses)]  # type: ignore[call-overload]
    size = len(target.memory[address])
    if verb == "free":
        target.free(address)
    elif verb in ("write", "fill"):
        offset = int(numbers[1]) % size  # type: ignore[call-overload]
        length = min(int(numbers[2]), size - offset)  # type: ignore[call-overload]
        (target.write if verb == "write" else target.fill)(address, offset, length, int(numbers[3]))  # type: ignore[call-overload]
    elif verb == "same":  # what is there already, written again
        target.fill(address, 0, size, 7)
        target.fill(address, 0, size, 7)
    else:
        other = addresses[int(numbers[1]) % len(addresses)]  # type: ignore[call-overload]
        if other != address:
            target.copy(address, 0, other, 0, min(size, len(target.memory[other])))
