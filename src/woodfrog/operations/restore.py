"""`restore`: a new process from an image, on the same GPU or another.

The data goes straight to HBM beside CRIU's and the driver's restore; the restored target then maps ready memory. Until
it runs, everything can be taken back by ending it: the image stays. Must never start CRIU before it is known that every
chunk is in the store, that the process numbers are free and that the GPU has room.
"""

from __future__ import annotations

import copy
import logging
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from woodfrog.cpu import criu as criu_module
from woodfrog.cpu import images as criu_images
from woodfrog.driver import features
from woodfrog.errors import BadImageError, RefusedError, TargetState, WoodfrogError
from woodfrog.image import compatibility
from woodfrog.image.image import Image
from woodfrog.operations import hook as hooks
from woodfrog.operations import machine, placement, room, telling
from woodfrog.operations.context import Context
from woodfrog.operations.control_files import RestoredFiles
from woodfrog.operations.cpu_restore import CpuRestore
from woodfrog.operations.data import GpuData, JointProgress, require_digests
from woodfrog.operations.end_tree import end_tree
from woodfrog.operations.frozen import FrozenTarget, OnOneTarget
from woodfrog.operations.history import LastImage
from woodfrog.operations.instance import Instance
from woodfrog.operations.lent import LentMemory
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.notes import MemberNote, Notes, Record, boot_ticks, promote_key, restore_key
from woodfrog.operations.phases import Beside, Emit, Phase, Runner, Step
from woodfrog.operations.promote import EAGER, movable
from woodfrog.operations.restore_plan import RestorePlan, RestoreRequest, handle_notes
from woodfrog.operations.rings import take_rings
from woodfrog.operations.space import Space
from woodfrog.target import limits as target_limits
from woodfrog.target import procfs

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Restored
    from woodfrog.image.manifest import Manifest
    from woodfrog.image.repository import ImageRepository
    from woodfrog.store.arriving import Arriving

log = logging.getLogger(__name__)

# How long whoever started a target may take to notice that it ended.
REAP_TIMEOUT_S = 5.0
# Process 1 does so for certain if it is an init, but a container's may look only every few seconds (seen: 2 s, more on
# a machine with much to do).
INIT_REAP_TIMEOUT_S = 30.0
LOOK_S = 0.05


