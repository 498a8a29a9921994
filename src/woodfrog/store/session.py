"""Writing one image: chunks into packs, packs into the index, and last the manifest that makes it one.

A session holds the shared lock from its beginning, so that a chunk it was told not to store again is still there when
its manifest is published. The order packs, index, manifest is the safety: it must never be changed for speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from woodfrog._native.transfer import Arena, ChunkIndex, Progress
from woodfrog.errors import BadImageError, RefusedError, UsageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import images, indexes, keys, names, space
from woodfrog.store.catalogue import Catalogue, View
from woodfrog.store.entries import Hold
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.packing import Packer
from woodfrog.store.records import ABSENT, DIGEST_BYTES, pack_column, positions_of, select_rows
from woodfrog.store.tiers.protocol import Tier

INDEX_EVERY_S = 10.0  # while packs go to a remote tier: what a killed writer has sent in vain is what it sent since
_ATTEMPTS = 1000  # numbers tried in a row: that many writers of one name at once are none of ours


class WriteSession:
    """Made by `Store.session`. In a `with` it aborts at the end unless it was published. Not for several threads at
    once."""

    def __init__(self, tier: Tier, catalogue: Catalogue, view: View, chunk_bytes: int, hold: Hold) -> None:
        self._tier = tier
        self._catalogue = catalogue
        self._view = view
        self._chunk_bytes = chunk_bytes
        self._hold = hold
        self._unflushed = ChunkIndex(chunk_bytes)  # no other session may rely on what is in here
        self._unflushed_calls = 0
        self._packer = Packer(tier, chunk_bytes, self._sent)
        self._sending = threading.Lock()  # of the three below
        self._unindexed: list[IndexedPack] = []  # durable on a remote tier
        self._indexed: set[bytes] = set()  # names of packs that this session wrote an index of while it went on
        self._index_due_s = time.monotonic() + INDEX_EVERY_S
        self._work_directory: Path | None = None
        self._open = True  # more can be written
        self._ended = False  # nothing of it is left
        fault_point("store.session.begin")

    def missing(self, digests: bytes, sizes: bytes | None = None) -> bytes:
        """Of 32-byte digests back to back, the positions (packed u32, ascending) of those to be stored: neither in the
        store, nor written by this session, nor all zeros, nor named before in `digests`. `sizes` (packed u32, one a
        digest) lets short chunks of zeros be recognised too. The answer holds until the session ends."""
        self._check_open()
        positions = self._view.index.missing(digests, sizes)
        if not positions or not len(self._unflushed):
            return positions
        there = positions_of(positions)
        again = positions_of(self._unflushed.missing(select_rows(digests, there, DIGEST_BYTES)))
        return select_rows(positions, again, 4)

    def write(
        self,
        chunks: bytes,
        sources: Sequence[Arena | int],
        *,
        compress: str = "auto",
        level: int = 0,
        threads: int = 0,
        progress: Progress | None = None,
    ) -> int:
        """Store chunks (packed Chunk records: what, and where in which of `sources`, arenas or file descriptors): those
        that `missing` named. Returns the bytes that they take in the packs.

        Each is compared with its digest on the way: IntegrityError (of woodfrog._native.transfer). Not durable before
        `flush`. After any failure, NoSpaceError among them, only `abort` is possible: what was written is dropped, and
        `work_directory`, which another thread may be at work in, stays until then."""
        self._check_open()
        with self._on_failure(self._drop):
            written = self._packer.write(
                chunks, sources, compress=compress, level=level, threads=threads, progress=progress
            )
            for records in written.records:
                self._unflushed.add(self._unflushed_calls, records)
                self._unflushed_calls += 1
        return written.stored_bytes

    @property
    def tier(self) -> Tier:
        """Of the store that this writes into."""
        return self._tier

    @property
    def stored_bytes(self) -> int:
        """What everything written so far takes in the packs."""
        return self._packer.stored_bytes

    def flush(self) -> None:
        """Everything written so far durable, first the packs, then an index of them: also for other sessions to find,
        and what a session that is aborted later leaves for the next one."""
        self._check_open()
        with self._on_failure(self.abort):
            self._flush()

    def publish(
        self,
        name: str,
        manifest: Callable[[int], bytes],
        digests: Iterable[tuple[bytes, bytes]] | None = None,
    ) -> str:
        """Flush, then make the image visible by one atomic step; returns its reference NAME@NUMBER, ends the session.

        `manifest` gets the number and gives the bytes; it is called again if another writer took that number. What it
        raises aborts. With `digests` (as Digests gives them) it is made sure first that all of them are in the store:
        BadImageError. An error after the manifest is there says so, and the image stays."""
        names.check_name(name)
        self._check_open()
        with self._on_failure(self.abort):
            self._prepare(digests)
            for _ in range(_ATTEMPTS):
                number = images.next_number(self._tier, name)
                if self._put(f"{name}@{number}", manifest(number)):
                    break
            else:
                raise RefusedError(
                    f"{_ATTEMPTS} numbers of {name} were taken by others while this image was published",
                    advice="something else writes into the store: give each its own",
                )
        self._published(f"{name}@{number}")
        return f"{name}@{number}"

    def publish_as(self, reference: str, manifest: bytes, digests: Iterable[tuple[bytes, bytes]] | None = None) -> bool:
        """As `publish`, with the number given (copies between stores). False, and nothing is published, if the same
        manifest is there already; RefusedError if another is, or if the number was removed once."""
        name, number = names.parse_reference(reference)
        if number is None:
            raise UsageError(f"{reference!r} has no number", advice="write NAME@NUMBER")
        self._check_open()
        with self._on_failure(self.abort):
            self._prepare(digests)
            published = self._put_as(reference, name, number, manifest)
        if published:
            self._published(reference)
        else:
            self.abort()
        return published

    def abort(self) -> None:
        """Drop what was not flushed and give the lock back. What was flushed stays until a prune. Does nothing after
        publish or a first abort."""
        if self._ended:
            return
        self._ended = True
        try:
            self._drop()
            if self._work_directory is not None:
                self._tier.remove_directory(self._work_directory)
        finally:
            self._hold.release()

    @property
    def work_directory(self) -> Path:
        """A private directory (0700) on a local disk for files in the making; made when first asked for, removed with
        all that is in it when the session ends."""
        if self._ended:
            self._check_open()  # raises
        if self._work_directory is None:
            self._work_directory = self._tier.make_directory()
        return self._work_directory

    def __enter__(self) -> WriteSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError("this session has ended already", advice="begin another one")

    def _drop(self) -> None:
        """What was not flushed makes room for others; nothing more can be written."""
        self._open = False
        self._packer.close()

    @contextmanager
    def _on_failure(self, give_up: Callable[[], None]) -> Iterator[None]:
        try:
            with space.telling_full(self._tier.spool):
                yield
        except BaseException:
            give_up()
            raise

    def _sent(self, pack: IndexedPack) -> None:
        """By a thread of the packer's: from time to time what has gone a long way is put into the index, so that a
        writer which is killed has not sent it in vain."""
        with self._sending:
            self._unindexed.append(pack)
            if time.monotonic() < self._index_due_s:
                return
            self._hold.check()
            indexes.write(self._tier, self._unindexed)
            self._indexed.update(pack.name for pack in self._unindexed)
            self._unindexed = []
            self._index_due_s = time.monotonic() + INDEX_EVERY_S

    def _flush(self) -> None:
        packs = self._packer.finish()
        if not packs:
            return
        fault_point("store.packs.durable")
        self._hold.check()
        indexes.write(self._tier, [pack for pack in packs if pack.name not in self._indexed])
        self._unindexed = []  # nothing is under way any more
        fault_point("store.index.durable")
        self._catalogue.add(self._view, packs)
        self._unflushed = ChunkIndex(self._chunk_bytes)

    def _prepare(self, digests: Iterable[tuple[bytes, bytes]] | None) -> None:
        fault_point("store.commit.begin")
        self._flush()
        fault_point("store.commit.flushed")
        absent = 0
        for some, sizes in digests or ():
            numbers = pack_column(self._view.index.find(some, sizes))
            absent += sum(1 for number in numbers if number == ABSENT)
        if absent:
            raise BadImageError(
                f"the image names {absent} chunks that were never stored",
                advice="this is a fault of woodfrog: report it",
            )

    def _put(self, reference: str, data: bytes) -> bool:
        if len(data) > keys.MANIFEST_MAX_BYTES:
            raise RefusedError(
                f"the manifest of {reference} has {len(data)} bytes, more than {keys.MANIFEST_MAX_BYTES}",
                advice="make a store with larger chunks",
            )
        fault_point("store.commit.manifest_made")
        self._hold.check()
        return self._tier.put_if_absent(keys.manifest_of(reference), data)

    def _put_as(self, reference: str, name: str, number: int, manifest: bytes) -> bool:
        if number <= images.mark(self._tier, name):
            raise RefusedError(
                f"{reference} may have been removed from {self._tier.url} once, and numbers are not used twice",
                advice="copy it under another name",
            )
        if self._put(reference, manifest):
            return True
        if self._tier.get(keys.manifest_of(reference), keys.MANIFEST_MAX_BYTES) == manifest:
            return False
        raise RefusedError(
            f"{self._tier.url} has another image {reference} already", advice="copy it under another name"
        )

    def _published(self, reference: str) -> None:
        """It exists; whatever fails now, it must not be taken away again."""
        try:
            fault_point("store.commit.published")
            self._hold.check()
        except (WoodfrogError, OSError) as error:
            raise WoodfrogError(
                f"{reference} is complete, but {error.reason if isinstance(error, WoodfrogError) else error}",
                advice=f"`woodfrog verify {reference}` says whether it is whole",
                details={"image": reference},
            ) from error
        finally:
            self.abort()
