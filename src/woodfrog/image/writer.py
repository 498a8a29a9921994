"""One image being written: chunks of GPU memory and of CRIU's files into the store, and last the manifest.

The store's session beneath it decides the order of a commit and what a crash leaves; this only says what belongs to the
image. It must never publish a manifest that names a chunk which is not in the store.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from woodfrog.errors import BadImageError, UsageError, WoodfrogError
from woodfrog.image import chunks, codec, layout
from woodfrog.image.image import FILES_AT_ONCE
from woodfrog.image.manifest import Amounts, FileRecord, Manifest, Stats
from woodfrog.image.progress import OnProgress, told
from woodfrog.store import space
from woodfrog.store.session import WriteSession
from woodfrog.store.store import Store

if TYPE_CHECKING:
    from woodfrog._native.transfer import Arena, Progress

CPU = "cpu"  # the folder that CRIU writes into, in the writer's directory
COMPRESSIONS = ("auto", "none", "lz4", "zstd")
MAX_ZSTD_LEVEL = 19  # above it zstd takes memory of another order


@dataclass(frozen=True)
class Committed:
    """An image that is complete, durable and visible. `path`: where its manifest is, for messages."""

    reference: str
    path: str
    manifest: Manifest


class MappedFileChangedError(WoodfrogError):
    """A MappedFile is not what it was when its digests were taken."""


@dataclass(frozen=True)
class MappedFile:
    """Memory of process `pid` of the target that CRIU passes over: `size_bytes` at `offset` of the descriptor, which is
    the caller's. `mapped_as`: CRIU's name for what the process maps; or `lent_from`: the GPU whose memory it was.
    `digests`: what the chunks were when it was saved, empty where it cannot have changed since."""

    path: str  # in the image
    descriptor: int
    size_bytes: int
    mapped_as: str
    pid: int
    digests: bytes = b""
    lent_from: str = ""
    offset: int = 0


class ImageWriter:
    """Made by `ImageRepository.begin`. Until `commit` returns nothing of it can be seen; used in a `with` it aborts at
    the end unless it was committed. Owns the store's session; from several threads."""

    def __init__(self, store: Store, session: WriteSession, name: str, compress: str = "auto") -> None:
        self._store = store
        self._session = session
        self._name = name
        self._compress, self._level = parse_compression(compress)
        self._lock = threading.Lock()  # a session is not for several threads at once
        self._gpu = Amounts()
        self._ahead: list[tuple[bytes, array[int]]] = []  # digests and sizes of what was stored before the survey
        self._cpu_directory: Path | None = None
        self.threads = 0  # that hash and store; 0: one a processor

    @property
    def name(self) -> str:
        return self._name

    @property
    def chunk_bytes(self) -> int:
        """The store's."""
        return self._store.chunk_bytes

    @property
    def directory(self) -> Path:
        """A local directory of its own, gone after commit or abort."""
        with self._lock:
            return self._session.work_directory

    @property
    def cpu_directory(self) -> Path:
        """What CRIU writes into, and `commit` takes its files from: `directory / "cpu"` unless set to another place,
        which the caller owns. Not made here."""
        return self._cpu_directory or self.directory / CPU

    @cpu_directory.setter
    def cpu_directory(self, path: Path) -> None:
        self._cpu_directory = path

    def lacking(self, digests: bytes) -> bytes:
        """The positions (packed u32) of those of these whole chunks that the store lacks."""
        with self._lock:
            return self._session.missing(digests)

    def lacking_gpu(self, digests: Sequence[bytes], cuts: Sequence[chunks.Cut]) -> array[int]:
        """Which of these chunks (of the parts' handles, part after part) the store lacks, as ascending positions
        through all parts."""
        cut = chunks.Cut([size for part in cuts for size in part.piece_sizes], self.chunk_bytes)
        with self._lock:
            return chunks.positions_of(self._session.missing(b"".join(digests), chunks.packed(cut.sizes)))

    def survey_gpu(self, digests: Sequence[bytes], cuts: Sequence[chunks.Cut]) -> tuple[array[int], Amounts]:
        """As `lacking_gpu`, and how many bytes are what, for the image. Once an image."""
        positions = self.lacking_gpu(digests, cuts)
        cut = chunks.Cut([size for part in cuts for size in part.piece_sizes], self.chunk_bytes)
        amounts = chunks.amounts(b"".join(digests), cut, positions)
        self._gpu = msgspec.structs.replace(amounts, stored=self._gpu.stored)
        return positions, self._gpu

    def count_ahead(self, digests: bytes, sizes: array[int]) -> None:
        """These chunks were stored before the survey: they count as new if the image names them."""
        self._ahead.append((digests, sizes))

    def write_gpu(self, table: bytes, sources: Sequence[Arena | int], progress: Progress | None = None) -> None:
        """Store chunks (image.chunks.chunk_table), each compared with its digest on the way. NoSpaceError aborts."""
        with self._lock, full_is_told(self._store):
            before = self._session.stored_bytes
            self._session.write(
                table, sources, compress=self._compress, level=self._level, threads=self.threads, progress=progress
            )
            stored = self._gpu.stored + self._session.stored_bytes - before
            self._gpu = msgspec.structs.replace(self._gpu, stored=stored)

    def commit(
        self,
        manifest: Manifest,
        progress: OnProgress | None = None,
        cuts: Mapping[str, tuple[bytes, int]] | None = None,
        mapped: Sequence[MappedFile] = (),
    ) -> Committed:
        """Store CRIU's files, then make the image complete, durable and visible, in this order; `name`, `number`,
        `cpu.files` and `stats` of the manifest are filled in. `cuts`: for some of the files the sizes of their chunks
        (packed u32; at most `chunk_bytes` each, making up the file) and whose memory they are (0: no one process's).
        `mapped`: files beside CRIU's; MappedFileChangedError when one of them is not what it was. NoSpaceError when the
        store is full, BadImageError when the manifest contradicts itself or the files: then the writer has been
        aborted."""
        try:
            with self._lock, full_is_told(self._store):
                manifest = self._with_cpu_files(manifest, progress, cuts or {}, mapped)
                written = manifest

                def encode(number: int) -> bytes:
                    nonlocal written
                    written = msgspec.structs.replace(manifest, name=self._name, number=number)
                    return codec.encode(written)

                reference = self._session.publish(self._name, encode, digests=chunks.named_by(manifest))
        except BaseException:
            self.abort()
            raise
        return Committed(reference, layout.place(self._store.url, reference), written)

    def abort(self) -> None:
        """Drop what no other image needs, as far as it is not durable yet, and the directory. Does nothing after commit
        or a first abort."""
        with self._lock:
            self._session.abort()

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _with_cpu_files(
        self,
        manifest: Manifest,
        progress: OnProgress | None,
        cuts: Mapping[str, tuple[bytes, int]],
        mapped: Sequence[MappedFile],
    ) -> Manifest:
        folder = self._cpu_directory or self._session.work_directory / CPU
        found = list(layout.plain_files(folder)) if folder.is_dir() else []
        self._add_ahead(manifest)
        if manifest.cpu is None:
            if found:
                raise BadImageError(f"there are files of CRIU ({found[0][0]}, …) and the manifest has no CPU side")
            return msgspec.structs.replace(manifest, stats=Stats(gpu=self._gpu))
        records: list[FileRecord] = []
        amounts = Amounts()
        # Each byte is read twice, to be hashed and, where it is new, to be stored.
        with told(progress, sum(size for _, size in found) + sum(one.size_bytes for one in mapped)) as native:
            for begin in range(0, len(found), FILES_AT_ONCE):
                written, of_these = self._store_files(folder, found[begin : begin + FILES_AT_ONCE], native, cuts)
                records += written
                amounts = added(amounts, of_these)
            if mapped:
                written, of_these = self._store_mapped(mapped, native)
                records += written
                amounts = added(amounts, of_these)
        cpu = msgspec.structs.replace(manifest.cpu, files=records)
        return msgspec.structs.replace(manifest, cpu=cpu, stats=Stats(gpu=self._gpu, cpu=amounts))

    def _add_ahead(self, manifest: Manifest) -> None:
        ahead, self._ahead = self._ahead, []
        if ahead:
            new = chunks.bytes_named(manifest, ahead)
            self._gpu = msgspec.structs.replace(self._gpu, known=self._gpu.known - new, new=self._gpu.new + new)

    def _store_files(
        self,
        folder: Path,
        files: Sequence[tuple[str, int]],
        progress: Progress,
        cuts: Mapping[str, tuple[bytes, int]],
    ) -> tuple[list[FileRecord], Amounts]:
        """Hash these files, store what is new of them."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptors: list[int] = []
        try:
            descriptors.extend(os.open(folder / path, flags) for path, _ in files)
            return self._store_open(descriptors, files, progress, cuts)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _store_mapped(self, mapped: Sequence[MappedFile], progress: Progress) -> tuple[list[FileRecord], Amounts]:
        files = [(one.path, one.size_bytes) for one in mapped]
        begins = [one.offset for one in mapped]
        records, amounts = self._store_open([one.descriptor for one in mapped], files, progress, {}, begins)
        for one, record in zip(mapped, records, strict=True):
            if one.digests and one.digests != record.digests:
                raise MappedFileChangedError(
                    f"the driver's saved state of process {one.pid} changed after the checkpoint was made",
                    advice="no image was written; the next checkpoint has it saved by CRIU instead",
                    pid=one.pid,
                )
        return [
            msgspec.structs.replace(record, pid=one.pid, mapped_as=one.mapped_as, lent_from=one.lent_from)
            for one, record in zip(mapped, records, strict=True)
        ], amounts

    def _store_open(
        self,
        descriptors: Sequence[int],
        files: Sequence[tuple[str, int]],
        progress: Progress,
        cuts: Mapping[str, tuple[bytes, int]],
        begins: Sequence[int] = (),
    ) -> tuple[list[FileRecord], Amounts]:
        """`begins`: where in their descriptors the files begin (none: all at 0)."""
        from woodfrog._native import transfer

        begins = begins or [0] * len(files)
        pieces = [(fd, begin, size) for fd, begin, (_, size) in zip(descriptors, begins, files, strict=True)]
        of_files = [cuts.get(path, (b"", 0)) for path, _ in files]
        own = {number: sizes for number, (sizes, _) in enumerate(of_files) if sizes}
        cut = chunks.Cut([size for _, size in files], self.chunk_bytes, own)
        digests = transfer.hash_pieces(
            [piece for piece in pieces if piece[2]],
            chunk_bytes=self.chunk_bytes,
            sizes=chunks.packed(cut.sizes),
            threads=self.threads,
            progress=progress,
        )
        new = chunks.positions_of(self._session.missing(digests, chunks.packed(cut.sizes)))
        offsets, of_piece = cut.offsets(), cut.pieces()
        table = chunks.chunk_table(
            chunks.select_digests(digests, new),
            array("Q", [offsets[at] + begins[of_piece[at]] for at in new]),
            chunks.select(cut.sizes, new),
            chunks.select(of_piece, new),
        )
        before = self._session.stored_bytes
        if new:
            self._session.write(table, descriptors, compress=self._compress, level=self._level, threads=self.threads)
        amounts = chunks.amounts(digests, cut, new)
        records = [
            FileRecord(path=path, size_bytes=size, digests=chunks.digests_of(digests, first, end), sizes=sizes, pid=pid)
            for (path, size), (sizes, pid), first, end in zip(files, of_files, cut.first, cut.first[1:], strict=False)
        ]
        return records, msgspec.structs.replace(amounts, stored=self._session.stored_bytes - before)


def full_is_told(store: Store) -> AbstractContextManager[None]:
    """Within it, a full disk that a system call reports is a NoSpaceError."""
    return nullcontext() if store.path is None else space.telling_full(store.path)


def parse_compression(text: str) -> tuple[str, int]:
    """(method, level) of `auto`, `none`, `lz4`, `zstd` or `zstd:LEVEL`; level 0 is the method's own. UsageError."""
    method, colon, level = text.partition(":")
    if method in COMPRESSIONS and not colon:
        return method, 0
    if method == "zstd" and level.isascii() and level.isdigit() and 1 <= int(level) <= MAX_ZSTD_LEVEL:
        return method, int(level)
    raise UsageError(
        f"there is no compression {text!r}", advice=f"auto, none, lz4, zstd, or zstd:1 to zstd:{MAX_ZSTD_LEVEL}"
    )


def added(first: Amounts, second: Amounts) -> Amounts:
    """The sum of two, field by field."""
    return Amounts(**{name: getattr(first, name) + getattr(second, name) for name in Amounts.__struct_fields__})
