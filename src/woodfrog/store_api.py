"""The public API for whole stores and between images: each function does what the verb of the same name does.

None needs the daemon. A store is given as a directory, `ram:NAME` or `s3://BUCKET/PREFIX` (None: the default one). It
must never print. Every failure is a WoodfrogError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from woodfrog import api
from woodfrog.api import OnEvent, StorePath
from woodfrog.errors import NotFoundError, UsageError, WoodfrogError
from woodfrog.image.diff import ImageDiff
from woodfrog.image.diff import diff as manifest_diff
from woodfrog.image.layout import split_reference
from woodfrog.image.picture import Picture
from woodfrog.image.picture import picture as manifest_picture
from woodfrog.image.progress import OnProgress
from woodfrog.image.repository import ImageRepository
from woodfrog.store.copying import CopyResult
from woodfrog.store.open import default_place
from woodfrog.store.prune import PrunePlan
from woodfrog.store.repair import RepairReport
from woodfrog.store.retention import RetentionPlan
from woodfrog.store.verify import Problem

__all__ = ["PruneResult", "copy", "diff", "picture", "prune", "pull", "push", "repair", "verify_store"]


@dataclass(frozen=True)
class PruneResult:
    """What was (`dry_run`: would be) done: images that the rules let go, with the reasons of those that stay, then the
    packs. `errors`: what went wrong with the removal of which image."""

    dry_run: bool
    plan: PrunePlan
    retention: RetentionPlan | None = None
    removed: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        kept = self.retention.keep if self.retention is not None else []
        actions = ("keep", "rewrite", "delete")
        return {
            "dry_run": self.dry_run,
            "removed": self.removed,
            "kept": {one.entry.reference: one.reason for one in kept},
            "errors": self.errors,
            "images": self.plan.images - (len(self.removed) if self.dry_run else 0),
            "size_bytes": self.plan.size_bytes,
            "freed_bytes": self.plan.freed_bytes,
            "packs": {action: sum(1 for pack in self.plan.packs if pack.action == action) for action in actions},
            "notes": self.plan.notes,
        }


def prune(
    *,
    store: StorePath = None,
    dry_run: bool = False,
    grace_s: float | None = None,
    keep_last: int | None = None,
    keep_within_s: float | None = None,
    name: str | None = None,
    on_event: OnEvent | None = None,
) -> PruneResult:
    """Remove the images (of `name`, else of every name) that neither `keep_last` nor `keep_within_s` keeps, when one of
    them is given; then delete the chunks that no image names. Packs younger than `grace_s` stay (None: the store's own
    grace). With `dry_run` nothing is removed, and the plan is that of a store without those images."""
    if name is not None and keep_last is None and keep_within_s is None:
        raise UsageError("a name says which images the rules are for, and there is no rule", advice="add --keep-last")
    with _opened(store) as repository:
        retention = None
        if keep_last is not None or keep_within_s is not None:
            retention = repository.plan_retention(keep_last=keep_last, keep_within_s=keep_within_s, name=name)
        going = [entry.reference for entry in retention.remove] if retention is not None else []
        errors = {} if dry_run else _remove(going, repository.url)
        left = set() if dry_run else {entry.reference for entry in repository.store.list(name)}
        removed = [reference for reference in going if reference not in left]
        plan = repository.prune(
            dry_run=dry_run,
            grace_s=grace_s,
            without=set(removed) if dry_run else (),
            on_progress=_events("prune", on_event),
        )
    return PruneResult(dry_run, plan, retention, removed, errors)


def repair(*, store: StorePath = None, on_event: OnEvent | None = None) -> RepairReport:
    """Rebuild the index from the packs and save what can be saved of damaged ones. Deletes no image and no intact
    chunk; which images are still incomplete afterwards is in the report."""
    with _opened(store) as repository:
        return repository.repair(on_progress=_events("repair", on_event))


def verify_store(*, store: StorePath = None, sample: float = 1.0, on_event: OnEvent | None = None) -> list[Problem]:
    """Everything that is wrong with a store: packs, indexes, manifests, images that lack chunks. `sample`: the fraction
    (0 to 1) of the chunks whose bytes are read and compared."""
    if not 0 <= sample <= 1:
        raise UsageError(f"a sample of {sample} is no fraction", advice="give a number from 0 to 1")
    with _opened(store) as repository:
        return repository.verify(sample=sample, on_progress=_events("verify", on_event))


def copy(
    image: str,
    to: str | os.PathLike[str],
    *,
    store: StorePath = None,
    name: str | None = None,
    compress: str = "auto",
    on_event: OnEvent | None = None,
) -> CopyResult:
    """Copy an image (NAME@NUMBER or NAME in `store`, or STORE/ before either) into the store `to`, which is made if it
    is not there. Only chunks that are absent there are moved. It keeps its name and number; with `name` it gets the
    next number of that name."""
    inside, reference = split_reference(image)
    if inside is not None and store is not None:
        raise UsageError(f"{image!r} names a store, and another one is given", advice="give the store once")
    with (
        _opened(store if inside is None else inside) as source,
        _destination(os.fspath(to), source.chunk_bytes) as target,
    ):
        bar = _events("copy", on_event)
        return source.copy(reference, target, name=name, compress=compress, on_progress=bar)


def push(
    image: str,
    to: str | os.PathLike[str],
    *,
    store: StorePath = None,
    compress: str = "auto",
    on_event: OnEvent | None = None,
) -> CopyResult:
    """Copy an image of `store` (None: the default one) into the store `to`."""
    return copy(image, to, store=store, compress=compress, on_event=on_event)


def pull(
    image: str,
    source: str | os.PathLike[str],
    *,
    store: StorePath = None,
    compress: str = "auto",
    on_event: OnEvent | None = None,
) -> CopyResult:
    """Copy an image of the store `source` into `store` (None: the default one)."""
    to = default_place() if store is None else os.fspath(store)
    return copy(image, to, store=source, compress=compress, on_event=on_event)


def diff(before: str, after: str, *, store: StorePath = None) -> ImageDiff:
    """What changed from one image to another, by their manifests alone; they may be in different stores."""
    return manifest_diff(_manifest(before, store), _manifest(after, store))


def picture(image: str, *, store: StorePath = None) -> Picture:
    """Which ranges of an image other images of its store share, which are its own and which are zeros. Reads every
    manifest of the store; those that cannot be read count as sharing nothing."""
    with api.open_image(image, store=store) as opened:
        manifest = opened.manifest
    inside, _ = split_reference(image)
    with _opened(store if inside is None else inside) as repository:

        def others() -> Iterator[bytes]:
            for entry in repository.store.list():
                if entry.reference == manifest.reference:
                    continue
                try:
                    other = repository.manifest(entry.reference)
                except (WoodfrogError, OSError):  # damaged or removed meanwhile: `images` and `verify` tell of it
                    continue
                yield other.all_digests()

        return manifest_picture(manifest, others())


def _manifest(image: str, store: StorePath) -> Any:
    with api.open_image(image, store=store) as opened:
        return opened.manifest


def _remove(going: Iterable[str], place: str) -> dict[str, str]:
    """Remove images one by one, with the links that they left; those that could not be, and why."""
    errors: dict[str, str] = {}
    for reference in sorted(going):
        try:
            api.rm(reference, store=place)
        except NotFoundError:
            continue  # somebody else was quicker
        except WoodfrogError as error:
            errors[reference] = error.reason
    return errors


@contextmanager
def _opened(store: StorePath) -> Iterator[ImageRepository]:
    with ImageRepository(store, create=False) as repository:
        yield repository


@contextmanager
def _destination(place: str, chunk_bytes: int) -> Iterator[ImageRepository]:
    """The store that a copy goes into; a new one gets the chunk size of the one that it comes from."""
    try:
        repository = ImageRepository(place, create=False)
    except NotFoundError:
        repository = ImageRepository(place, chunk_bytes=chunk_bytes)
    with repository:
        yield repository


def _events(phase: str, on_event: OnEvent | None) -> OnProgress | None:
    """The events of one phase that moves bytes, as the daemon's operations send them."""
    if on_event is None:
        return None
    begun_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        seconds = time.monotonic() - begun_s
        on_event({"event": "progress", "phase": phase, "bytes_done": done, "bytes_total": total, "seconds": seconds})

    return progress
