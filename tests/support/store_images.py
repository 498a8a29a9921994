"""Images for tests of the store alone: data in memory files, and a manifest that is nothing but its chunks' digests."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence

from blake3 import blake3

from woodfrog._native.transfer import extract_from_packs, hash_pieces
from woodfrog.errors import BadImageError
from woodfrog.store.records import chunk_table, positions_of, select_rows
from woodfrog.store.session import WriteSession
from woodfrog.store.store import Store

CHUNK_BYTES = 16 << 10  # the smallest that a store can have
MAGIC = b"TEST"


def pattern(size_bytes: int, seed: int | str) -> bytes:
    """Bytes without repetition, the same for the same seed."""
    return blake3(str(seed).encode()).digest(length=size_bytes) if size_bytes else b""


def cut(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    return [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]


def digests_of(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """As the blake3 library says, not our own code."""
    return b"".join(blake3(chunk).digest() for chunk in cut(data, chunk_bytes))


def sizes_of(data: bytes, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    return b"".join(struct.pack("<I", len(chunk)) for chunk in cut(data, chunk_bytes))


def manifest(data: bytes, number: int, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    digests, sizes = digests_of(data, chunk_bytes), sizes_of(data, chunk_bytes)
    return MAGIC + struct.pack("<II", number, len(sizes) // 4) + digests + sizes


def digests(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The `Digests` of such manifests."""
    if len(data) < 12 or data[:4] != MAGIC:
        raise BadImageError("it is no manifest of a test")
    _, count = struct.unpack_from("<II", data, 4)
    if len(data) != 12 + count * 36:
        raise BadImageError("it is cut")
    yield data[12 : 12 + count * 32], data[12 + count * 32 :]


def memory_file(data: bytes) -> int:
    """A descriptor of a file with these bytes; the caller closes it."""
    descriptor = os.memfd_create("data")
    os.write(descriptor, data)
    return descriptor


def store_data(session: WriteSession, data: bytes, compress: str = "none", chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """What of `data` the store lacks; the digests of all its chunks, as the product's own hash says."""
    descriptor = memory_file(data)
    try:
        digests = hash_pieces([(descriptor, 0, len(data))], chunk_bytes=chunk_bytes)
        sizes = sizes_of(data, chunk_bytes)
        new = positions_of(session.missing(digests, sizes))
        if new:
            offsets = [at * chunk_bytes for at in new]
            table = chunk_table(
                select_rows(digests, new, 32), offsets, positions_of(select_rows(sizes, new, 4)), [0] * len(new)
            )
            session.write(table, [descriptor], compress=compress)
        return digests
    finally:
        os.close(descriptor)


def write(store: Store, data: bytes, name: str = "small", compress: str = "none") -> str:
    """A whole image; returns its reference."""
    chunk_bytes = store.chunk_bytes
    with store.session() as session:
        assert store_data(session, data, compress, chunk_bytes) == digests_of(data, chunk_bytes)
        pairs = [(digests_of(data, chunk_bytes), sizes_of(data, chunk_bytes))]
        return session.publish(name, lambda number: manifest(data, number, chunk_bytes), pairs)


def read(store: Store, reference: str) -> bytes:
    """All bytes of an image, each chunk compared with its digest on the way."""
    with store.read(reference) as opened, store.reader() as reader:
        ((found, sizes),) = digests(opened.data)
        located = reader.locate(found, sizes)
        size = sum(struct.unpack(f"<{len(sizes) // 4}I", sizes))
        descriptor = os.memfd_create("read")
        try:
            extract_from_packs([(descriptor, 0, size)], found, *located, chunk_bytes=store.chunk_bytes)
            return os.pread(descriptor, size, 0)
        finally:
            os.close(descriptor)


def references(store: Store) -> list[str]:
    return [entry.reference for entry in store.list()]


def pack_keys(store: Store) -> Sequence[str]:
    return sorted(listed.key for listed in store.tier.list("packs/"))


def index_keys(store: Store) -> Sequence[str]:
    return sorted(listed.key for listed in store.tier.list("index/"))
