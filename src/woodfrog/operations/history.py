"""Which image of a target came last, and how much was new in it: the next one's `parent`, and how large that may be.

Kept in the daemon's memory by the target's identity; after a restart the store is asked. Wrong guesses cost time or
room, never data: an operation must work with any answer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError
from woodfrog.image.manifest import Manifest
from woodfrog.image.repository import ImageRepository
from woodfrog.operations.notes import HandleNote
from woodfrog.target.identity import Identity
from woodfrog.target.pid_namespace import inner_number

if TYPE_CHECKING:
    from woodfrog.operations.survey import Surveyed

# Targets seldom change more than a quarter more than the last time; beyond it the arena is asked again.
SLACK = 1.25
SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class LastImage:
    """The newest image of a target in one store."""

    reference: str
    new_bytes: int  # of GPU memory: what the store lacked then
    cpu_new_bytes: int = 0  # of CRIU's files, likewise


class History:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[int, int, str], LastImage] = {}  # by pid, start ticks, the store's URL

    def record(self, pid: int, start_ticks: int, store_url: str, last: LastImage) -> None:
        """This image is the newest of that target now."""
        with self._lock:
            gone = [key for key in self._last if not Identity(key[0], key[1]).is_alive()]
            for key in gone:
                del self._last[key]
            self._last[pid, start_ticks, store_url] = last

    def last(self, surveyed: Surveyed, images: ImageRepository, name: str) -> LastImage | None:
        """The target's newest image in that store, None for its first one there."""
        with self._lock:
            known = self._last.get((surveyed.pid, surveyed.start_ticks, images.url))
        return known or _look(surveyed, images, name)


def estimate_bytes(owned_bytes: int, last: LastImage | None) -> int:
    """How much of a target's memory will be new to the store: all of it for a first image."""
    if last is None:
        return owned_bytes
    return min(owned_bytes, with_slack(last.new_bytes))


def estimate_cpu_bytes(files_bytes: int, last: LastImage | None) -> int:
    """How much of CRIU's files, which have `files_bytes`, will be new to the store: all of them for a first image, and
    after one without a CPU side."""
    if last is None or not last.cpu_new_bytes:
        return files_bytes
    return min(files_bytes, with_slack(last.cpu_new_bytes))


def with_slack(new_bytes: int) -> int:
    """What to be ready for, where so much was new the last time."""
    return int(new_bytes * SLACK) + SLACK_BYTES


def _look(surveyed: Surveyed, images: ImageRepository, name: str) -> LastImage | None:
    """The newest image of that name, if it is of this very process."""
    entries = images.store.list(name)
    if not entries:
        return None
    try:
        manifest = images.manifest(entries[-1].reference)
    except WoodfrogError:
        return None  # damaged or just removed; whoever lists the images hears of it
    if not _is_of(manifest, surveyed):
        return None
    return LastImage(entries[-1].reference, manifest.stats.gpu.new, manifest.stats.cpu.new)


def _is_of(manifest: Manifest, surveyed: Surveyed) -> bool:
    pid = inner_number(surveyed.pid)
    return manifest.gpu_pid == pid and any(
        process.pid == pid and process.start_ticks == surveyed.start_ticks for process in manifest.processes
    )


@dataclass(frozen=True)
class Baseline:
    """The last committed image of a target: `digests` of all its handles' chunks, in the order of `handles`."""

    operation: int
    chunk_bytes: int
    handles: tuple[HandleNote, ...]
    digests: bytes = field(repr=False)


class Baselines:
    """The baseline of each living target. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Identity, Baseline] = {}

    def get(self, target: Identity) -> Baseline | None:
        with self._lock:
            return self._known.get(target)

    def set(self, target: Identity, baseline: Baseline) -> None:
        with self._lock:
            self._known = {identity: one for identity, one in self._known.items() if identity.is_alive()}
            self._known[target] = baseline

    def forget(self, target: Identity) -> None:
        """What the target's memory holds has come about in another way than by its launches, or is doubted."""
        with self._lock:
            self._known.pop(target, None)