class Restore(OnOneTarget):
    """One restore; use once."""

    _operation = "restore"
    _data_on_gpu = True  # once it is done
    _waits = False  # it does not run then

    def __init__(self, context: Context, request: RestoreRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self.runner = Runner(self._operation, emit)
        self._limits = PhaseLimits()
        self._store_url = ""
        self._image: Image | None = None
        self._plan: RestorePlan | None = None
        self._notes: Notes | None = None
        self._record: Record | None = None
        self._data: GpuData | None = None
        self._rings: list[Space] = []
        self._arriving: Arriving | None = None
        self._cpu_side: CpuRestore | None = None
        self._loan: LentMemory | None = None  # of an image with memory that the driver lent
        self._on_host: dict[int, int] = {}  # the NUMA nodes of handles, by index, that are to be promoted
        self._promoting: Record | None = None
        self._instance = Instance()

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError; then nothing of the target is left."""
        try:
            self.runner.run(self._steps())
        except WoodfrogError as failure:
            raise self._settle(failure) from failure
        finally:
            self._release()
        return self._result()

    def _steps(self) -> list[Step]:
        limits = self._limits
        verify = [Phase("verify", self._verify, limit_s=limits.long_s)] if self._request.verify else []
        return [
            *self._coming_steps(limits.short_s),
            Phase("return", self._return, limit_s=limits.short_s),
            *verify,
            Phase("commit", self._commit, limit_s=limits.short_s, commits=True),
        ]

    def _coming_steps(self, allocate_limit_s: float) -> list[Step]:
        """Until the processes are there, and all memory is."""
        limits = self._limits
        data = [
            Phase("locate", self._locate, limit_s=limits.long_s),
            Phase("allocate", self._allocate, self._release_data, limit_s=allocate_limit_s),
            Phase("refill", self._refill, limit_s=limits.long_s),
        ]
        cpu = Phase("cpu", self._cpu, self._end_tree, limit_s=limits.long_s)
        control = Phase("control", self._control, limit_s=limits.driver_s)
        return [
            Phase("survey", self._survey, limit_s=limits.short_s),
            Phase("prepare", self._prepare, limit_s=limits.long_s),
            # Some hundredths of a second, ten times that beside the looking up and reading of a refill.
            Phase("extract", self._extract, limit_s=limits.long_s),
            Beside(data, [cpu, control]),
            *self._hook_phases(),
        ]

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hook_phases(self) -> list[Step]:
        limit_s = self._request.hook_timeout_s + self._limits.short_s
        return [Phase(hooks.PHASE, self._hook, limit_s=limit_s)] if self._request.hook else []

    def _hook(self) -> None:
        request = self._request
        hooks.run_hook(request.hook, self._target.notes, self._operation, request.environment, request.hook_timeout_s)

    def _survey(self) -> None:
        context, request = self._context, self._request
        self._cpu_side = CpuRestore(context, self.runner)
        self._store_url = self._images.url
        self._image = image = self._images.open(request.image)
        manifest = image.manifest
        findings = compatibility.judge(manifest, machine.facts(context, self._cpu_side.criu), request.gpu_map)
        compatibility.require(findings, image.reference)
        self._refuse_other_runtime_directory(manifest)
        chosen = compatibility.map_gpus(manifest, machine.gpus(context), request.gpu_map)
        pairs = [(old, gpu.uuid) for old, gpu in chosen.items() if gpu is not None]
        self._instance = Instance.plan(context, manifest, request)
        if not self._instance.number:
            # Before anything is fetched: the commonest obstacle is the original, still alive. Threads: `_extract`.
            pids = [process.pid for process in manifest.processes]
            await_reaping(pids)
            criu_module.refuse_taken_numbers([criu_images.Task(pid, 0, 0, 0, ()) for pid in pids])
        self._plan = RestorePlan(
            image=image.reference,
            pid=manifest.gpu_pid,
            gpu_map=dict(pairs),
            gpu_bytes=manifest.gpu_bytes,
            cpu_bytes=manifest.cpu_bytes,
            warnings=[finding.reason for finding in findings],
        )
        log.info("plan of the restore: %s", self._plan.to_dict())
        self._notes = self._make_notes(manifest, pairs)
        if self._notes.gpu_pairs:
            features.require("gpu_remap", "restoring onto other GPUs than the image's")
        self._data = GpuData(context.devices, self._notes.handles, self._notes.devices)
        if request.mode != EAGER:
            self._on_host = self._plan_host(manifest)
        if manifest.lent_files:
            features.require("custom_storage", "restoring memory that a driver lent")
        self._require_room(manifest)

    def _prepare(self) -> None:
        """Where the processor's side goes."""
        assert self._notes is not None
        assert self._cpu_side is not None
        image, notes = self._opened, self._notes
        lent = image.manifest.lent_files
        self._loan = LentMemory.of_image(self._context, notes, lent) if lent else None
        places = self._loan.places() if self._loan is not None else []
        self._cpu_side.prepare(
            image,
            Path(notes.directory),
            self._images.store,
            RestoredFiles(image.manifest.mapped_files, lent, places),
            elsewhere=bool(self._instance.number),
        )

    def _locate(self) -> None:
        """Every chunk of GPU memory found (from a remote store, on its way), and a ring for each device."""
        assert self._data is not None
        assert self._notes is not None
        self._arriving = self._opened.locate_gpu_ahead()
        self._rings = self._take_spaces(self._data, self._notes.user, self._opened.manifest.chunk_bytes)

    def _take_spaces(self, data: GpuData, user: int, chunk_bytes: int) -> list[Space]:
        """Arena memory for each part of the data."""
        rings = take_rings(
            self._context.arenas, {part.number: part.size_bytes for part in data.parts}, user, chunk_bytes
        )
        return [rings[part.number] for part in data.parts]

    def _refuse_other_runtime_directory(self, manifest: Manifest) -> None:
        """A restored agent looks for the daemon where it was told to when it was started."""
        there, here = manifest.notes.get("runtime_directory", ""), str(self._context.runtime_directory)
        if manifest.kind == "managed" and there and there != here:
            raise RefusedError(
                f"the target was started under a daemon whose runtime directory is {there}, this one's is {here}",
                advice=f"start the daemon with WOODFROG_RUNTIME_DIR={there} and restore there",
            )

    def _make_notes(self, manifest: Manifest, pairs: list[tuple[str, str]]) -> Notes:
        assert manifest.cpu is not None
        here = dict(pairs)
        instance = self._instance
        own = f"{os.getpid()}-{instance.number}" if instance.number else f"{os.getpid()}"
        directory = self._context.runtime_directory / f"restore-{manifest.operation}-{own}"
        return Notes(
            operation="restore",
            operation_id=manifest.operation,
            name=instance.name or manifest.target_name or manifest.name,
            instance=instance.number,
            ports=dict(instance.changes.ports),
            binds=list(instance.binds),
            pid=manifest.gpu_pid,
            start_ticks=0,  # known once CRIU is done, as those of the members
            members=[MemberNote(one.pid, 0, dict(one.devices)) for one in manifest.gpu_processes],
            root_pid=manifest.cpu.root_pid,
            managed=manifest.kind == "managed",
            user=manifest.environment.uid,
            store=self._request.store,
            directory=str(directory),
            image=self._opened.reference,
            begun_ticks=boot_ticks(),
            tree=[process.pid for process in manifest.processes],
            commands=[" ".join(process.command_line) for process in manifest.processes],
            devices={device.ordinal: here[device.uuid] for device in manifest.devices},
            gpu_pairs=placement.pairs_of_image(self._context, manifest, pairs),
            handles=handle_notes(manifest),
            log_path=instance.log_path or manifest.environment.log_path,
        )

    def _require_room(self, manifest: Manifest) -> None:
        assert self._data is not None
        assert self._plan is not None
        assert self._notes is not None
        target_limits.require_open_files(2 * len(manifest.handles))
        hosted_bytes = sum(self._notes.handles[index].size for index in self._on_host)
        room.require_host(manifest.cpu_bytes + hosted_bytes, "the restored process", manifest.gpu_pid)
        simulated = manifest.driver.simulated
        processes = max(1, len(manifest.gpu_processes))
        needed = {uuid: processes * room.gpu_control_state_bytes(simulated) for uuid in self._plan.gpu_map.values()}
        for part in self._data.parts if self._data_on_gpu else ():
            needed[self._notes.devices[part.device]] += part.size_bytes
        for index in self._on_host if self._waits else ():  # it is promoted when somebody takes it
            handle = self._notes.handles[index]
            needed[self._notes.devices[handle.device]] -= handle.size
        for uuid, size in needed.items():
            room.require_gpu(self._context.devices.by_uuid(uuid), size, "the restored target")

    def _plan_host(self, manifest: Manifest) -> dict[int, int]:
        """What goes to host memory first: the nodes by the handles' indices. All the rest is filled on the GPU."""
        assert self._notes is not None
        if manifest.kind != "managed":
            raise RefusedError(
                f"{self._opened.reference} was written the driver's way: its data is part of what the driver restores, "
                "and cannot follow later",
                advice="restore it with --mode eager",
            )
        devices, uuids = self._context.devices, self._notes.devices
        return {
            index: devices.node_of(uuids[self._notes.handles[index].device]) for index in movable(self._notes.handles)
        }

    @property
    def promotion(self) -> Notes | None:
        """What is to be promoted once the target runs."""
        return self._promotion_notes() if self._on_host else None

    def _allocate(self) -> None:
        assert self._data is not None
        self._data.create_all(on_host=self._on_host)

    def _refill(self) -> None:
        assert self._data is not None
        data = self._data
        if not data.parts:
            return
        assert self._arriving is not None
        progress = data.new_progress(whole=True)
        with self.runner.counting("refill", progress):
            self._fill(data, self._arriving, progress)

    def _fill(self, data: GpuData, arriving: Arriving, progress: JointProgress) -> None:
        """The packs' chunks to where the data is to be."""
        manifest = self._opened.manifest
        data.refill_from_packs(
            self._context.arenas, self._rings, manifest.digests, arriving, manifest.chunk_bytes, progress
        )

    def _extract(self) -> None:
        """The CPU side where CRIU can read it; its pages go on being filled."""
        assert self._cpu_side is not None
        self._cpu_side.extract()
        if not self._instance.number:
            criu_module.refuse_taken_numbers(self._cpu_side.tasks())

    def _cpu(self) -> None:
        assert self._notes is not None
        assert self._cpu_side is not None
        notes, instance = self._notes, self._instance
        self._record = Record(
            self._context.keeper, restore_key(notes.pid, instance.record_number or notes.operation_id)
        )
        self._record.keep(notes, [])
        self._cpu_side.restore(instance, self._adopt, timeout_s=self._limits.long_s)
        notes.start_ticks = _start_ticks(notes.pid)
        for member in notes.members:
            member.start_ticks = _start_ticks(member.pid)
        self._frozen = FrozenTarget(self._context, notes)
        self._frozen.lent = self._loan

    def _adopt(self, restored: Restored) -> None:
        assert self._notes is not None
        self._instance.found(self._context.reaper, restored, self._notes)
        self._context.reaper.adopt(self._notes.tree)

    def _control(self) -> None:
        self._target.restore_driver()

    def _return(self) -> None:
        assert self._data is not None
        target = self._target
        if target.notes.managed:
            if self._on_host:
                self._require_agents()
            target.fds = self._data.export_all()
            target.return_memory()
            if self._on_host:
                for member in target.members:
                    member.link().follow_access(True)

    def _require_agents(self) -> None:
        """What lies on host memory must not have to stay there: images may be older than promotion."""
        for member in self._target.members:
            try:
                member.link().hosted().close()
            except WoodfrogError as failure:
                if failure.details.get("status") != "bad_message":
                    raise
                raise RefusedError(
                    f"{self._opened.reference} is of a process whose interposer is older than restores in the mode "
                    f"{self._request.mode!r}",
                    advice="restore it with --mode eager",
                    pid=member.pid,
                ) from failure

    def _verify(self) -> None:
        """What the target is about to run on, hashed again in HBM and compared with the manifest."""
        assert self._data is not None
        data, manifest = self._data, self._opened.manifest
        if not data.parts:
            return
        progress = data.new_progress()
        with self.runner.counting("verify", progress):
            found = data.hash(manifest.chunk_bytes, progress)
        require_digests(manifest.digests, b"".join(found))

    def _commit(self) -> None:
        # What is needed afterwards is looked up before: once the target runs, nothing here may fail and end it again.
        stats = self._opened.manifest.stats
        last = LastImage(self._opened.reference, stats.gpu.new, stats.cpu.new)
        told = telling.tell(self._target.notes, self._request.environment)
        notes = self._target.notes
        if self._on_host:  # a daemon that finds this goes on with the promotion
            self._promoting = Record(self._context.keeper, promote_key(notes.pid, notes.start_ticks))
            self._promoting.keep(self._promotion_notes(), [])
        self._target.return_and_resume()
        telling.call(told)
        self._context.history.record(notes.pid, notes.start_ticks, self._store_url, last)

    # ── undo and the rest ───────────────────────────────────────────────────────────────────────────────────────

    def _end_tree(self) -> None:
        assert self._notes is not None
        assert self._cpu_side is not None
        if self._instance.number:
            self._instance.end(self._context.reaper)
        else:
            end_tree(self._context, self._notes.root_pid, self._cpu_side.restored)
        self._cpu_side.restored = False
        for record in (self._record, self._promoting):
            if record is not None:
                record.drop()

    def _promotion_notes(self) -> Notes:
        notes = copy.copy(self._target.notes)
        notes.operation, notes.handles, notes.mode = "promote", [], self._request.mode
        return notes

    def _release_data(self) -> None:
        if self._data is not None:
            self._data.release()

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        if self._instance.number and not self.runner.committed:
            failure.pid = None  # what it had inside is another process's number here
        elif self._notes is not None:
            failure.pid = failure.pid or self._notes.pid
        if self.runner.committed:
            failure.target_state = TargetState.RUNNING
        else:
            failure.target_state = TargetState.NONE
            if self._image is not None:
                failure.details["image"] = self._image.reference
        return failure

    def _release(self) -> None:
        self._release_data()
        for ring in self._rings:
            ring.free()
        if self._frozen is not None:
            self._frozen.close()
        if self._cpu_side is not None:
            self._cpu_side.close()
        if self._image is not None:
            self._image.close()
        if self._record is not None and (self.runner.committed or not self.runner.undo_failures):
            self._record.drop()
        if self._loan is not None:
            self._loan.free()

    @property
    def _images(self) -> ImageRepository:
        return self._context.store(self._request.store)

    @property
    def _opened(self) -> Image:
        assert self._image is not None
        return self._image

    def _result(self) -> dict[str, Any]:
        assert self._plan is not None
        assert self._notes is not None
        assert self._cpu_side is not None
        return {
            "name": self._notes.name,
            "pid": self._notes.pid,
            "gpu_pids": [member.pid for member in self._notes.gpu_processes],
            "root_pid": self._notes.root_pid,
            "instance": self._notes.instance,
            "ports": {str(old): new for old, new in self._notes.ports.items()},
            "image": self._plan.image,
            "state": TargetState.RUNNING,
            "log": self._notes.log_path,
            "phases": dict(self.runner.times),
            "pages_wait_s": self._cpu_side.waited_s,
            "bytes": self._plan.gpu_bytes,
            "cpu_bytes": self._plan.cpu_bytes,
            "verified": self._request.verify,
            "mode": self._request.mode,
            "warnings": self._plan.warnings,
            "visit": self._target.visit.to_dict(),
        }


def _start_ticks(pid: int) -> int:
    stat = procfs.stat(pid)
    if stat is None:
        raise BadImageError(f"CRIU restored the tree without process {pid}, which uses the GPU")
    return stat.start_ticks


def await_reaping(pids: list[int]) -> None:
    """Wait a moment for zombies with these numbers to be reaped: the target may have been stopped just now."""
    begun = time.monotonic()
    for pid in pids:
        stat = procfs.stat(pid)
        if stat is None or stat.state not in "ZX":
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, 0)  # POLLHUP: reaped, from Linux 6.9 on; an older kernel tells nobody, so it is looked
            while (now := procfs.stat(pid)) is not None and now.start_ticks == stat.start_ticks:
                limit_s = INIT_REAP_TIMEOUT_S if now.parent_pid == 1 else REAP_TIMEOUT_S
                left_s = begun + limit_s - time.monotonic()
                if left_s <= 0 or poll.poll(min(left_s, LOOK_S) * 1000):
                    break
        finally:
            os.close(pidfd)
