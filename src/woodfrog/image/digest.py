"""BLAKE3 digests of the chunks of a file: the native transfer engine when it is there, else the blake3 library.

These are files (an image's), never GPU memory. Nothing here writes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

from blake3 import blake3

from woodfrog.image.manifest import DIGEST_BYTES, Manifest, chunk_count

# (bytes done since the last call); called often, must be quick
OnBytes = Callable[[int], None]

# One piece handed to the native engine at a time, so that progress can be told in between.
_PIECE_BYTES = 32 << 20


class ShortFileError(Exception):
    """The file ended before the bytes that were asked for."""


def hash_range(fd: int, offset: int, size_bytes: int, *, chunk_bytes: int, on_bytes: OnBytes | None = None) -> bytes:
    """32-byte digests of the chunks of [offset, offset+size), the last chunk may be short. `fd` stays the caller's."""
    digests = bytearray()
    step = max(chunk_bytes, _PIECE_BYTES // chunk_bytes * chunk_bytes)
    end = offset + size_bytes
    while offset < end:
        piece = min(step, end - offset)
        digests += _hash_piece(fd, offset, piece, chunk_bytes)
        offset += piece
        if on_bytes is not None:
            on_bytes(piece)
    return bytes(digests)


def handle_runs(manifest: Manifest, file: int) -> Iterator[tuple[int, int, int]]:
    """(offset, size, first chunk) of the longest stretches of a data file whose chunks follow each other unbroken.

    Chunks restart at each handle, so a stretch ends after a handle that is no multiple of the chunk size.
    """
    start = first_chunk = 0
    end = 0
    for handle in manifest.handles:
        if handle.file != file:
            continue
        end = handle.offset + handle.size
        if handle.size % manifest.chunk_bytes:
            yield start, end - start, first_chunk
            first_chunk += chunk_count(end - start, manifest.chunk_bytes)
            start = end
    if end > start:
        yield start, end - start, first_chunk


def first_difference(found: bytes, expected: bytes) -> int | None:
    """Index of the first digest that differs, None when all are equal."""
    if found == expected:
        return None
    for at in range(0, max(len(found), len(expected)), DIGEST_BYTES):
        if found[at : at + DIGEST_BYTES] != expected[at : at + DIGEST_BYTES]:
            return at // DIGEST_BYTES
    return None


def _hash_piece(fd: int, offset: int, size_bytes: int, chunk_bytes: int) -> bytes:
    native = _native_hash()
    if native is not None:
        return native(fd, offset, size_bytes, chunk_bytes)
    return _hash_mapped(fd, offset, size_bytes, chunk_bytes)


def _hash_mapped(fd: int, offset: int, size_bytes: int, chunk_bytes: int) -> bytes:
    aligned = offset - offset % mmap.ALLOCATIONGRANULARITY
    skip = offset - aligned
    try:
        mapping = mmap.mmap(fd, skip + size_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=aligned)
    except ValueError as error:  # Python compares with the file's size before it maps
        raise ShortFileError(str(error)) from error
    digests = bytearray()
    with mapping, memoryview(mapping) as view:
        for start in range(skip, skip + size_bytes, chunk_bytes):
            with view[start : min(start + chunk_bytes, skip + size_bytes)] as chunk:
                digests += blake3(chunk, max_threads=blake3.AUTO).digest()
    return bytes(digests)


_native_cache: list[Callable[[int, int, int, int], bytes] | None] = []


def _native_hash() -> Callable[[int, int, int, int], bytes] | None:
    """transfer.hash_file with our argument order; None when it is not built: the format needs none."""
    if not _native_cache:
        try:
            from woodfrog._native import transfer
        except ImportError:
            _native_cache.append(None)
        else:

            def native(fd: int, offset: int, size_bytes: int, chunk_bytes: int) -> bytes:
                try:
                    return transfer.hash_file(
                        fd, offset, size_bytes, chunk_bytes=chunk_bytes, threads=0, progress=transfer.Progress()
                    )
                except transfer.TransferError as error:
                    raise OSError(-min(error.code, 0), f"{error}") from error

            _native_cache.append(native)
    return _native_cache[0]
