"""Filling packs: chunks go to the end of a growing file; a file that is large enough becomes durable in the background
while the next one is filled. Used by sessions, and by prune and repair for what they save.

Nothing gets its key before `finish`, except on a remote tier, where a pack without an index is harmless as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from woodfrog._native.transfer import Arena, Progress, write_pack
from woodfrog.faults import fault_point
from woodfrog.store import files, keys, space
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import CHUNK_BYTES, stored_sizes_of
from woodfrog.store.tiers.protocol import TemporaryFile, Tier

_IN_FLIGHT = 2  # packs being made durable beside the one being filled: bounds the room that a remote tier's spool takes


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


class Packer:
    """Owns its temporary files until `finish` or `close`. Not for several threads at once."""

    def __init__(self, tier: Tier, chunk_bytes: int) -> None:
        self._tier = tier
        self._chunk_bytes = chunk_bytes
        self._growing: _Growing | None = None
        self._sealed: list[tuple[_Growing, Future[None]]] = []
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
        """See WriteSession.write."""
        done: list[bytes] = []
        at = 0
        while at < len(chunks):
            growing = self._current()
            room = max(1, (self._tier.pack_bytes - growing.size_bytes) // self._chunk_bytes)
            some = chunks[at : at + room * CHUNK_BYTES]
            with space.telling_full(self._tier.spool):
                records, growing.name = write_pack(
                    growing.file.fd, some, sources, compress=compress, level=level, threads=threads, progress=progress
                )
            growing.size_bytes = os.fstat(growing.file.fd).st_size
            growing.records.append(records)
            done.append(records)
            at += len(some)
            fault_point("store.pack.written")
            if growing.size_bytes + self._chunk_bytes > self._tier.pack_bytes:
                self._seal()
        stored = sum(sum(stored_sizes_of(records)) for records in done)
        self.stored_bytes += stored
        return Written(done, stored)

    def finish(self) -> list[IndexedPack]:
        """All packs durable under their keys; they are in no index yet."""
        if self._growing is not None:
            self._seal()
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
        if self._growing is not None:
            self._growing.file.close()
            self._growing = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _current(self) -> _Growing:
        if self._growing is None:
            self._growing = _Growing(self._tier.new_file())
        return self._growing

    def _seal(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="woodfrog-pack")
        waiting = [future for _, future in self._sealed if not future.done()]
        if len(waiting) >= _IN_FLIGHT:
            waiting[0].result()
        assert self._growing is not None
        growing, self._growing = self._growing, None
        self._sealed.append((growing, self._pool.submit(self._secure, growing)))

    def _secure(self, growing: _Growing) -> None:
        if self._tier.local:
            files.sync(growing.file.fd)
            return
        self._tier.put_files([(keys.pack_key(growing.name), growing.file)])
        growing.file.close()  # its room is needed for the next one

    def _drop(self, sealed: Sequence[tuple[_Growing, Future[None]]]) -> None:
        for growing, future in sealed:
            if not future.cancel():
                future.exception()  # its error was raised by `finish`, or something else failed first
            growing.file.close()
