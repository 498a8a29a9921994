"""`checkpoint`: an image of a running target, which then runs on, or (`stop`) ends once the image is durable.

Phases: survey, prepare, quiesce, handover, then control and cpu with import and hash beside them: only what is new to
the store crosses the bus. Leave-running begins with a snapshot, a copy of all memory within the GPU's, and goes on with
return once that is made: it is hashed, drained and written while the target runs. Without room for all of it the
target's memory is hashed first and only what is new is captured (copied, or drained where even that does not fit). The
driver brings its state back beside all this. Stop drains and writes before it commits, and ends the target last. Must
never end a target without a committed image, never commit what was not drained whole, and never let a target run before
all that is new has left its memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from woodfrog.errors import RefusedError, TargetState, UsageError, WoodfrogError
from woodfrog.operations import concurrent, history, lent, precopy, room
from woodfrog.operations import manifest as manifests
from woodfrog.operations.background import Elsewhere, background_threads, give_way, in_background
from woodfrog.operations.checkpoint_plan import CheckpointPlan, CheckpointRequest, make_plan, whole_chunks
from woodfrog.operations.clean import Clean, CleanChangedError
from woodfrog.operations.concurrent import Allowance
from woodfrog.operations.context import Context
from woodfrog.operations.control_files import ControlFiles
from woodfrog.operations.copy_on_write import CopyOnWrite
from woodfrog.operations.cpu_dump import CpuDump
from woodfrog.operations.data import GpuData
from woodfrog.operations.end_tree import end_tree
from woodfrog.operations.failure import explain
from woodfrog.operations.freezing import FreezingOperation
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.history import Baseline, LastImage
from woodfrog.operations.increment import Increment
from woodfrog.operations.lent import LentMemory
from woodfrog.operations.phases import Beside, Emit, Phase, Runner, Step
from woodfrog.operations.precopy import Precopy
from woodfrog.operations.rings import take_rings
from woodfrog.operations.space import Space
from woodfrog.operations.staging import first_positions
from woodfrog.operations.survey import Surveyed, survey
from woodfrog.target.tracking import Tracked

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest
    from woodfrog.image.repository import ImageRepository
    from woodfrog.image.writer import ImageWriter

log = logging.getLogger(__name__)

STALL_PHASES = (
    "quiesce",
    "handover",
    "control",
    "cpu",
    "restore",
    "return",
)  # the target waits for these, one after the other


class Checkpoint(FreezingOperation):
    """One checkpoint; use once. Everything it holds is released when `run` returns or raises."""

    def __init__(
        self, context: Context, request: CheckpointRequest, emit: Emit | None = None, runner: Runner | None = None
    ) -> None:
        super().__init__("checkpoint", context, request.timeout_s, emit, runner=runner)
        self._request = request
        self._plan: CheckpointPlan | None = None
        self._cpu_side: CpuDump | None = None
        self._writer: ImageWriter | None = None
        self._increment: Increment | None = None
        self._allowance: Allowance | None = None
        self._precopy: Precopy | None = None
        self._cow: CopyOnWrite | None = None
        self._control_files = ControlFiles(context.runtime_directory, context.control_files_unfit)
        self._draft: manifests.Draft | None = None
        self._store_url = ""
        self._reference = ""
        self._image_path = ""
        self._manifest: Manifest | None = None
        self._tracked = Tracked()
        self._clean: Clean | None = None
        self._elsewhere: Callable[[], None] = give_way
        self._may_drain = threading.Event()  # not while the target's memory is being mapped again
        self._may_drain.set()

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
        if request.precopy:
            begin.append(Phase(precopy.PHASE, self._run_precopy, self._release_precopy, limit_s=limits.long_s))
        quiesce = Phase("quiesce", self._quiesce, self._bring_back, limit_s=limits.quiesce_s)
        handover = Phase("handover", self._handover, limit_s=limits.short_s)
        import_ = Phase("import", self._import, self._release_data, limit_s=limits.short_s)
        hash_ = Phase("hash", self._hash, limit_s=limits.long_s)
        drain = Phase("drain", self._drain, self._release_copies, limit_s=limits.long_s)
        control = Phase("control", self._control, limit_s=limits.driver_s)
        cpu = [Phase("cpu", self._cpu, self._abort_writer, limit_s=limits.long_s)] if request.cpu else []
        write = Phase("write", self._write, self._abort_writer, limit_s=limits.long_s)
        commit = Phase("commit", self._commit, self._abort_writer, limit_s=limits.long_s, commits=True)
        if request.stop:
            end = Phase("end", self._end, limit_s=limits.long_s)
            return [*begin, quiesce, handover, Beside([import_, hash_, drain, write], [control, *cpu]), commit, end]
        snapshot = Phase("snapshot", self._snapshot, self._release_copies, limit_s=limits.long_s)
        capture = Phase("capture", self._capture, self._release_copies, limit_s=limits.long_s)
        restore = Phase("restore", self._restore, limit_s=limits.driver_s)
        captured = (snapshot.name, capture.name)
        back = Phase("return", self._return, limit_s=limits.driver_s, after=captured, ready=self._is_whole)
        beside = Beside([import_, snapshot, hash_, capture, drain], [control, *cpu, restore, back])
        gently = [replace(one, do=partial(self._gently, one.do)) for one in (write, commit)]
        return [*begin, quiesce, handover, beside, *gently]

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _survey(self) -> None:
        request, context = self._request, self._context
        if request.stop and not request.cpu:
            raise UsageError(
                "stopping a target without its CPU side would lose it", advice="leave it running, or add it"
            )
        concurrent.check_way(request.concurrent, stop=request.stop)
        if request.precopy and not request.incremental:
            raise UsageError("--full moves everything once more, whatever was copied before", advice="leave one out")
        if request.cpu:
            self._cpu_side = CpuDump(context)
        surveyed = survey(context, request.root_pid, image=request.cpu)
        images = self._images
        self._store_url = images.url
        self._plan = make_plan(context, request, surveyed, images)
        log.info("plan of the checkpoint: %s", self._plan.to_dict())

    def _prepare(self) -> None:
        """Memory and disk at hand while the target still runs: it shall not wait for either."""
        context, request, plan = self._context, self._request, self._planned
        surveyed, chunk_bytes = plan.surveyed, self._images.chunk_bytes
        self._elsewhere = Elsewhere([process.pid for process in surveyed.processes])
        if request.precopy:
            pass  # it takes what it needs, and then what will be left
        elif plan.ring:
            self._spaces = take_rings(context.arenas, plan.arena_bytes, surveyed.user, chunk_bytes)
        else:
            self._take_spaces(plan.arena_bytes)
        self._writer = self._images.begin(plan.name, compress=request.compress)
        if not request.stop and request.concurrent != concurrent.STOP:
            returning_bytes = surveyed.gpu_control_state_bytes
            free_bytes = {one.ordinal: context.devices.by_uuid(one.uuid).free_bytes() for one in surveyed.devices}
            self._allowance = Allowance(free_bytes, returning_bytes)
            for device in surveyed.devices:
                first_positions(device.owned_bytes // chunk_bytes)
        self._frozen = FrozenTarget(context, surveyed.notes("checkpoint", stop=request.stop, store=request.store))
        self._frozen.notes.image = plan.name
        self._frozen.notes.directory = str(self._writer.directory)
        if self._cpu_side is not None:
            self._cpu_side.prepare(surveyed, self._writer)
        self._draft = manifests.Draft.of(context, surveyed, self._frozen.notes)
        if not surveyed.managed and request.cpu and len(self._frozen.members) == 1 and lent.wanted():
            notes = self._frozen.notes
            self._frozen.lent = LentMemory.prepared(context, notes, self._spaces, [surveyed.pid])
        self._frozen.export_ahead()
        if not request.precopy:  # its pause would give the offered memory back
            self._offer_control_memory(surveyed)

    def _take_spaces(self, sizes_bytes: dict[int, int]) -> None:
        """Arena memory near each device, by the target's ordinals."""
        context, surveyed = self._context, self._planned.surveyed
        for device in surveyed.devices:
            if size_bytes := sizes_bytes.get(device.ordinal, 0):
                self._spaces[device.ordinal] = Space.take(
                    context.arenas,
                    whole_chunks(size_bytes, self._images.chunk_bytes),
                    surveyed.user,
                    node=context.devices.node_of(device.uuid),
                )

    def _run_precopy(self) -> None:
        plan, target = self._planned, self._target
        if not target.notes.managed:
            raise RefusedError(
                "the driver keeps this target's memory, so it cannot be read while the target runs",
                advice="start it with `woodfrog run`, or leave out --precopy",
            )
        self._precopy = Precopy(self._context, target, self._writing, store_ahead=self._request.stop)
        self._precopy.run(self.runner, self._timeout_s)
        left_bytes = history.with_slack(self._precopy.last_bytes)
        arenas = self._context.arenas
        wanted = {device: min(size_bytes, left_bytes) for device, size_bytes in plan.arena_bytes.items()}
        if sum(wanted.values()) <= arenas.free_bytes and room.arena_can_take(arenas, sum(wanted.values())):
            self._take_spaces(wanted)
        target.export_ahead()  # what it has allocated meanwhile
        self._offer_control_memory(plan.surveyed)

    def _handover(self) -> None:
        target = self._target
        self._reserve_loan()
        if not target.notes.managed:
            return
        self._export()
        with target.stall.part("dirty"):
            self._tracked = target.take_dirty()
        target.release()
        if self._request.cpu:
            target.detach()

    def _import(self) -> None:
        """What can be prepared of the data's way once the target waits for its driver only; then map it."""
        target = self._target
        if not target.notes.managed:
            return
        target.check_mappings()
        target.prepare_return()
        self._data = GpuData(self._context.devices, target.notes.handles, target.notes.devices)
        self._clean = self._find_clean(self._data, self._tracked)
        if not self._request.stop:
            self._cow = CopyOnWrite(
                self._data,
                target.members,
                in_background=lambda: target.resumed_at > 0.0,
                turn=self._may_drain.wait,
                let_drain=self._may_drain.set,
            )
            target.before_resume = self._cow.arm
        self._increment = Increment(
            self._context,
            self._data,
            self._writing,
            self._spaces,
            target.notes.user,
            everything=not self._request.incremental,
            clean=self._clean,
            check_clean=self._request.check_clean,
            way=self._request.concurrent,
            allowance=self._allowance,
            turn=self._may_drain.wait,
            in_background=lambda: target.resumed_at > 0.0,
            giving_way=self._elsewhere,
            precopy=self._precopy,
            cow=self._cow,
        )
        super()._import()

    def _find_clean(self, data: GpuData, tracked: Tracked) -> Clean | None:
        """What need not be hashed; None when the target does not follow its launches."""
        target = self._target
        if not tracked.told:
            return None
        chunk_bytes = self._writing.chunk_bytes
        baseline = self._context.baselines.get(target.identity)
        cuts = data.cuts(chunk_bytes)
        clean = Clean(
            data.handles, data.parts, cuts, chunk_bytes, tracked, baseline, full=not self._request.incremental
        )
        log.info("%d bytes cannot have been written; %s", clean.clean_bytes, clean.reason or "the rest is hashed")
        return clean

    def _keep_baseline(self) -> None:
        """From the committed image on, the target need not tell what it wrote before."""
        if self._clean is None or self._data is None or self._increment is None or self._request.stop:
            return
        handles = tuple(self._data.handles[index] for part in self._data.parts for index in part.indices)
        operation = self._target.notes.operation_id
        baseline = Baseline(operation, self._images.chunk_bytes, handles, self._increment.digests)
        self._context.baselines.set(self._target.identity, baseline)
        self._target.tell_committed()

    def _hash(self) -> None:
        if self._data is not None and self._increment is not None and self._data.parts:
            progress = self._data.new_progress()
            with self.runner.counting("hash", progress):
                try:
                    self._increment.hash(progress)
                except CleanChangedError:
                    self._context.baselines.forget(self._target.identity)  # not believed again before a new one
                    raise
            if self._planned.tight:
                self._images.require(self._increment.amounts.new, "the image")

    def _control(self) -> None:
        if self._cpu_side is not None:  # CRIU needs a tenth of a second before it looks at the target
            names, stop, limits = self._control_files.names(), self._request.stop, self._limits
            # It waits for this phase, and for what the next one does before it.
            wait_s = limits.driver_s + limits.long_s
            self._cpu_side.begin(self._target, self._writing, names, stop=stop, timeout_s=limits.long_s, wait_s=wait_s)
        super()._control()

    def _cpu(self) -> None:
        assert self._cpu_side is not None
        chunk_bytes, stop = self._images.chunk_bytes, self._request.stop
        with self._control_files.saved(chunk_bytes, runs_on=not stop) as passed_over:
            self._cpu_side.dump(self._target, self._writing, passed_over, stop=stop, timeout_s=self._limits.long_s)

    def _snapshot(self) -> None:
        if self._data is not None and self._increment is not None and self._increment.plan_snapshot():
            progress = self._data.new_progress()
            with self.runner.counting("snapshot", progress):
                self._increment.snapshot(progress)

    def _is_whole(self) -> bool:
        """Whether nothing that is still to be done looks at the target's memory."""
        return self._increment is not None and self._increment.whole

    def _capture(self) -> None:
        if self._data is not None and self._increment is not None and self._data.parts:
            progress = self._increment.plan_capture()
            with self.runner.counting("capture", progress):
                self._increment.capture(progress)

    def _drain(self) -> None:
        if self._data is None or self._increment is None or not self._data.parts:
            return
        increment = self._increment
        # A target that ends waits for everything, so there is nothing to capture first.
        progress = increment.plan_capture() if self._request.stop else increment.plan_drain()
        if not self._request.stop:
            self._writing.threads = background_threads()  # the target waits for none of it, nor does its return
        with self.runner.counting("drain", progress):
            (increment.capture if self._request.stop else increment.drain)(progress)

    def _restore(self) -> None:
        self._target.bring_back_driver()

    def _return(self) -> None:
        # A drain beside it makes the driver's mapping calls three times as long (concurrent_bf8b5b4.json, 2026-11-30).
        self._may_drain.clear()
        try:
            self._target.bring_back_memory()
        finally:
            self._may_drain.set()
        if self._target.notes.managed:
            self._target.stall.ask(self._target.members)
        if self._cow is None or not self._cow.active:
            self._release_data()
        self._target.close()

    def _gently(self, work: Callable[[], None]) -> None:
        """The target runs on beside it."""
        self._writing.threads = background_threads()
        in_background(work, self._elsewhere)

    def _write(self) -> None:
        if self._data is not None and self._increment is not None and self._data.parts:
            progress = self._increment.plan_write()
            with self.runner.counting("write", progress):
                self._increment.write(progress)

    def _commit(self) -> None:
        assert self._draft is not None
        cpu = self._cpu_side
        manifest = self._draft.finish(
            self._target,
            parts=self._data.parts if self._data else [],
            digests=self._increment.digests if self._increment else b"",
            chunk_bytes=self._images.chunk_bytes,
            parent=self._planned.last.reference if self._planned.last else "",
            dumped=cpu.dumped if cpu else None,
            criu=cpu.criu if cpu else None,
            leave_running=not self._request.stop,
            phases=self.runner.times,
        )
        with self._control_files.checked():
            mapped = self._control_files.for_image()
            if self._target.lent is not None:
                mapped += self._target.lent.for_image(self._target.notes.pid)
            cuts = cpu.pages_cuts(self._writing) if cpu else {}
            committed = self._writing.commit(manifest, cuts=cuts, mapped=mapped)
        self._reference, self._image_path = committed.reference, committed.path
        self._manifest = committed.manifest
        notes = self._target.notes
        stats = committed.manifest.stats
        last = LastImage(committed.reference, stats.gpu.new, stats.cpu.new)
        self._context.history.record(notes.pid, notes.start_ticks, self._store_url, last)
        self._keep_baseline()

    def _end(self) -> None:
        """The image is durable; now the target may go. Safe to repeat."""
        end_tree(self._context, self._target.notes.root_pid, self._target.alive)
        self._target.record.drop()

    # ── undo and the rest ───────────────────────────────────────────────────────────────────────────────────────

    def _abort_writer(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _release_copies(self) -> None:
        if self._increment is not None:
            self._increment.release()

    def _release_precopy(self) -> None:
        if self._precopy is not None:
            self._precopy.release()

    def _offer_control_memory(self, surveyed: Surveyed) -> None:
        if not self._request.cpu:
            super()._offer_control_memory(surveyed)
            return
        # A dump that need not copy it is worth more than huge pages.
        self._target.offer_control_memory(
            room.control_state_bytes(surveyed.simulated), self._control_files, surveyed.control_state_bytes
        )

    def _release(self) -> None:
        self._control_files.close()
        self._release_precopy()
        self._abort_writer()  # does nothing after the commit
        if self._cpu_side is not None:
            self._cpu_side.close()
        self._release_copies()
        super()._release()

    @property
    def _images(self) -> ImageRepository:
        return self._context.store(self._request.store)

    @property
    def _planned(self) -> CheckpointPlan:
        assert self._plan is not None
        return self._plan

    @property
    def _writing(self) -> ImageWriter:
        assert self._writer is not None
        return self._writer

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        if self._frozen is None:
            return failure  # refused by the survey: untouched
        if not self.runner.committed:
            self._leave_loan()
            return explain(failure, self._frozen, self.runner)
        failure.pid = failure.pid or self._frozen.notes.pid
        failure.details["image"] = self._reference
        failure.advice = f"the image {self._reference} is complete"
        if self._request.stop:
            self._end()
        failure.target_state = TargetState.GONE if self._request.stop else TargetState.RUNNING
        return failure

    def _tracking(self) -> dict[str, Any]:
        """What following the launches was good for."""
        clean = self._clean
        if clean is None:
            return {"tracked": False}
        return {
            "tracked": True,
            "launches": clean.tracked.launches,
            "covered_launches": clean.tracked.covered,
            "clean_bytes": clean.clean_bytes,
            "clean_checked": self._request.check_clean,
            "unclean_reason": clean.reason,
        }

    def _result(self) -> dict[str, Any]:
        assert self._manifest is not None
        notes, increment = self._target.notes, self._increment
        stats = self._manifest.stats
        return {
            "image": self._reference,
            "path": self._image_path,
            "parent": self._manifest.parent or "",
            "name": notes.name,
            "pid": notes.pid,
            "gpu_pids": [member.pid for member in notes.gpu_processes],
            "state": TargetState.GONE if self._request.stop or not self._target.alive else TargetState.RUNNING,
            "stopped": self._request.stop,
            "phases": dict(self.runner.times),
            "stall_s": self._target.stall_s,
            "stall_parts": self._stall_parts(),
            "driver_s": self._target.driver_s,
            "stall_detail": self._target.stall.to_dict(),
            "precopy": self._precopy.stats.to_dict() if self._precopy else {},
            "concurrent": [way.to_dict() for way in increment.ways] if increment else [],
            "copy_on_write": self._cow.to_dict() if self._cow else {},
            "bytes": self._manifest.gpu_bytes + self._manifest.cpu_bytes,
            "gpu_bytes": self._manifest.gpu_bytes,
            "cpu_bytes": self._manifest.cpu_bytes,
            "gpu_handles": len(notes.handles),
            "gpu_new_bytes": stats.gpu.new,
            "gpu_zero_bytes": stats.gpu.zero,
            "cpu_new_bytes": stats.cpu.new,
            "stored_bytes": stats.gpu.stored + stats.cpu.stored,
            **self._tracking(),
            "chunks": increment.chunk_count if increment else 0,
            "new_chunks": increment.new_chunk_count if increment else 0,
            "ring": increment.streamed if increment else False,
            "control_memory_bytes": self._target.control_memory_taken,
            "lent_bytes": sum(file.size_bytes for file in self._manifest.lent_files),
            "control_file_bytes": sum(file.size_bytes for file in self._manifest.mapped_files),
            "visit": self._target.visit.to_dict(),
        }

    def _stall_parts(self) -> dict[str, float]:
        """What the target waited for, in seconds: phases one after the other, and `data`, for what was new to be out of
        its memory once everything else was ready."""
        times, waits = self.runner.times, self.runner.waits
        parts: dict[str, float] = {name: times[name] for name in STALL_PHASES if name in times}
        if self._precopy is not None:
            parts[precopy.PHASE] = self._precopy.stats.pause_s
        parts["data"] = waits.get("return", 0.0)
        return parts
