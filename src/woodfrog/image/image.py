"""One complete image, opened for reading: its manifest, and through the store's packs every chunk that it names.

An open image holds the store's shared lock, so that neither a removal nor a prune can take anything from under it. It
must never write to the store.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from woodfrog.errors import BadImageError
from woodfrog.image import chunks, codec, layout
from woodfrog.image.manifest import FileRecord, Manifest
from woodfrog.image.progress import OnProgress, told
from woodfrog.store.arriving import Arriving
from woodfrog.store.entries import Located, OpenManifest
from woodfrog.store.reader import Reader
from woodfrog.store.records import ABSENT, pack_column
from woodfrog.store.store import Store

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress

# Descriptors of CRIU's files that are open at once: a process has a few, a tree of a thousand has ten thousand.
FILES_AT_ONCE = 256
_T = TypeVar("_T")


@dataclass(frozen=True)
class Problem:
    """Something wrong with an image: of which handle or file, which chunk of it (None: all of it), and what."""

    path: str
    what: str
    chunk: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Image:
    """Made by an ImageRepository; close it, or use it in a `with`. Not for several threads at once."""

    def __init__(self, store: Store, opened: OpenManifest, manifest: Manifest) -> None:
        self.manifest = manifest
        self._store = store
        self._opened = opened
        self._reader: Reader | None = None
        self._afterwards: list[Callable[[], None]] = []

    @classmethod
    def decode(cls, store: Store, opened: OpenManifest) -> Image:
        """The image with that manifest, decoded and checked. Takes `opened` over, also when it raises BadImageError."""
        try:
            manifest = codec.decode(opened.data, f"the manifest of {opened.reference}")
            if manifest.chunk_bytes != store.chunk_bytes:
                raise BadImageError(
                    f"{opened.reference} has chunks of {manifest.chunk_bytes} bytes in a store of {store.chunk_bytes}",
                    advice="use another image; this one was put there by a faulty writer",
                )
        except BaseException:
            opened.close()
            raise
        return cls(store, opened, manifest)

    @property
    def reference(self) -> str:
        """NAME@NUMBER: its place in the store."""
        return self._opened.reference

    @property
    def path(self) -> str:
        """Where its manifest is, for messages."""
        return layout.place(self._store.url, self.reference)

    @property
    def size_bytes(self) -> int:
        """Of the memory and the files that it brings back."""
        return self.manifest.gpu_bytes + self.manifest.cpu_bytes

    # ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def locate_gpu(self, progress: Progress | None = None) -> Located:
        """Where the chunks of the handles are, ready to be read; the packs' descriptors are valid until `close`.
        BadImageError naming how many are missing."""
        cut = self._gpu_cut()
        return self._telling_incomplete(
            lambda reader: reader.locate(self.manifest.digests, chunks.packed(cut.sizes), progress)
        )

    def locate_gpu_ahead(self) -> Arriving:
        """As `locate_gpu`, without waiting for what has to be fetched from a remote store; it goes on until `close`."""
        cut = self._gpu_cut()
        return self._telling_incomplete(
            lambda reader: reader.locate_ahead(self.manifest.digests, chunks.packed(cut.sizes))
        )

    def extract_cpu(
        self, directory: Path, only: Collection[str] | None = None, progress: Progress | None = None
    ) -> None:
        """CRIU's files (those named in `only` that there are) as plain files in `directory`, which is the caller's and
        empty; each chunk is compared with its digest. Only CRIU's own. BadImageError."""
        records = [record for record in self.own_cpu_files() if only is None or record.path in only]
        for begin in range(0, len(records), FILES_AT_ONCE):
            batch = records[begin : begin + FILES_AT_ONCE]
            descriptors = [layout.create_file(directory, record.path) for record in batch]
            try:
                self.extract_files(batch, descriptors, progress)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def extract_files(
        self,
        records: Sequence[FileRecord],
        descriptors: Sequence[int],
        progress: Progress | None = None,
        offsets: Sequence[int] = (),
    ) -> None:
        """The contents of these files into the files of the caller's descriptors, at `offsets` (none: 0)."""
        self.files_extraction(records, descriptors, offsets)(progress)

    def files_extraction(
        self, records: Sequence[FileRecord], descriptors: Sequence[int], offsets: Sequence[int] = ()
    ) -> Callable[[Progress | None], None]:
        """`extract_files` in two steps: the chunks have been found (and fetched) when this returns, and what it returns
        moves them, on any thread, until `close`."""
        from woodfrog._native import transfer

        digests = b"".join(record.digests for record in records)
        cut = chunks.Cut.of_files(records, self.manifest.chunk_bytes)
        located = self._telling_incomplete(partial(_locate, digests, cut))
        pieces = [
            (descriptor, offset, record.size_bytes)
            for descriptor, offset, record in zip(descriptors, offsets or [0] * len(records), records, strict=True)
            if record.size_bytes
        ]
        sizes = cut.sizes.tobytes()

        def extract(progress: Progress | None) -> None:
            if pieces:
                transfer.extract_from_packs(
                    pieces,
                    digests,
                    located.locations,
                    located.packs,
                    chunk_bytes=self.manifest.chunk_bytes,
                    sizes=sizes,
                    progress=progress,
                )

        return extract

    def own_cpu_files(self) -> list[FileRecord]:
        """CRIU's files that it reads itself: without those that it is handed as memory. BadImageError as of
        `cpu_files`."""
        return [record for record in self.cpu_files() if not record.mapped_as and not record.lent_from]

    def cpu_files(self) -> Sequence[FileRecord]:
        """CRIU's files. BadImageError for an image without a CPU side."""
        if self.manifest.cpu is None:
            raise BadImageError(
                f"{self.reference} has no CPU side: it holds GPU memory only", advice="checkpoint without cpu=False"
            )
        return self.manifest.cpu.files

    def verify(self, progress: OnProgress | None = None) -> list[Problem]:
        """Read every chunk and compare it with its digest. Empty: all is well."""
        manifest = self.manifest
        names = [f"handle {handle.id:#x}" for handle in manifest.handles]
        sizes = [handle.size for handle in manifest.handles]
        own = {}
        if manifest.cpu is not None:
            own = {len(names) + at: record.sizes for at, record in enumerate(manifest.cpu.files) if record.sizes}
            names += [f"cpu/{record.path}" for record in manifest.cpu.files]
            sizes += [record.size_bytes for record in manifest.cpu.files]
        cut = chunks.Cut(sizes, manifest.chunk_bytes, own)
        offsets = cut.offsets()
        with told(progress, self.size_bytes) as native:
            absent, damaged = self._check(manifest.all_digests(), cut, native)
        problems = []
        for position in sorted({*absent, *damaged}):
            piece = bisect.bisect_right(cut.first, position) - 1
            chunk = position - cut.first[piece]
            at = f"the chunk at byte {offsets[position]}"
            what = f"{at} is not in the store" if position in absent else f"{at} does not have its digest"
            problems.append(Problem(names[piece], what, chunk))
        return problems

    def _check(self, digests: bytes, cut: chunks.Cut, progress: Progress) -> tuple[set[int], list[int]]:
        """Positions of chunks that the store does not have, and of those that are damaged in it."""
        from woodfrog._native import transfer

        reader = self._open_reader()
        packs = pack_column(reader.find(digests, chunks.packed(cut.sizes)))
        absent = {position for position, pack in enumerate(packs) if pack == ABSENT}
        present = [position for position in range(len(cut)) if position not in absent]
        there = chunks.select_digests(digests, present)
        located = reader.locate(there, chunks.packed(chunks.select(cut.sizes, present)), progress)
        wrong = transfer.check_packs(there, located.locations, located.packs, progress=progress)
        return absent, [present[at] for at in wrong]

    def close(self) -> None:
        """Give the lock and the packs up; calling it again does nothing."""
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                reader.close()
        finally:
            self._opened.close()
            afterwards, self._afterwards = self._afterwards, []
            for step in afterwards:
                step()

    def then(self, step: Callable[[], None]) -> Image:
        """Have `step` called at the end of `close`: for whoever opened a store only for this image."""
        self._afterwards.append(step)
        return self

    def __enter__(self) -> Image:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Image {self.reference} in {self._store.url}>"

    def _gpu_cut(self) -> chunks.Cut:
        return chunks.Cut([handle.size for handle in self.manifest.handles], self.manifest.chunk_bytes)

    def _telling_incomplete(self, look: Callable[[Reader], _T]) -> _T:
        """What `look` finds; an error of it names the image."""
        try:
            return look(self._open_reader())
        except BadImageError as error:
            raise BadImageError(
                f"{self.reference} is not whole: {error.reason}",
                advice=error.advice,
                details={**error.details, "image": self.reference},
            ) from error

    def _open_reader(self) -> Reader:
        if self._reader is None:
            self._reader = self._store.reader()
        return self._reader


def _locate(digests: bytes, cut: chunks.Cut, reader: Reader) -> Located:
    return reader.locate(digests, chunks.packed(cut.sizes))
