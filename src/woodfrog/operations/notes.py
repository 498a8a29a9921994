"""The daemon's notes: what a daemon that starts must know about a target that its predecessor had in hand.

Notes lie in a memfd that the keeper holds as descriptor 0 of a record; the descriptors after it are GPU memory (key
`target:…`) or an arena (key `suspend:…`). They describe; what they describe is always checked against the process, the
driver and the store, and they must never be trusted where one of those can be asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from woodfrog.errors import NoDaemonError, NotFoundError, WoodfrogError
from woodfrog.target.identity import Identity

log = logging.getLogger(__name__)

NOTES_VERSION = 1
# Levels of a suspend: whether the target's control state leaves the GPU as well.
WARM, COLD = "warm", "cold"
# Where the data of a standby process waits: in an arena; in GPU memory of which the keeper has the descriptors; or in
# host memory, likewise, that the process will be mapped to and from which its data is promoted.
HOLD_HOST, HOLD_DEVICE, HOLD_MAPPED = "host", "device", "mapped"
# Notes of a million handles are about 40 MB; anything above is not ours.
MAX_NOTES_BYTES = 256 << 20


class HandleNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One physical allocation of the target: wire.h's `handle` entry."""

    handle: int
    size: int
    device: int
    kind: str  # by name, as wire.h has them
    # 0: nobody else's. Else the same for all handles of an operation, of whatever process, that are this memory.
    memory: int = 0
    host_node: int = -1  # the NUMA node of host memory


class ExtentNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where data of one device lies: [offset, offset+size) of the arena of NUMA node `node`."""

    device: int  # the target's ordinal; a device's extents follow each other in the order of its data
    node: int
    offset: int
    size: int


class MemberNote(msgspec.Struct, array_like=True, gc=False):
    """One process of the target that uses the GPU. `devices`: its own device ordinals and the target's; a process sees
    the GPUs that its CUDA_VISIBLE_DEVICES names, in that order. Those that are not in it have the target's numbers.
    `moved`: where the driver checkpointed it, if that is not where the target was when the operation began: UUIDs of
    all GPUs then, and of those that it was on instead."""

    pid: int
    start_ticks: int
    devices: dict[int, int] = {}
    moved: list[tuple[str, str]] = []

    def job_ordinal(self, own: int) -> int:
        return self.devices.get(own, own)

    def own_ordinal(self, job: int) -> int:
        return next((own for own, there in self.devices.items() if there == job), job)


class Notes(msgspec.Struct, kw_only=True):
    """Everything about one target that is frozen, suspended, or in the middle of an operation."""

    version: int = NOTES_VERSION
    operation: str
    operation_id: int
    name: str
    pid: int  # the process that uses the GPU; of several the first, by which the target is known
    start_ticks: int
    members: list[MemberNote] = []  # all of them, in the order of their handles' numbers; empty: it is the only one
    root_pid: int  # the root of the tree that CRIU dumps
    managed: bool  # has our interposer; else the driver keeps its memory
    user: int = -1  # whose data it is
    stop: bool = False
    level: str = COLD  # of a suspended target
    mode: str = ""  # of a promotion: the restore's
    hold: str = ""  # of a standby process (a suspended target that was restored to wait): where its data is
    instance: str = ""  # of a target that was restored into a PID namespace of its own (target.pid_namespace)
    ports: dict[int, int] = {}  # TCP ports that it was restored to listen on, by those of the image
    binds: list[tuple[str, str]] = []  # paths bound in its mount namespace: here → there
    store: str = ""
    directory: str = ""  # where an image is being written; CRIU's command line names it
    image: str = ""  # of a restore: the image it comes from; of a checkpoint: the name of the one being written
    begun_ticks: int = 0  # clock ticks since boot when the operation began
    tree: list[int] = []
    commands: list[str] = []  # of a restore: the command lines of `tree`
    devices: dict[int, str] = {}  # the target's device ordinal -> UUID, 32 hex digits
    # UUIDs of all GPUs that the driver knew of (in the image; when the target was suspended) -> of those that it is
    # being restored onto. Processes that the driver has restored are there. Empty: where they were.
    gpu_pairs: list[tuple[str, str]] = []
    # Of a migration behind its commit: the first of the record's descriptors that is memory on the new GPUs.
    memory_from: int = 0
    handles: list[HandleNote] = []
    extents: list[ExtentNote] = []
    driver_bytes: int = 0  # what the driver will want on the GPU besides the handles
    simulated: bool = False
    created_unix_s: float = 0.0
    command: str = ""
    log_path: str = ""

    @property
    def gpu_processes(self) -> list[MemberNote]:
        """All processes of the target that use the GPU."""
        return self.members or [MemberNote(self.pid, self.start_ticks)]

    @property
    def alive(self) -> bool:
        """Whether any of them is there."""
        return any(Identity(one.pid, one.start_ticks).is_alive() for one in self.gpu_processes)


class Keeper(Protocol):
    """The part of the keeper's client that operations use. The caller keeps the descriptors it passes in."""

    def append(self, key: str, fds: Sequence[int]) -> int: ...
    def fetch(self, key: str) -> list[int]: ...
    def replace(self, key: str, index: int, fd: int) -> Any: ...
    def drop(self, key: str) -> Any: ...


