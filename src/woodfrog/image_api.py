"""The verbs that read a store themselves, without a daemon; woodfrog.api offers them with the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from woodfrog.cpu import files as cpu_files
from woodfrog.errors import BadImageError, NotFoundError, UsageError, WoodfrogError
from woodfrog.image import inspect as image_inspect
from woodfrog.image.image import Image
from woodfrog.image.layout import split_reference
from woodfrog.image.repository import ImageRepository
from woodfrog.results import ImageInfo, VerifyResult
from woodfrog.store.open import default_place

OnEvent = Callable[[dict[str, Any]], None]
StorePath = str | os.PathLike[str] | None


def images(name: str | None = None, *, store: StorePath = None) -> list[ImageInfo]:
    """The images of a store, damaged ones with their reason."""
    try:
        with _open_store(store) as repository:
            entries = repository.list(name)
    except NotFoundError:
        if store is None:
            return []  # nothing was ever written
        raise
    found: list[ImageInfo] = []
    for entry in entries:
        if entry.manifest is None:
            reason = entry.error.reason if entry.error is not None else "unreadable"
            found.append(ImageInfo(entry.reference, entry.name, entry.number, entry.path, error=reason))
            continue
        manifest = entry.manifest
        found.append(
            ImageInfo(
                entry.reference,
                entry.name,
                entry.number,
                entry.path,
                kind=manifest.kind,
                created_unix_s=manifest.created_unix_s,
                gpu_bytes=manifest.gpu_bytes,
                cpu_bytes=manifest.cpu_bytes,
                leave_running=manifest.leave_running,
                target_name=manifest.target_name,
                parent=manifest.parent or "",
                new_bytes=manifest.stats.gpu.new + manifest.stats.cpu.new,
                stored_bytes=manifest.stats.gpu.stored + manifest.stats.cpu.stored,
            )
        )
    return found


def open_image(reference: str, *, store: StorePath = None) -> Image:
    """The image itself, for a closer look. The caller closes it; until then it cannot be removed."""
    store, reference = place_of(reference, store)
    repository = _open_store(store)
    try:
        return repository.open(reference).then(repository.close)
    except BaseException:
        repository.close()
        raise


def inspect(reference: str, *, store: StorePath = None) -> dict[str, Any]:
    """What an image is: its manifest without chunk digests and allocation rows, as JSON-able values."""
    with open_image(reference, store=store) as image:
        return {**image_inspect.summary(image.manifest), "path": image.path}


def verify(reference: str, *, store: StorePath = None, on_event: OnEvent | None = None) -> VerifyResult:
    """Hash every chunk of an image. BadImageError (details: every problem) unless all have their digests."""
    begun = time.monotonic()

    def progress(done: int, total: int) -> None:
        if on_event is not None:
            seconds = time.monotonic() - begun
            on_event(
                {"event": "progress", "phase": "verify", "bytes_done": done, "bytes_total": total, "seconds": seconds}
            )

    with open_image(reference, store=store) as image:
        problems = image.verify(progress)
        if problems:
            raise BadImageError(
                f"{image.reference} is damaged: {problems[0]}"
                + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
                advice="use another image",
                details={"problems": [{"path": p.path, "what": p.what, "chunk": p.chunk} for p in problems]},
            )
        return VerifyResult(image.reference, image.size_bytes, time.monotonic() - begun)


def rm(reference: str, *, store: StorePath = None) -> str:
    """Remove one image for good, and the hard links that its CPU side left beside the target's files; returns its full
    reference. An error about the links comes after the image is gone, and says so."""
    store, reference = place_of(reference, store)
    with _open_store(store) as repository:
        return repository.remove(reference, _remove_links, files=cpu_files.LINK_FILES)


def store_text(store: StorePath) -> str:
    """How a store is named to the daemon."""
    # Absolute and explicit: the daemon's environment and working directory are others than ours.
    place = default_place() if store is None else os.fspath(store)
    return place if place.startswith(("ram:", "s3://")) else str(Path(place.removeprefix("file://")).absolute())


def place_of(image: str, store: StorePath) -> tuple[StorePath, str]:
    """The store and the reference in it of an image that may be written STORE/NAME@NUMBER."""
    inside, reference = split_reference(image)
    if inside is not None and store is not None:
        raise UsageError(f"{image!r} names a store, and another one is given", advice="give the store once")
    return (store if inside is None else inside), reference


def _open_store(store: StorePath) -> ImageRepository:
    return ImageRepository(store_text(store), create=False)  # looking for something must not make it


def _remove_links(cpu_directory: Path) -> None:
    """For an image that is being removed: its name is gone already, whatever happens here."""
    try:
        cpu_files.remove_links(cpu_directory)
    except (WoodfrogError, OSError) as error:
        raise WoodfrogError(
            f"the image is removed, but not the links that it may have left beside the target's files: {error}",
            advice="if there are files link_remap.N of no other image in the directories of those files, remove them",
        ) from error
