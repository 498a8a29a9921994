"""What a checkpoint is asked for, and what its survey makes of that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from woodfrog.operations import concurrent
from woodfrog.operations.history import LastImage
from woodfrog.operations.survey import Surveyed


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


def whole_chunks(size_bytes: int, chunk_bytes: int) -> int:
    """`size_bytes` rounded up to whole chunks."""
    return -(-size_bytes // chunk_bytes) * chunk_bytes


def image_name(target_name: str) -> str:
    """A name that a store takes, for a target whose own may be anything that fits into its environment."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", target_name).lstrip("._-")[:63] or "target"
