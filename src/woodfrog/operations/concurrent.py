"""Which way a target that runs on is spared the wait for its data, and how much of the GPU's memory that may take.

    copy   a copy of all memory is made within the GPU's, and hashed and drained while the target runs; where there is
           no room for that, what is new is looked for first, and only that is copied
    cow    copy-on-write: what is new is captured while the target runs, from its own memory, and it waits before it
           writes what has not been (operations/copy_on_write.py). The arena must have room for all that is new
    stop   it drains before the target runs on
    auto   copy where there is room for all that is new, else cow; where the arena has no room for that, copy as far as
           the GPU has room, and stop for the rest

Must never take memory that the target's return needs: its control state is off the GPU while this decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from woodfrog.errors import NoSpaceError, UsageError
from woodfrog.operations import room

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device

AUTO, COPY, COW, STOP = "auto", "copy", "cow", "stop"
MIB = 1 << 20


@dataclass(frozen=True)
class DeviceWay:
    """What was done on one device. `copied_bytes` drained while the target ran, `drained_bytes` before it did."""

    device: int  # the target's ordinal
    copied_bytes: int
    drained_bytes: int
    free_bytes: int  # of the device's memory, when it was decided
    allowed_bytes: int  # of these, what copies might take
    snapshot_bytes: int = 0  # of all memory, copied before it was known what is new
    cow_bytes: int = 0  # captured from its memory while the target ran
    early_bytes: int = 0  # of these, because it waited for that

    @property
    def way(self) -> str:
        if self.cow_bytes:
            return COW
        if not self.copied_bytes:
            return STOP
        return f"{COPY} and {STOP}" if self.drained_bytes else COPY

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "way": self.way,
            "copied_bytes": self.copied_bytes,
            "drained_bytes": self.drained_bytes,
            "free_bytes": self.free_bytes,
            "allowed_bytes": self.allowed_bytes,
            "snapshot_bytes": self.snapshot_bytes,
            "cow_bytes": self.cow_bytes,
            "early_bytes": self.early_bytes,
        }


def check_way(way: str, *, stop: bool) -> None:
    """UsageError for a way that there is not, or not for this checkpoint."""
    if way not in (AUTO, COPY, COW, STOP):
        raise UsageError(f"there is no way {way!r} to run on", advice="auto, copy, cow or stop")
    if stop and way in (COPY, COW):
        raise UsageError("a target that ends does not run on beside its data", advice="leave out --concurrent")


class Allowance:
    """How much of each device's memory copies may take. Made while the target still runs with all that is its own."""

    def __init__(self, free_bytes: Mapping[int, int], returning_bytes: int) -> None:
        """`free_bytes` by the target's device ordinals; `returning_bytes`: what the driver takes off the GPU for its
        checkpoint and brings back."""
        self._before = dict(free_bytes)
        self._returning_bytes = returning_bytes

    def of(self, number: int, device: Device) -> tuple[int, int]:
        """(free, allowed) bytes on `device`, the target's number `number`, now. Either the control state is away and
        counts as free, or it is not: the smaller answer is right in both cases."""
        free = device.free_bytes()
        usable = min(self._before.get(number, 0), free - self._returning_bytes)
        return free, max(0, usable - room.gpu_reserve_bytes(device))


def staged_chunks(way: str, wanted: int, chunk_bytes: int, allowed_bytes: int, device: Device) -> int:
    """How many of `wanted` chunks are copied. NoSpaceError if all were asked for and do not fit."""
    if way == STOP:
        return 0
    fitting = min(wanted, allowed_bytes // chunk_bytes)
    if way == COPY and fitting < wanted:
        raise no_room(wanted * chunk_bytes, allowed_bytes, device)
    return fitting


def no_arena_room(wanted_bytes: int, device: int) -> NoSpaceError:
    """What is told when `cow` was demanded."""
    return NoSpaceError(
        f"{wanted_bytes // MIB} MiB are new, and the host arena has no room for all of that, which copy-on-write needs",
        advice="give the daemon a larger arena, or leave out --concurrent",
        device=device,
        details={"needed_bytes": wanted_bytes},
    )


def no_room(wanted_bytes: int, allowed_bytes: int, device: Device) -> NoSpaceError:
    """What is told when `copy` was demanded."""
    return NoSpaceError(
        f"{wanted_bytes // MIB} MiB are new, and of GPU {device.ordinal}'s memory {allowed_bytes // MIB} MiB may hold "
        "copies of them",
        advice="--concurrent auto copies what fits, and drains the rest before the target runs on",
        device=device.ordinal,
        details={"needed_bytes": wanted_bytes, "allowed_bytes": allowed_bytes},
    )
