"""`checkpoint`: an image of a running target, which then runs on, or (`stop`) ends once the image is durable.

Phases: survey, quiesce, handover, then control and cpu with the drain beside them. Leave-running goes on with return,
and hashes and writes after the target runs again; stop writes before it commits, and ends the target last.
Must never end a target without a committed image, and never commit what was not drained whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from woodfrog.errors import NoSpaceError, NotFoundError, TargetState, UsageError, WoodfrogError
from woodfrog.operations import manifest as manifests
from woodfrog.operations import room
from woodfrog.operations.context import Arenas, Context
from woodfrog.operations.data import GpuData
from woodfrog.operations.dump_folder import dump_folder
from woodfrog.operations.failure import explain
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.phases import Beside, Emit, Phase, Runner, Step
from woodfrog.operations.space import Space
from woodfrog.operations.survey import Surveyed, survey
from woodfrog.store.space import require as require_disk
from woodfrog.target.process import ProcessTree

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Criu, Dumped
    from woodfrog.image.writer import ImageWriter

log = logging.getLogger(__name__)

# The ring that data streams through when the arena cannot hold all of it: enough to keep bus and disk busy at once.
RING_BYTES = 1 << 30
SMALLEST_RING_BYTES = 16 << 20
ALIGNMENT_BYTES = 2 << 20  # of the arena's accounting
REAP_TIMEOUT_S = 5.0  # of what is our own child; the reaper's thread does it within milliseconds


@dataclass(frozen=True)
class CheckpointRequest:
    """What was asked for. `store` is a path, or empty for the default one; `name` empty: the target's own."""

    root_pid: int
    stop: bool = False
    cpu: bool = True
    store: str = ""
    name: str = ""
    timeout_s: float = 30.0


@dataclass(frozen=True)
class CheckpointPlan:
    """What the survey decided; can be printed. `ring`: the arena cannot hold the data, it streams to the disk."""

    surveyed: Surveyed
    request: CheckpointRequest
    name: str
    ring: bool
    arena_bytes: int
    disk_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.surveyed.to_dict(),
            "image": self.name,
            "stop": self.request.stop,
            "cpu": self.request.cpu,
            "ring": self.ring,
            "arena_bytes": self.arena_bytes,
            "disk_bytes": self.disk_bytes,
        }


