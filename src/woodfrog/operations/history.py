"""Which image of a target came last, and how much was new in it: the next one's `parent`, and how large that may be.

Kept in the daemon's memory by the target's identity; after a restart the store is asked. Wrong guesses cost time or
room, never data: an operation must work with any answer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError
from woodfrog.image.manifest import Manifest
from woodfrog.image.repository import ImageRepository
from woodfrog.target.identity import Identity

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
    return LastImage(entries[-1].reference, manifest.stats.gpu.new)


def _is_of(manifest: Manifest, surveyed: Surveyed) -> bool:
    return manifest.gpu_pid == surveyed.pid and any(
        process.pid == surveyed.pid and process.start_ticks == surveyed.start_ticks for process in manifest.processes
    )
