"""A store's images: the manifests in it decoded, and what is done with whole images.

Joins the store, which knows nothing of what is in a manifest, and the image, which knows nothing of other images. It
must never decide where or in which order something is written or deleted: the store does.
"""

from __future__ import annotations

import builtins
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from woodfrog.errors import BadImageError, NotFoundError, UsageError, WoodfrogError
from woodfrog.image import chunks, codec, layout
from woodfrog.image.image import Image
from woodfrog.image.manifest import Manifest
from woodfrog.image.progress import OnProgress, told
from woodfrog.image.writer import ImageWriter, full_is_told, parse_compression
from woodfrog.store import copying, prune, repair, retention, verify
from woodfrog.store.open import open_store
from woodfrog.store.store import Store


@dataclass(frozen=True)
class ImageEntry:
    """One image in a listing. Exactly one of `manifest` and `error` is set: a damaged image is listed, not hidden."""

    reference: str
    name: str
    number: int
    path: str
    manifest: Manifest | None = None
    error: WoodfrogError | None = None


class ImageRepository:
    """The images of a store; `woodfrog.Store` is this class. References are NAME@NUMBER, or NAME for the newest of that
    name. As safe as the store to use from several threads and processes."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        chunk_bytes: int | None = None,
    ) -> None:
        """Of that store, which it takes over; else of the one at that path, `ram:NAME` or `s3://…` (None: the default
        one), as `woodfrog.store.open.open_store` opens it."""
        self.store = store if isinstance(store, Store) else open_store(store, create=create, chunk_bytes=chunk_bytes)

    @property
    def url(self) -> str:
        """What opens the store again."""
        return self.store.url

    @property
    def path(self) -> Path | None:
        """The store's directory, or None for a remote one."""
        return self.store.path

    @property
    def chunk_bytes(self) -> int:
        return self.store.chunk_bytes

    # ── images ──────────────────────────────────────────────────────────────────────────────────────────────────

    def next_number(self, name: str) -> int:
        """The number that the next image of that name would get now. Numbers rise and are never used again."""
        return self.store.next_number(name)

    def list(self, name: str | None = None) -> builtins.list[ImageEntry]:
        """All images (of that name), by name and number. Never fails because of a damaged image."""
        entries = []
        for found in self.store.list(name):
            manifest = error = None
            try:
                manifest = self.manifest(found.reference)
            except NotFoundError:
                continue  # removed meanwhile
            except WoodfrogError as problem:
                error = problem
            except OSError as problem:
                error = BadImageError(f"{found.reference} cannot be read: {problem.strerror}")
            path = layout.place(self.store.url, found.reference)
            entries.append(ImageEntry(found.reference, found.name, found.number, path, manifest, error))
        return entries

    def manifest(self, reference: str) -> Manifest:
        """What the image is, without holding it."""
        with self.store.read(reference, hold=False) as opened, Image.decode(self.store, opened) as image:
            return image.manifest

    def open(self, reference: str) -> Image:
        """The image, which the caller closes; until then nothing of it can be removed. NotFoundError, BadImageError."""
        return Image.decode(self.store, self.store.read(reference))

    def begin(self, name: str, *, compress: str = "auto") -> ImageWriter:
        """Start writing the next image of that name. `compress`: auto, none, lz4, zstd or zstd:LEVEL. UsageError."""
        parse_compression(compress)
        self.store.next_number(name)  # a bad name is told before anything is written
        with full_is_told(self.store):
            return ImageWriter(self.store, self.store.session(), name, compress)

    def remove(
        self,
        reference: str,
        before_delete: Callable[[Path], None] | None = None,
        *,
        files: Collection[str] = (),
    ) -> str:
        """Remove one image (a bare name: UsageError, unless it has just one) and return its full reference; one that
        is damaged too. RefusedError while the store is in use. Its chunks go with the next `prune`.

        `before_delete`, for an image of a target that was stopped, gets a directory with those of `files` that CRIU
        wrote, when the image can no longer be seen. What it raises, and why the files could not be had, is raised once
        the image is gone; any other failure leaves the image whole."""
        if before_delete is None:
            return self.store.remove(reference)
        with tempfile.TemporaryDirectory(prefix="woodfrog-") as scratch:
            problem: WoodfrogError | None = None
            left_links = True
            try:
                with self.open(reference) as image:
                    # A target that ran on needed its links itself: CRIU removed them.
                    left_links = image.manifest.cpu is not None and not image.manifest.leave_running
                    if left_links:
                        image.extract_cpu(Path(scratch), only=files)
            except BadImageError as error:
                problem = error
            removed = self.store.remove(reference)
            if problem is not None:
                raise WoodfrogError(
                    f"the image is removed, but not the links that it may have left beside the target's files, which "
                    f"cannot be known any more: {problem.reason}",
                    advice="files link_remap.N of no other image in the directories of those files can be removed",
                    details={"image": removed},
                ) from problem
            if left_links:
                before_delete(Path(scratch))
        return removed

    # ── the store ───────────────────────────────────────────────────────────────────────────────────────────────

    def prune(
        self,
        *,
        dry_run: bool = False,
        grace_s: float | None = None,
        without: Collection[str] = (),
        on_progress: OnProgress | None = None,
    ) -> prune.PrunePlan:
        """Delete the chunks that no image names (those of packs younger than `grace_s` stay; None: the store's own
        grace); with `dry_run` only say what would go, as if the images `without` were gone. RefusedError while the
        store is in use; BadImageError, with nothing deleted, when a manifest cannot be read."""
        if without and not dry_run:
            raise UsageError("images are left out of a dry run only", advice="remove them first")

        def staying(data: bytes) -> Iterable[tuple[bytes, bytes]]:
            return () if without and codec.decode(data).reference in without else chunks_of(data)

        with told(on_progress, 0) as progress:
            return self.store.prune(staying, dry_run=dry_run, grace_s=grace_s, progress=progress)

    def verify(self, *, sample: float = 1.0, on_progress: OnProgress | None = None) -> builtins.list[verify.Problem]:
        """What is wrong with the store: packs, indexes, images that lack chunks. `sample`: the fraction of chunks whose
        bytes are read and compared."""
        with told(on_progress, 0) as progress:
            return self.store.verify(chunks_of, sample=sample, progress=progress)

    def repair(self, *, on_progress: OnProgress | None = None) -> repair.RepairReport:
        """Rebuild the index from the packs and save what can be saved of damaged ones."""
        with told(on_progress, 0) as progress:
            return self.store.repair(chunks_of, progress=progress)

    def copy(
        self,
        reference: str,
        to: ImageRepository,
        *,
        name: str | None = None,
        compress: str = "auto",
        on_progress: OnProgress | None = None,
    ) -> copying.CopyResult:
        """Copy one image into another store, of which only what is absent there is moved. It keeps its name and number;
        with `name` it gets the next number of that name. RefusedError when that number is another image there."""
        method, level = parse_compression(compress)
        with told(on_progress, 0) as progress:
            return self.store.copy_image(
                reference,
                to.store,
                chunks_of,
                name=name,
                rename=renamed,
                compress=method,
                level=level,
                progress=progress,
            )

    def plan_retention(
        self, *, keep_last: int | None = None, keep_within_s: float | None = None, name: str | None = None
    ) -> retention.RetentionPlan:
        """Which images (of that name) go when the newest `keep_last` of each name and those younger than
        `keep_within_s` stay; nothing is removed."""
        return self.store.plan_retention(retention.Policy(keep_last=keep_last, keep_within_s=keep_within_s), name)

    def apply_retention(self, plan: retention.RetentionPlan) -> builtins.list[str]:
        """Remove what the plan lets go; the references. Links that CRIU left elsewhere stay: remove images of stopped
        targets one by one where that matters."""
        return self.store.apply_retention(plan)

    def require(self, size_bytes: int, what: str, *, work_bytes: int = 0) -> None:
        """NoSpaceError unless that much more fits; see Store.require."""
        self.store.require(size_bytes, what, work_bytes=work_bytes)

    def is_current(self) -> bool:
        """Whether the store's path still leads to the place that it has open."""
        return self.store.is_current()

    def close(self) -> None:
        """Close the store; writers and images must have ended."""
        self.store.close()

    def __enter__(self) -> ImageRepository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chunks_of(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What a manifest's bytes name, as the store asks (chunks.named_by). BadImageError for one that cannot be read."""
    yield from chunks.named_by(codec.decode(data))


def renamed(data: bytes, name: str, number: int) -> bytes:
    """The same manifest under another name and number."""
    return codec.encode(msgspec.structs.replace(codec.decode(data), name=name, number=number))
