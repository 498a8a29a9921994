"""Raw ceilings for the store: the same bytes by plain threads, without woodfrog, on the same disk, memory and server.

Each returns bytes a second. Nothing here knows a format; data comes in as a buffer and is not looked at.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK_BYTES = 16 << 20
PART_BYTES = 16 << 20  # of a multipart upload, as the store's
PARTS_IN_FLIGHT = 8


def timed(call: Callable[[], Any]) -> float:
    """Seconds that it took."""
    begin_s = time.monotonic()
    call()
    return time.monotonic() - begin_s


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Runs all of them; the first failure is raised."""
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def disk_rates(folder: Path, data: memoryview, threads: int) -> tuple[float, float, bool]:
    """Sequential writing (with fsync) and reading of as many files as threads, past the page cache: bytes/s of both,
    and whether the filesystem allowed that (O_DIRECT). `data` begins on a page."""
    folder.mkdir(parents=True, exist_ok=True)
    share = len(data) // threads // BLOCK_BYTES * BLOCK_BYTES
    paths = [folder / f"raw-{number}" for number in range(threads)]
    direct = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | direct, 0o600))
    except OSError:
        direct = 0
    try:

        def write(number: int) -> None:
            descriptor = os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o600)
            try:
                for at in range(0, share, BLOCK_BYTES):
                    os.pwrite(descriptor, data[number * share + at : number * share + at + BLOCK_BYTES], at)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        def read(number: int) -> None:
            descriptor = os.open(paths[number], os.O_RDONLY | direct)
            buffer = mmap.mmap(-1, BLOCK_BYTES)
            try:
                for at in range(0, share, BLOCK_BYTES):
                    os.preadv(descriptor, [buffer], at)
            finally:
                os.close(descriptor)

        write_s = timed(lambda: in_threads([lambda n=n: write(n) for n in range(threads)], threads))  # type: ignore[misc]
        for path in paths:
            forget(path)
        read_s = timed(lambda: in_threads([lambda n=n: read(n) for n in range(threads)], threads))  # type: ignore[misc]
    finally:
        for path in [*paths, folder / "probe"]:
            path.unlink(missing_ok=True)
    return share * threads / write_s, share * threads / read_s, bool(direct)


def forget(path: Path) -> None:
    """Drops a file from the page cache, so that reading it reads the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def memory_rate(data: memoryview, thread_counts: Sequence[int]) -> tuple[float, int]:
    """memcpy of it into memory that is there already: bytes/s with the best of these numbers of threads, and which."""
    target = mmap.mmap(-1, len(data))
    source_view, target_view = (ctypes.c_char).from_buffer(data), (ctypes.c_char).from_buffer(target)
    source, there = ctypes.addressof(source_view), ctypes.addressof(target_view)

    def rate(threads: int) -> float:
        share = len(data) // threads

        def copy(number: int) -> None:
            ctypes.memmove(there + number * share, source + number * share, share)

        jobs = [lambda n=n: copy(n) for n in range(threads)]  # type: ignore[misc]
        return share * threads / timed(lambda: in_threads(jobs, threads))

    rate(max(thread_counts))  # the first touch of the target's pages is not copying
    best = max((rate(threads), threads) for threads in thread_counts)
    del source_view, target_view
    return best


def s3_rates(client: Any, data: memoryview, object_bytes: int) -> tuple[float, float]:
    """The same bytes as objects of that size, by multipart uploads and plain downloads: bytes/s of both."""
    import obstore

    places = list(range(0, len(data), object_bytes))

    def put(at: int) -> None:
        part = bytes(data[at : at + object_bytes])
        obstore.put(
            client, f"raw/{at}", part, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
        )

    def get(at: int) -> None:
        size = min(object_bytes, len(data) - at)
        ranges = range(0, size, PART_BYTES)
        obstore.get_ranges(
            client, f"raw/{at}", starts=list(ranges), ends=[min(size, one + PART_BYTES) for one in ranges], coalesce=0
        )

    put_s = timed(lambda: in_threads([lambda at=at: put(at) for at in places], 2))  # type: ignore[misc]
    get_s = timed(lambda: in_threads([lambda at=at: get(at) for at in places], 2))  # type: ignore[misc]
    for at in places:
        obstore.delete(client, f"raw/{at}")
    return len(data) / put_s, len(data) / get_s
