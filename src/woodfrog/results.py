"""What the public API returns: plain values, with `to_dict` for `--json`. Sizes are bytes, times seconds.

Nothing here talks to the daemon; unknown fields of a newer daemon are ignored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class _Jsonable:
    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class CheckpointResult(_Jsonable):
    """A finished checkpoint. `restored` is True in the process that `checkpoint_self` brought back from the image."""

    image: str | None = None  # NAME@NUMBER
    path: str = ""
    pid: int = 0
    name: str = ""
    state: str = ""  # of the target now: errors.TargetState
    stopped: bool = False
    stall_s: float = 0.0  # how long the target waited
    stall_parts: dict[str, float] = field(default_factory=dict)  # of it; `data`: for what was new to leave its memory
    driver_s: float = 0.0  # of it: the driver's own checkpoint and restore of the control state
    # Of it, without the driver's: `daemon`, seconds by part; `agents`, of each process by command and by what it was
    # spent on (seconds, how often).
    stall_detail: dict[str, Any] = field(default_factory=dict)
    # For each GPU: device, way (copy, cow, stop, copy and stop), copied_bytes (drained while it ran), drained_bytes
    # (before it did), free_bytes and allowed_bytes (of the GPU's memory then, for copies), cow_bytes (captured while it
    # ran), early_bytes (of these: because it waited for that).
    concurrent: list[dict[str, Any]] = field(default_factory=list)
    # Where copy-on-write was the way: waits (calls of the target that waited), waited_s (all together), early_bytes.
    copy_on_write: dict[str, Any] = field(default_factory=dict)
    # Of a checkpoint whose first attempt missed a write: reason, kernels (launched meanwhile), stall_s of that attempt.
    retaken: dict[str, Any] = field(default_factory=dict)
    # With precopy: rounds (bytes copied in each), pause_s, used_bytes (new, not copied while the target waited),
    # stored_bytes (stored before it waited).
    precopy: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0  # GPU memory and CPU side together
    gpu_bytes: int = 0
    cpu_bytes: int = 0
    gpu_handles: int = 0  # physical allocations that were handed over and returned: each costs the stall the same
    gpu_new_bytes: int = 0  # of GPU memory: what the store did not have; only this crossed the bus
    gpu_zero_bytes: int = 0
    cpu_new_bytes: int = 0
    stored_bytes: int = 0  # what all that is new took in the store, after compression
    tracked: bool = False  # the target follows its launches (run --track); the next five are zero without
    launches: int = 0  # of kernels, since the checkpoint before
    covered_launches: int = 0  # of kernels that have a template
    clean_bytes: int = 0  # of GPU memory that nothing can have written: not hashed
    clean_checked: bool = False  # hashed all the same, and found to be as in the last image
    unclean_reason: str = ""  # why everything was hashed
    chunks: int = 0  # of GPU memory
    new_chunks: int = 0
    parent: str = ""  # the image of this target before this one
    control_memory_bytes: int = 0  # of memory that was ready before the driver asked for it
    lent_bytes: int = 0  # of GPU memory that the driver lent of a process not started by woodfrog; in `cpu_bytes`
    control_file_bytes: int = 0  # of the image, the driver's saved state that CRIU passed over
    # Of a target that woodfrog did not start: how its driver's checkpoint was helped from outside (driver/entering.py).
    visit: dict[str, Any] = field(default_factory=dict)
    ring: bool = False  # the host arena could not hold what is new: it went to the store while the target waited
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    restored: bool = False


@dataclass(frozen=True)
class PromotionResult(_Jsonable):
    """The way of a running target's memory from the host to the GPU. `state`: running, complete, stopped (`reason`)."""

    state: str = ""
    total_bytes: int = 0
    moved_bytes: int = 0
    left_bytes: int = 0  # on host memory when it ended
    batches: int = 0
    pause_s: float = 0.0  # of the target, all of them
    longest_pause_s: float = 0.0
    seconds: float = 0.0
    ended_unix_s: float = 0.0  # 0 while it is under way
    reason: str = ""


