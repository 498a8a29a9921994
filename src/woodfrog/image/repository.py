"""A place with images: a store's numbered directories, each with a manifest in it.

Joins the store, which knows nothing of manifests, and the image, which knows nothing of numbers. It must never decide
where or in which order something is written: the store does.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from woodfrog.errors import BadImageError, NotFoundError, WoodfrogError
from woodfrog.image import layout
from woodfrog.image.image import Image
from woodfrog.image.manifest import Manifest
from woodfrog.image.writer import ImageWriter
from woodfrog.store.disk import DiskStore
from woodfrog.store.protocol import Store


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
    """The images of a store. References are NAME@NUMBER, or NAME for the newest of that name. As safe as the store to
    use from several threads and processes."""

    def __init__(self, store: Store | str | os.PathLike[str] | None = None) -> None:
        """Of that store, which it takes over; else of the DiskStore at that path, None being the default one."""
        self.store: Store = DiskStore(store) if store is None or isinstance(store, (str, os.PathLike)) else store

    @property
    def path(self) -> Path:
        return self.store.path

    def next_number(self, name: str) -> int:
        """The number that `begin(name)` would give now. Numbers rise and are never used again."""
        return self.store.next_number(name)

    def list(self, name: str | None = None) -> builtins.list[ImageEntry]:
        """All images (of that name), by name and number. Never fails because of a damaged image."""
        entries = []
        for found in self.store.list(name):
            manifest = error = None
            try:
                with self._open(found.reference, hold=False) as image:
                    manifest = image.manifest
            except NotFoundError:
                continue  # removed meanwhile
            except WoodfrogError as problem:
                error = problem
            except OSError as problem:
                error = BadImageError(f"{found.reference} cannot be read: {problem.strerror}")
            entries.append(ImageEntry(found.reference, found.name, found.number, str(found.path), manifest, error))
        return entries

    def open(self, reference: str) -> Image:
        """The image, which the caller closes; until then it cannot be removed. Also opens an image outside the store:
        anything with a '/' is taken as its directory's path. NotFoundError, BadImageError, RefusedError."""
        return Image.open(reference) if "/" in reference else self._open(reference)

    def remove(self, reference: str, before_delete: Callable[[Path], None] | None = None) -> str:
        """Remove one image (a bare name: UsageError, unless it has just one) and return its full reference; one that
        is damaged too. RefusedError while it is open.

        `before_delete` gets the directory that its CPU side may be in, when the image can no longer be seen and its
        files are still there. What it raises is raised when they are deleted as well; any other failure leaves the
        image whole."""
        if before_delete is None:
            return self.store.remove(reference)
        hook = before_delete
        return self.store.remove(reference, lambda directory: hook(directory / layout.CPU))

    def begin(self, name: str) -> ImageWriter:
        """Start writing the next image of that name. UsageError for a bad name."""
        return ImageWriter(self.store.begin(name, [layout.CPU]), self._open)

    def free_bytes(self) -> int:
        """What can still be written, as far as is known."""
        return self.store.free_bytes()

    def is_current(self) -> bool:
        """Whether the store's path still leads to the place that it has open."""
        return self.store.is_current()

    def close(self) -> None:
        """Close the store; writers and images that are open go on by their own."""
        self.store.close()

    def _open(self, reference: str, *, hold: bool = True) -> Image:
        found = self.store.open(reference, hold=hold)
        return Image.in_directory(found.path, found.dir_fd)