def target_key(pid: int, start_ticks: int) -> str:
    """The record of a target in the middle of an operation."""
    return f"target:{pid}:{start_ticks}"


def suspend_key(pid: int, start_ticks: int) -> str:
    """The record of a suspended target."""
    return f"suspend:{pid}:{start_ticks}"


def restore_key(pid: int, operation_id: int) -> str:
    """The record of a restore in progress."""
    return f"restore:{pid}:{operation_id}"


def promote_key(pid: int, start_ticks: int) -> str:
    """The record of a running target of whose memory some lies on host memory as yet."""
    return f"promote:{pid}:{start_ticks}"


def boot_ticks() -> int:
    """Clock ticks since boot, the unit of a process's start time in /proc."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def write_notes(notes: Notes) -> int:
    """A new memfd with `notes`; the caller owns the descriptor."""
    fd = os.memfd_create("woodfrog-notes", os.MFD_CLOEXEC)
    try:
        data = memoryview(msgspec.json.encode(notes))
        while data:
            data = data[os.write(fd, data) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_notes(fd: int) -> Notes:
    """The notes in a memfd; WoodfrogError when they cannot be understood (another version wrote them)."""
    size = os.fstat(fd).st_size
    if size > MAX_NOTES_BYTES:
        raise WoodfrogError(f"notes of {size} bytes are not ours")
    data = os.pread(fd, size, 0)
    try:
        notes = msgspec.json.decode(data, type=Notes)
    except msgspec.MsgspecError as failure:
        raise WoodfrogError(f"notes in the keeper cannot be read: {failure}") from failure
    if notes.version != NOTES_VERSION:
        raise WoodfrogError(
            f"notes in the keeper have version {notes.version}, this woodfrog knows {NOTES_VERSION}",
            advice="resume or stop the target with the version that froze it",
        )
    return notes


class Record:
    """One record in the keeper: made by the first `keep`, rewritten by `update`, gone after `drop`. Thread-safe."""

    def __init__(self, keeper: Keeper, key: str, *, exists: bool = False) -> None:
        self.key = key
        self._keeper = keeper
        self._exists = exists
        self._lock = threading.Lock()

    @property
    def exists(self) -> bool:
        return self._exists

    def keep(self, notes: Notes, fds: Sequence[int]) -> None:
        """Hand notes and descriptors to the keeper; on return they survive this process. All or nothing."""
        with self._lock:
            notes_fd = write_notes(notes)
            try:
                self._exists = True  # from the first packet on there may be something to drop
                self._keeper.append(self.key, [notes_fd, *fds])
            finally:
                os.close(notes_fd)

    def add(self, fds: Sequence[int]) -> None:
        """Hand more descriptors to the keeper, behind those that it has."""
        with self._lock:
            self._keeper.append(self.key, fds)

    def update(self, notes: Notes) -> None:
        """Replace the notes in one step."""
        with self._lock:
            notes_fd = write_notes(notes)
            try:
                self._keeper.replace(self.key, 0, notes_fd)
            finally:
                os.close(notes_fd)

    def drop(self) -> None:
        """Let the keeper forget the record; nothing happens when there is none."""
        with self._lock:
            if self._exists:
                try:
                    self._keeper.drop(self.key)
                except NotFoundError:
                    log.debug("%s was not there: keeping it had failed at once", self.key)
                except NoDaemonError:
                    # Dead keepers hold nothing; the target is right all the same.
                    log.exception("the keeper is gone, and %s with it", self.key)
                self._exists = False
