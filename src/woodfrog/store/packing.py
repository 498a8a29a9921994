"""Filling packs: chunks go to the end of a growing file; a file that is large enough becomes durable in the background
while the next one is filled. Used by sessions, and by prune and repair for what they save.

Much data fills several packs side by side (lanes): writes into one file wait for each other in most file systems, tmpfs
and ext4 among them. Nothing gets its key before `finish`, except on a remote tier, where a pack without an index is
harmless as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from woodfrog._native.transfer import Arena, Progress, write_pack
from woodfrog.faults import fault_point
from woodfrog.store import files, keys, space
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import CHUNK_BYTES, raw_sizes_of, stored_sizes_of
from woodfrog.store.tiers.protocol import TemporaryFile, Tier

_IN_FLIGHT = 2  # packs being sent beside the one being filled: bounds the room that a remote tier's spool takes
PACKS_ON_THE_WAY = _IN_FLIGHT + 1  # the most that are in files of their own, on a remote tier
_MOST_LANES = 16  # a tmpfs takes 2 GB/s into one file; memory carries no more than that many
_LANE_BYTES = 64 << 20  # less than this for each is not worth a lane: a pack of its own, and a thread


@dataclass(frozen=True)
class Written:
    """What one `write` did: Record tables, each of one pack."""

    records: list[bytes]
    stored_bytes: int


@dataclass
class _Growing:
    file: TemporaryFile
    name: bytes = b""
    size_bytes: int = 0
    records: list[bytes] = field(default_factory=list)

    def finished(self) -> IndexedPack:
        return IndexedPack(self.name, self.size_bytes, b"".join(self.records))


@dataclass(frozen=True)
class _Job:
    """What is the same for all chunks of one `write`."""

    sources: Sequence[Arena | int]
    compress: str
    level: int
    threads: int
    progress: Progress | None
    stopped: threading.Event


class Packer:
    """Owns its temporary files until `finish` or `close`. Not for several threads at once."""

    def __init__(self, tier: Tier, chunk_bytes: int, sent: Callable[[IndexedPack], None] | None = None) -> None:
        """`sent` is told, on a remote tier, of each pack that is durable there while others are still on their way: by
        the thread that sent it, several at once. What it raises is a failure to make that pack durable."""
        self._sent = sent
        self._tier = tier
        self._chunk_bytes = chunk_bytes
        self._at_once = _MOST_LANES if tier.local else _IN_FLIGHT  # packs being made durable
        self._in_memory = tier.local and files.is_in_memory(tier.spool)
        self._open: list[_Growing] = []  # with room for more, and in no lane's hands
        self._sealed: list[tuple[_Growing, Future[None]]] = []
        self._sealing = threading.Lock()  # of `_sealed` and the making of `_pool`
        self._pool: ThreadPoolExecutor | None = None
        self.stored_bytes = 0  # of all chunks written

    def write(
        self,
        chunks: bytes,
        sources: Sequence[Arena | int],
        *,
        compress: str,
        level: int = 0,
        threads: int = 0,
        progress: Progress | None = None,
    ) -> Written:
        """See WriteSession.write. Returns, or raises, when every lane is at rest."""
        if compress == "auto" and self._in_memory:
            compress = "none"  # memory is faster than any of them, on the way in and out
        processors = threads or len(os.sched_getaffinity(0))
        lanes = self._lanes(sum(raw_sizes_of(chunks)), processors)
        job = _Job(sources, compress, level, max(1, processors // lanes), progress, threading.Event())
        if lanes == 1:
            done = self._write_lane(chunks, job)
        else:
            each = -(-(len(chunks) // CHUNK_BYTES) // lanes) * CHUNK_BYTES
            parts = [chunks[at : at + each] for at in range(0, len(chunks), each)]
            with ThreadPoolExecutor(len(parts), thread_name_prefix="woodfrog-lane") as pool:
                futures = [pool.submit(self._write_lane, part, job) for part in parts]
            # A lane that stopped for another one's sake has nothing to say.
            failures = [failure for future in futures if (failure := future.exception()) is not None]
            if failures:
                raise next((failure for failure in failures if not isinstance(failure, _StoppedError)), failures[0])
            done = [records for future in futures for records in future.result()]
        stored = sum(sum(stored_sizes_of(records)) for records in done)
        self.stored_bytes += stored
        return Written(done, stored)

    def finish(self) -> list[IndexedPack]:
        """All packs durable under their keys; they are in no index yet."""
        while self._open:
            self._seal(self._open.pop())
        sealed, self._sealed = self._sealed, []
        try:
            for _, future in sealed:
                future.result()
            fault_point("store.packs.synced")
            if self._tier.local:
                self._tier.put_files([(keys.pack_key(pack.name), pack.file) for pack, _ in sealed])
            return [pack.finished() for pack, _ in sealed]
        finally:
            self._drop(sealed)

    def close(self) -> None:
        """Drops what has no key. Calling it again does nothing."""
        sealed, self._sealed = self._sealed, []
        self._drop(sealed)
        while self._open:
            self._open.pop().file.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _lanes(self, size_bytes: int, processors: int) -> int:
        """How many packs to fill side by side: one on a remote tier, whose spool has room for a few packs only."""
        if not self._tier.local:
            return 1
        return max(1, min(size_bytes // _LANE_BYTES, processors, _MOST_LANES))

    def _write_lane(self, chunks: bytes, job: _Job) -> list[bytes]:
        """Chunks into one pack after the other; the last one stays open for more."""
        done: list[bytes] = []
        growing: _Growing | None = None
        at = 0
        try:
            while at < len(chunks):
                if job.stopped.is_set():
                    raise _StoppedError
                growing = growing or self._take()
                room = max(1, (self._tier.pack_bytes - growing.size_bytes) // self._chunk_bytes)
                some = chunks[at : at + room * CHUNK_BYTES]
                with space.telling_full(self._tier.spool):
                    records, growing.name = write_pack(
                        growing.file.fd,
                        some,
                        job.sources,
                        compress=job.compress,
                        level=job.level,
                        cached=not self._tier.local,  # only read again, to be sent
                        threads=job.threads,
                        progress=job.progress,
                    )
                growing.size_bytes = os.fstat(growing.file.fd).st_size
                growing.records.append(records)
                done.append(records)
                at += len(some)
                fault_point("store.pack.written")
                if growing.size_bytes + self._chunk_bytes > self._tier.pack_bytes:
                    full, growing = growing, None
                    self._seal(full)
        except BaseException:
            job.stopped.set()
            raise
        finally:
            if growing is not None:
                self._open.append(growing)
        return done

    def _take(self) -> _Growing:
        """A pack with room. Lists' pop and append are atomic, so lanes need no lock here."""
        try:
            return self._open.pop()
        except IndexError:
            return _Growing(self._tier.new_file())

    def _seal(self, growing: _Growing) -> None:
        with self._sealing:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="woodfrog-pack")
            waiting = [future for _, future in self._sealed if not future.done()]
            self._sealed.append((growing, self._pool.submit(self._secure, growing)))
        if len(waiting) >= self._at_once:
            waiting[0].result()

    def _secure(self, growing: _Growing) -> None:
        if self._tier.local:
            growing.file.sync()
            return
        self._tier.put_files([(keys.pack_key(growing.name), growing.file)])
        growing.file.close()  # its room is needed for the next one
        if self._sent is not None:
            self._sent(growing.finished())

    def _drop(self, sealed: Sequence[tuple[_Growing, Future[None]]]) -> None:
        for growing, future in sealed:
            if not future.cancel():
                future.exception()  # its error was raised by `finish`, or something else failed first
            growing.file.close()


class _StoppedError(Exception):
    """This lane stopped because another one failed."""
