"""Noises for interference.py: what a checkpoint's writing does to the rest of the machine, each of its parts alone.

`python noises.py cpu` and `python noises.py gpu` each say `{"ready": true}` when all that they need is made, and make a
noise for each line of JSON that they then read: noise, threads, seconds, nice, policy (other, batch, idle), processors
(those it may run on; none: all). They say when it has begun (`begin_s`, `time.time()`); when it is over: end_s, bytes
(that were hashed, written or copied), user_s and system_s (of this process); and when they are ready for the next one,
all that was written given back. A noise ends early when there is no room for more.

The processor's:

* writer       chunks of an arena into packs, as a checkpoint writes them: the store's own session, in a tmpfs
* hash         each byte of the arena hashed where it lies; it is larger than every cache
* hash_cached  the same 256 KiB again and again: the arithmetic without the memory
* sha256       hashlib's, of 1 MiB: arithmetic without wide registers
* tmpfs        pieces of 8 MiB of the arena written to new files in a tmpfs
* memcpy       the arena into memory that is there

The GPU's, by a process with a context of its own:

* drain        woodfrog's own drain, `background`, as a checkpoint copies when its target runs on
* drain_20gb, drain_8gb   the same, with at most so many bytes a second
* copy_32mib, copy_4mib   to pinned memory in pieces of that size, two streams; the thread that waits for them spins, as
               the driver has it, where the drain's sleeps
* kernels      a kernel of one thread every millisecond
* releases     memory of 256 MiB made, mapped, unmapped and released forty times a second, as the copy that drains at
               10 GB/s is given back
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import resource
import shutil
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import driver_baseline
import store as store_bench

POLICIES = {"other": os.SCHED_OTHER, "batch": os.SCHED_BATCH, "idle": os.SCHED_IDLE}
CACHED_BYTES = 256 << 10  # a quarter of a large second-level cache, half of a small one
SHA_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
IN_FLIGHT = 4  # copies of each stream
KERNEL_EVERY_S = 1e-3
RELEASED_BYTES, RELEASE_EVERY_S = 256 << 20, 0.025
KERNEL = b""".version 6.3
.target sm_75
.address_size 64
.visible .entry nothing()
{
    ret;
}
\0"""


class Deadline:
    """When a noise has to be over. What runs in C++ is told by its progress."""

    def __init__(self, seconds: float) -> None:
        from woodfrog._native.transfer import Progress

        self._end_s = time.monotonic() + seconds
        self.progress = Progress()
        self._timer = threading.Timer(seconds, self.progress.cancel)
        self._timer.start()

    def over(self) -> bool:
        return time.monotonic() >= self._end_s

    def until(self, work: Callable[[], bool | None]) -> int:
        """Calls it again and again until it is over, or returns False; the bytes that the progress has counted."""
        from woodfrog._native.transfer import CancelledError

        try:
            while not self.over() and work() is not False:
                pass
        except CancelledError:
            pass
        finally:
            self._timer.cancel()
        return self.progress.bytes_done

    def in_threads(self, one: Callable[[int], Iterator[int]], threads: int) -> int:
        """Takes steps of `one(number)` in each of so many threads until it is over; the sum of what they gave."""

        def run(number: int) -> int:
            done = 0
            for step in one(number):
                done += step
                if self.over():
                    break
            return done

        self._timer.cancel()
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(run, range(threads)))


class Cpu:
    """The processor's noises. Each returns the bytes that it has done; `end` gives back what it took."""

    def __init__(self, size_bytes: int, folder: Path, most_bytes: int) -> None:
        self._data = store_bench.Data(size_bytes)
        self._to = mmap.mmap(self._data.target.fd, size_bytes)
        self._folder = folder
        self._most_bytes = most_bytes
        self._words = os.urandom(SHA_BYTES)

    def context(self) -> AbstractContextManager[None]:
        """What a thread that makes a noise has to be in."""
        return nullcontext()

    def writer(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        from woodfrog.store.open import open_store

        sessions: list[Any] = []

        def one() -> bool:
            place = self._folder / f"store-{len(sessions)}"
            end.callback(shutil.rmtree, place)
            store = end.enter_context(open_store(place, chunk_bytes=store_bench.CHUNK_BYTES))
            sessions.append(store.session())
            sessions[-1].write(
                self._data.table, [self._data.arena], compress="none", threads=threads, progress=deadline.progress
            )
            return (len(sessions) + 1) * self._data.size_bytes <= self._most_bytes

        try:
            return deadline.until(one)
        finally:
            # First, and side by side: one after the other they would take longer than they took to be written.
            end.callback(side_by_side, [session.abort for session in sessions])

    def hash(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._hashed([(0, self._data.size_bytes)], threads, deadline)

    def hash_cached(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._hashed([(0, CACHED_BYTES)] * (self._data.size_bytes // CACHED_BYTES), threads, deadline)

    def _hashed(self, ranges: list[tuple[int, int]], threads: int, deadline: Deadline) -> int:
        from woodfrog._native import transfer

        def one() -> None:
            transfer.hash_arena(
                self._data.arena, ranges, chunk_bytes=store_bench.CHUNK_BYTES, threads=threads,
                progress=deadline.progress,
            )  # fmt: skip

        return deadline.until(one)

    def sha256(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        def one(number: int) -> Iterator[int]:
            while True:
                hashlib.sha256(self._words)  # gives up the interpreter's lock
                yield SHA_BYTES

        return deadline.in_threads(one, threads)

    def tmpfs(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        files: list[int] = []
        end.callback(lambda: side_by_side([lambda file=file: os.close(file) for file in files]))  # type: ignore[misc]
        share = len(self._data.view) // threads // PIECE_BYTES * PIECE_BYTES or PIECE_BYTES

        def one(number: int) -> Iterator[int]:
            for _ in range(max(1, self._most_bytes // threads // share)):
                file = os.open(self._folder, os.O_TMPFILE | os.O_RDWR, 0o600)
                files.append(file)
                for at in range(0, share, PIECE_BYTES):
                    begin = (number * share + at) % len(self._data.view)
                    yield os.pwrite(file, self._data.view[begin : begin + PIECE_BYTES], at)

        return deadline.in_threads(one, threads)

    def memcpy(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        views = [(ctypes.c_char * len(mapped)).from_buffer(mapped) for mapped in (self._to, self._data.mapped)]
        target, source = (ctypes.addressof(view) for view in views)
        pieces = self._data.size_bytes // PIECE_BYTES

        def one(number: int) -> Iterator[int]:
            for piece in itertools.count(number, threads):
                at = piece % pieces * PIECE_BYTES
                ctypes.memmove(target + at, source + at, PIECE_BYTES)
                yield PIECE_BYTES

        return deadline.in_threads(one, threads)


class Gpu:
    """The GPU's noises. Each returns the bytes that it has copied; `kernels` and `releases` none. Made in a context."""

    def __init__(self, size_bytes: int) -> None:
        from woodfrog._native import transfer

        self._size_bytes = size_bytes
        self._arena = transfer.Arena(size_bytes)
        self._arena.populate(0, size_bytes)
        self._arena.register(0)
        self._memory = transfer.Device(0).create_memory(size_bytes)
        self._positions = array("I", range(size_bytes // store_bench.CHUNK_BYTES)).tobytes()
        self._device = int(driver_call("cuMemAlloc", size_bytes))
        self._host = int(driver_call("cuMemHostAlloc", size_bytes, 0))
        self._streams = [driver_call("cuStreamCreate", 1) for _ in range(2)]  # 1: CU_STREAM_NON_BLOCKING
        self._kernel = driver_call("cuModuleGetFunction", driver_call("cuModuleLoadData", KERNEL), b"nothing")

    def context(self) -> AbstractContextManager[None]:
        return driver_baseline.context()

    def drain(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._drained(0, deadline)

    def drain_20gb(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._drained(20 * 10**9, deadline)

    def drain_8gb(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._drained(8 * 10**9, deadline)

    def _drained(self, most_bytes_per_s: int, deadline: Deadline) -> int:
        from woodfrog._native import transfer

        def one() -> None:
            transfer.drain_chunks(
                [(self._memory, 0, self._size_bytes)], self._positions, self._arena, [(0, self._size_bytes)],
                chunk_bytes=store_bench.CHUNK_BYTES, background=True, most_bytes_per_s=most_bytes_per_s,
                progress=deadline.progress,
            )  # fmt: skip

        return deadline.until(one)

    def copy_32mib(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._copied(32 << 20, deadline)

    def copy_4mib(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        return self._copied(4 << 20, deadline)

    def _copied(self, piece_bytes: int, deadline: Deadline) -> int:
        done = 0

        def one() -> None:
            nonlocal done
            for stream in self._streams:  # while one is waited for, the other has copies to do
                driver_call("cuStreamSynchronize", stream)
                for _ in range(IN_FLIGHT):
                    at = done % (self._size_bytes // piece_bytes * piece_bytes)
                    driver_call("cuMemcpyDtoHAsync", self._host + at, self._device + at, piece_bytes, stream)
                    done += piece_bytes

        deadline.until(one)
        driver_call("cuCtxSynchronize")
        return done

    def kernels(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        def one() -> None:
            driver_call("cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, self._streams[0], 0, 0)
            driver_call("cuStreamSynchronize", self._streams[0])
            time.sleep(KERNEL_EVERY_S)

        return deadline.until(one)

    def releases(self, threads: int, deadline: Deadline, end: ExitStack) -> int:
        from woodfrog._native import transfer

        device = transfer.Device(0)

        def one() -> None:
            (memory,) = device.create_memories([RELEASED_BYTES])
            memory.release()
            time.sleep(RELEASE_EVERY_S)

        return deadline.until(one)


def driver_call(name: str, *arguments: Any) -> Any:
    return driver_baseline._call(name, *arguments)


def side_by_side(work: Sequence[Callable[[], Any]]) -> None:
    with ThreadPoolExecutor(max(1, min(len(work), 16))) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result()


def say(**members: Any) -> None:
    print(json.dumps(members), flush=True)


def make(noises: Cpu | Gpu, order: dict[str, Any]) -> None:
    """One noise in a thread of its own, from which those that it starts inherit what they may have of the machine. When
    it fails a line with `error` stands where the others would."""
    with ExitStack() as end:

        def run() -> dict[str, Any]:
            os.setpriority(os.PRIO_PROCESS, 0, order["nice"])
            os.sched_setscheduler(0, POLICIES[order["policy"]], os.sched_param(0))
            if order["processors"]:
                os.sched_setaffinity(0, order["processors"])
            with noises.context():
                before = resource.getrusage(resource.RUSAGE_SELF)
                say(begin_s=time.time())
                done = getattr(noises, order["noise"])(order["threads"], Deadline(order["seconds"]), end)
                end_s, after = time.time(), resource.getrusage(resource.RUSAGE_SELF)
            return {
                "end_s": end_s,
                "bytes": done,
                "user_s": after.ru_utime - before.ru_utime,
                "system_s": after.ru_stime - before.ru_stime,
            }

        with ThreadPoolExecutor(1) as pool:
            try:
                say(**pool.submit(run).result())
            except Exception as failure:  # noqa: BLE001 (the noises that follow can still be measured)
                say(error=f"{type(failure).__name__}: {failure}")
    say(ready=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "gpu"))
    parser.add_argument("--size-mib", type=int, required=True, help="memory that is hashed, written, copied")
    parser.add_argument("--folder", type=Path, required=True, help="in a tmpfs")
    parser.add_argument("--most-mib", type=int, required=True, help="room in it")
    parser.add_argument("--warm", action="store_true", help="write as much once before")
    arguments = parser.parse_args()
    size_bytes = arguments.size_mib << 20
    with ExitStack() as stack:
        noises: Cpu | Gpu
        if arguments.what == "cpu":
            noises = Cpu(size_bytes, arguments.folder, arguments.most_mib << 20)
            if arguments.warm:  # memory that a virtual machine has not used yet is much slower
                with ExitStack() as end:
                    noises.writer(0, Deadline(60.0), end)
        else:
            stack.enter_context(driver_baseline.context())
            noises = Gpu(size_bytes)
        say(ready=True)
        for line in sys.stdin:
            make(noises, json.loads(line))


if __name__ == "__main__":
    main()