@dataclass(frozen=True)
class RestoreResult(_Jsonable):
    """A target brought back from an image, as the daemon reports it."""

    image: str = ""
    name: str = ""
    pid: int = 0  # of the process that uses the GPU
    root_pid: int = 0  # of the root of its process tree
    log: str = ""
    state: str = ""
    bytes: int = 0  # of GPU memory
    cpu_bytes: int = 0
    verified: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    pages_wait_s: float = 0.0  # of the phase cpu, for which CRIU waited until its files of pages were whole
    warnings: list[str] = field(default_factory=list)
    standby: str = ""  # it was waiting already, with its data there: host, device
    mode: str = "eager"  # when it runs: eager (its data is on the GPU), mapped
    promotion: PromotionResult | None = None  # what follows a restore that is not eager
    # Of a target that woodfrog did not start: how its driver's restore was helped from outside (driver/entering.py).
    visit: dict[str, Any] = field(default_factory=dict)
    instance: str = ""  # of a target in a PID namespace of its own, its random number
    ports: dict[str, int] = field(default_factory=dict)  # TCP, where it was told: those of the image → here


@dataclass(frozen=True)
class StandbyResult(_Jsonable):
    """One process of the standby pool. `new`: it was made just now; else it was there."""

    image: str = ""
    name: str = ""
    pid: int = 0  # of the process that uses the GPU
    root_pid: int = 0
    state: str = ""
    hold: str = ""  # where its data waits: host (arena), device (GPU memory)
    new: bool = True
    instance: str = ""  # of one in a PID namespace of its own, its random number
    ports: dict[str, int] = field(default_factory=dict)  # TCP, where it was told: those of the image → here
    bytes: int = 0  # of GPU memory
    cpu_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SuspendResult(_Jsonable):
    pid: int = 0
    name: str = ""
    state: str = ""
    level: str = ""  # warm: its context stays on the GPU; cold
    bytes: int = 0
    stall_s: float = 0.0
    # Of a target that woodfrog did not start: how its driver's checkpoint was helped from outside (driver/entering.py).
    visit: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ResumeResult(_Jsonable):
    pid: int = 0
    name: str = ""
    state: str = ""
    bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    promotion: PromotionResult | None = None  # of a running target: it goes on
    # Of a target that woodfrog did not start: how its driver's restore was helped from outside (driver/entering.py).
    visit: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MigrateResult(_Jsonable):
    """A target that runs on other GPUs now. `gpu_map`: UUIDs of the GPUs that it was on → of those that it is on."""

    pid: int = 0
    name: str = ""
    state: str = ""
    gpu_map: dict[str, str] = field(default_factory=dict)
    bytes: int = 0  # of GPU memory that moved
    copied_bytes: int = 0  # of it: while the target waited
    precopied_bytes: list[int] = field(default_factory=list)  # in each round before
    stall_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SwitchResult(_Jsonable):
    """`out_` has name, pid, state, level, bytes and stall_s of the target that left, `in_` name, pid, state and bytes
    of the one that came. `overlapped`: both directions of the bus were in use at once."""

    out_: dict[str, Any] = field(default_factory=dict)
    in_: dict[str, Any] = field(default_factory=dict)
    overlapped: bool = False
    bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TargetInfo(_Jsonable):
    """One row of `ps`. `managed`: started by `woodfrog run`; others are checkpointed the driver's way."""

    pid: int = 0  # of the process that uses the GPU
    root_pid: int = 0  # of the root of its process tree
    name: str = ""
    state: str = ""  # errors.TargetState
    managed: bool = True
    gpu_bytes: int = 0
    devices: list[int] = field(default_factory=list)
    gpu_pids: list[int] = field(default_factory=list)  # of all processes of it that use GPUs
    launches: int = 0  # of kernels and graphs since it started; of running managed targets only
    command: str = ""
    log: str = ""
    operation: str = ""
    image: str = ""  # of a standby process: the image that it is from
    hold: str = ""  # and where its data waits: host, device
    hosted_bytes: int = 0  # of a running target: on host memory, since its promotion is under way or has stopped


@dataclass(frozen=True)
class ImageInfo(_Jsonable):
    """One row of `images`. `error` says why an image cannot be used; the rest is then zero."""

    reference: str
    name: str
    number: int
    path: str
    kind: str = ""
    created_unix_s: float = 0.0
    gpu_bytes: int = 0
    cpu_bytes: int = 0
    leave_running: bool = False
    target_name: str = ""
    parent: str = ""
    new_bytes: int = 0  # what the store did not have when it was written
    stored_bytes: int = 0  # what that took in the store, after compression
    error: str | None = None


@dataclass(frozen=True)
class VerifyResult(_Jsonable):
    """An image whose every chunk has its digest (anything else is raised as BadImageError)."""

    image: str
    bytes: int
    seconds: float