class Checkpoint:
    """One checkpoint; use once. Everything it holds is released when `run` returns or raises."""

    def __init__(self, context: Context, request: CheckpointRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self.runner = Runner("checkpoint", emit)
        self._limits = PhaseLimits(request.timeout_s)
        self._plan: CheckpointPlan | None = None
        self._criu: Criu | None = None
        self._frozen: FrozenTarget | None = None
        self._data: GpuData | None = None
        self._spaces: dict[int, Space] = {}  # by the target's device ordinal
        self._writer: ImageWriter | None = None
        self._data_fds: list[int] = []
        self._digests: list[bytes] = []
        self._dumped: Dumped | None = None
        self._draft: manifests.Draft | None = None
        self._reference = ""
        self._image_path = ""

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError with the target's state."""
        try:
            self.runner.run(self._steps())
        except WoodfrogError as failure:
            raise self._settle(failure) from failure
        finally:
            self._release()
        return self._result()

    # ── the order ───────────────────────────────────────────────────────────────────────────────────────────────

    def _steps(self) -> list[Step]:
        request, limits = self._request, self._limits
        begin = [
            Phase("survey", self._survey, limit_s=limits.short_s),
            Phase("prepare", self._prepare, self._abort_writer, limit_s=limits.long_s),
        ]
        quiesce = Phase("quiesce", self._quiesce, self._bring_back, limit_s=limits.quiesce_s)
        handover = Phase("handover", self._handover, limit_s=limits.short_s)
        import_ = Phase("import", self._import, self._release_data, limit_s=limits.short_s)
        control = Phase("control", self._control, limit_s=limits.driver_s)
        cpu = [Phase("cpu", self._cpu, self._abort_writer, limit_s=limits.long_s)] if request.cpu else []
        drain = Phase("drain", self._drain, limit_s=limits.long_s)
        back = Phase("return", self._return, limit_s=limits.driver_s)
        write = Phase("write", self._write, self._abort_writer, limit_s=limits.long_s)
        commit = Phase("commit", self._commit, self._abort_writer, limit_s=limits.long_s, commits=True)
        if request.stop:
            end = Phase("end", self._end, limit_s=limits.long_s)
            return [*begin, quiesce, handover, Beside([import_, drain, write], [control, *cpu]), commit, end]
        return [*begin, quiesce, handover, Beside([import_, drain], [control, *cpu]), back, write, commit]

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _survey(self) -> None:
        request, context = self._request, self._context
        if request.stop and not request.cpu:
            raise UsageError(
                "stopping a target without its CPU side would lose it", advice="leave it running, or add it"
            )
        if request.cpu:
            self._criu = context.criu()
        surveyed = survey(context, request.root_pid, image=request.cpu)
        self._plan = self._make_plan(surveyed)
        log.info("plan of the checkpoint: %s", self._plan.to_dict())

    def _make_plan(self, surveyed: Surveyed) -> CheckpointPlan:
        request, context = self._request, self._context
        needed_disk = surveyed.owned_bytes
        control_bytes = surveyed.driver_bytes + room.control_state_bytes(surveyed.simulated)
        if request.cpu:
            needed_disk += surveyed.resident_bytes + control_bytes
        store = context.store(request.store)
        require_disk(store.path, needed_disk, "the image")
        room.require_host(control_bytes, "the driver's checkpoint of the target", surveyed.pid)
        to_populate = surveyed.owned_bytes - context.arenas.prepared_bytes
        ring = surveyed.owned_bytes > context.arenas.free_bytes or not room.host_has(to_populate)
        return CheckpointPlan(
            surveyed=surveyed,
            request=request,
            name=request.name or image_name(surveyed.name),
            ring=ring,
            arena_bytes=RING_BYTES if ring else surveyed.owned_bytes,
            disk_bytes=needed_disk,
        )

    def _prepare(self) -> None:
        """Memory and disk at hand while the target still runs: it shall not wait for either."""
        context, request, surveyed = self._context, self._request, self._planned.surveyed
        used = {device.ordinal: device for device in surveyed.devices if device.owned_bytes}
        if self._planned.ring:
            sizes = {ordinal: device.owned_bytes for ordinal, device in used.items()}
            self._spaces = take_rings(context.arenas, sizes, surveyed.user)
        else:
            for ordinal, device in used.items():
                node = context.devices.node_of(device.uuid)
                self._spaces[ordinal] = Space.take(context.arenas, device.owned_bytes, surveyed.user, node=node)
        self._writer = context.store(request.store).begin(self._planned.name)
        self._frozen = FrozenTarget(context, surveyed.notes("checkpoint", stop=request.stop, store=request.store))
        self._frozen.notes.directory = str(self._writer.directory)
        self._draft = manifests.Draft.of(context, surveyed, self._frozen.notes)

    def _quiesce(self) -> None:
        self._target.quiesce(self._request.timeout_s)

    def _handover(self) -> None:
        target = self._target
        if not target.notes.managed:
            return
        target.export()
        self._data = GpuData(self._context.devices, target.notes.handles, target.notes.devices)
        self._fit_spaces(self._data)
        target.release()
        if self._request.cpu:
            target.detach()

    def _import(self) -> None:
        """Map what was handed over; the target waits for its driver meanwhile, not for this."""
        if self._data is not None:
            self._data.import_all(self._target.fds)

    def _fit_spaces(self, data: GpuData) -> None:
        """The target may have allocated more between the survey and its quiesce."""
        user = self._target.notes.user
        for file in data.files:
            if self._planned.ring:
                if file.device not in self._spaces:
                    self._spaces |= take_rings(self._context.arenas, {file.device: file.size_bytes}, user)
            elif file.device in self._spaces:
                self._spaces[file.device].extend(file.size_bytes)
            else:
                self._spaces[file.device] = Space.take(self._context.arenas, file.size_bytes, user)

    def _control(self) -> None:
        self._target.checkpoint_driver()

    def _cpu(self) -> None:
        assert self._criu is not None
        with dump_folder(self._context.runtime_directory, self._target.notes) as folder:
            self._dumped = self._criu.dump(
                self._target.notes.root_pid,
                self._writing.directory / "cpu",
                leave_running=not self._request.stop,
                timeout_s=self._limits.long_s,
                log_directory=folder,
            )

    def _drain(self) -> None:
        data = self._data
        if data is None or not data.files:
            return
        progress = data.new_progress()
        with self.runner.counting("drain", progress):
            if self._planned.ring:
                self._digests = data.stream(self._context.arenas, self._spaces_of(data), self._open_files(), progress)
            else:
                data.drain(self._context.arenas, self._spaces_of(data), progress)

    def _return(self) -> None:
        self._target.bring_back()
        self._release_data()
        self._target.close()

    def _write(self) -> None:
        data = self._data
        if data is None or not data.files or self._planned.ring:
            return
        progress = data.new_progress()
        with self.runner.counting("write", progress):
            self._digests = data.write(self._context.arenas, self._spaces_of(data), self._open_files(), progress)

    def _commit(self) -> None:
        assert self._draft is not None
        manifest = self._draft.finish(
            self._target,
            files=self._data.files if self._data else [],
            digests=self._digests,
            dumped=self._dumped,
            criu=self._criu,
            leave_running=not self._request.stop,
            phases=self.runner.times,
        )
        with self._writing.commit(manifest) as image:
            self._reference = image.reference
            self._image_path = str(image.path)

    def _end(self) -> None:
        """The image is durable; now the target may go. Safe to repeat."""
        end_tree(self._context, self._target.notes.root_pid, self._target.alive)
        self._target.record.drop()

    # ── undo and the rest ───────────────────────────────────────────────────────────────────────────────────────

    def _bring_back(self) -> None:
        self._target.bring_back()

    def _release_data(self) -> None:
        if self._data is not None:
            self._data.release()

    def _abort_writer(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _release(self) -> None:
        self._release_data()
        self._abort_writer()  # does nothing after the commit
        for space in self._spaces.values():
            space.free()
        if self._frozen is not None:
            self._frozen.close()

    @property
    def frozen_target(self) -> FrozenTarget | None:
        """The target once it was begun with; for the table of those that could not be brought back."""
        return self._frozen

    @property
    def _target(self) -> FrozenTarget:
        assert self._frozen is not None
        return self._frozen

    @property
    def _planned(self) -> CheckpointPlan:
        assert self._plan is not None
        return self._plan

    @property
    def _writing(self) -> ImageWriter:
        assert self._writer is not None
        return self._writer

    def _spaces_of(self, data: GpuData) -> list[Space]:
        return [self._spaces[file.device] for file in data.files]

    def _open_files(self) -> list[int]:
        assert self._data is not None
        self._data_fds = [self._writing.open_data(file.name) for file in self._data.files]
        return self._data_fds

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        if self._frozen is None:
            return failure  # refused by the survey: untouched
        if not self.runner.committed:
            return explain(failure, self._frozen, self.runner)
        failure.pid = failure.pid or self._frozen.notes.pid
        failure.details["image"] = self._reference
        failure.advice = f"the image {self._reference} is complete"
        if self._request.stop:
            self._end()
        failure.target_state = TargetState.GONE if self._request.stop else TargetState.RUNNING
        return failure

    def _result(self) -> dict[str, Any]:
        notes = self._target.notes
        gpu_bytes = self._data.size_bytes if self._data else 0
        cpu_bytes = self._dumped.size_bytes if self._dumped else 0
        return {
            "image": self._reference,
            "path": self._image_path,
            "name": notes.name,
            "pid": notes.pid,
            "state": TargetState.GONE if self._request.stop else TargetState.RUNNING,
            "stopped": self._request.stop,
            "phases": dict(self.runner.times),
            "stall_s": self._target.stall_s,
            "bytes": gpu_bytes + cpu_bytes,
            "gpu_bytes": gpu_bytes,
            "cpu_bytes": cpu_bytes,
            "ring": self._planned.ring,
        }


def image_name(target_name: str) -> str:
    """A name that a store takes, for a target whose own may be anything that fits into its environment."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", target_name).lstrip("._-")[:63] or "target"


def end_tree(context: Context, root_pid: int, alive: bool) -> None:
    """Kill the tree below `root_pid` and wait for its end; nothing happens when it has ended already."""
    if not alive:
        return
    with contextlib.suppress(NotFoundError), ProcessTree(root_pid) as tree:
        ours = [process.identity for process in tree.processes if process.parent_pid == os.getpid()]
        tree.kill()
        for identity in ours:
            context.reaper.wait(identity, REAP_TIMEOUT_S)


def take_rings(arenas: Arenas, sizes_bytes: Mapping[int, int], user: int) -> dict[int, Space]:
    """Parts of the arena for data of these sizes to stream through, one for each key; NoSpaceError takes nothing.

    Each is contiguous, and none takes what the others need.
    """
    rings: dict[int, Space] = {}
    try:
        for key, data_bytes in sizes_bytes.items():
            share = arenas.largest_free_bytes() // (len(sizes_bytes) - len(rings))
            ring = min(RING_BYTES, data_bytes, share - share % ALIGNMENT_BYTES)
            if ring < min(SMALLEST_RING_BYTES, data_bytes):
                raise NoSpaceError(
                    f"the host arena has {arenas.free_bytes >> 20} MiB free; each of {len(sizes_bytes)} rings needs "
                    f"{SMALLEST_RING_BYTES >> 20} MiB in one piece",
                    advice="resume or stop suspended targets, or start the daemon with a larger --arena",
                )
            rings[key] = Space.take(arenas, ring, user, contiguous=True)
    except BaseException:
        for space in rings.values():
            space.free()
        raise
    return rings
