"""What a checkpoint is asked for, and what its survey makes of that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from woodfrog.errors import NoSpaceError
from woodfrog.operations import concurrent, history, room
from woodfrog.operations.history import LastImage
from woodfrog.operations.survey import Surveyed

if TYPE_CHECKING:
    from woodfrog.image.repository import ImageRepository
    from woodfrog.operations.context import Context


@dataclass(frozen=True)
class CheckpointRequest:
    """What was asked for. `store` is a path or URL, or empty for the default one; `name` empty: the target's own.
    Without `incremental` all memory crosses the bus and is compared; what is stored is the same. With `check_clean`
    what a target's followed launches cannot have written is hashed all the same, and a difference is an error.
    `concurrent`: how a target that runs on is spared the wait for its data (operations/concurrent.py). `precopy`:
    rounds of copies before it comes to rest (operations/precopy.py)."""

    root_pid: int
    stop: bool = False
    cpu: bool = True
    store: str = ""
    name: str = ""
    timeout_s: float = 30.0
    compress: str = "auto"
    incremental: bool = True
    check_clean: bool = False
    concurrent: str = concurrent.AUTO
    precopy: bool = False


@dataclass(frozen=True)
class CheckpointPlan:
    """What the survey decided; can be printed. `arena_bytes` by the target's device ordinal: what the memory that is
    new is expected to take; `ring`: the arena cannot hold that, it streams to the store; `tight`: the store has no room
    for as much as was expected, so what really is new decides."""

    surveyed: Surveyed
    request: CheckpointRequest
    name: str
    ring: bool
    disk_bytes: int
    last: LastImage | None = None
    arena_bytes: dict[int, int] = field(default_factory=dict)
    tight: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.surveyed.to_dict(),
            "image": self.name,
            "parent": self.last.reference if self.last else None,
            "stop": self.request.stop,
            "cpu": self.request.cpu,
            "incremental": self.request.incremental,
            "concurrent": self.request.concurrent,
            "precopy": self.request.precopy,
            "ring": self.ring,
            "arena_bytes": sum(self.arena_bytes.values()),
            "disk_bytes": self.disk_bytes,
        }


def make_plan(
    context: Context, request: CheckpointRequest, surveyed: Surveyed, images: ImageRepository
) -> CheckpointPlan:
    """NoSpaceError when the store, or the host for the driver's part, has no room for it."""
    name = request.name or image_name(surveyed.name)
    last = context.history.last(surveyed, images, name)
    new_bytes = history.estimate_bytes(surveyed.owned_bytes, last)
    control_bytes = surveyed.control_state_bytes
    # CRIU writes plain files; until the image is committed they are on the disk beside the chunks made of them.
    files_bytes = surveyed.resident_bytes + control_bytes if request.cpu else 0
    packs_bytes = new_bytes + history.estimate_cpu_bytes(files_bytes, last)
    tight = False
    try:
        images.require(packs_bytes, "the image", work_bytes=files_bytes)
    except NoSpaceError:
        if last is None:
            raise
        # What is new may be far less than the last time, and is known exactly once the memory is hashed.
        images.require(0, "the image", work_bytes=files_bytes)
        tight = True
    room.require_host(control_bytes, "the driver's checkpoint of the target", surveyed.pid)
    arenas = context.arenas
    moved_bytes = new_bytes if request.incremental else surveyed.owned_bytes
    arena_bytes = {
        device.ordinal: min(device.owned_bytes, whole_chunks(moved_bytes, images.chunk_bytes))
        for device in surveyed.devices
        if device.owned_bytes
    }
    needed_arena = sum(arena_bytes.values())
    ring = needed_arena > arenas.free_bytes or not room.arena_can_take(arenas, needed_arena)
    return CheckpointPlan(surveyed, request, name, ring, packs_bytes + files_bytes, last, arena_bytes, tight)


def whole_chunks(size_bytes: int, chunk_bytes: int) -> int:
    """`size_bytes` rounded up to whole chunks."""
    return -(-size_bytes // chunk_bytes) * chunk_bytes


def image_name(target_name: str) -> str:
    """A name that a store takes, for a target whose own may be anything that fits into its environment."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", target_name).lstrip("._-")[:63] or "target"
