"""`migrate`: a running target goes to other GPUs of its machine, in the same processes.

Its memory is handed over and copied to the new GPUs while the driver takes the control state off the old ones and
restores it onto the new. Until the keeper has the commit (the notes that say so, with descriptors of the copies behind
those of the originals) the originals are there, and everything leads back to them. Must never let a process of the
target run on other GPUs than its memory is on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from woodfrog.errors import RefusedError, TargetState, WoodfrogError
from woodfrog.operations import room, sharing
from woodfrog.operations.context import Context
from woodfrog.operations.data import close_all, plan_owners
from woodfrog.operations.failure import explain
from woodfrog.operations.freezing import FreezingOperation
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.phases import Beside, Emit, Phase, Step
from woodfrog.operations.placement import Placement
from woodfrog.operations.resume import suspend_driver
from woodfrog.operations.survey import Surveyed, survey
from woodfrog.operations.twin import Twin

log = logging.getLogger(__name__)

MIGRATE = "migrate"
PRECOPY = "precopy"
MOST_ROUNDS = 3  # of copying before the target waits: the first moves everything, each other what changed meanwhile
SMALL_BYTES = 64 << 20  # as of a checkpoint's precopy: a millisecond of the bus


@dataclass(frozen=True)
class MigrateRequest:
    """What was asked for. `gpu_map`: GPUs that the target is on → GPUs that it goes to, as people write them."""

    root_pid: int
    gpu_map: dict[Any, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    precopy: bool = False


class Migrate(FreezingOperation):
    """One migration; use once."""

    def __init__(self, context: Context, request: MigrateRequest, emit: Emit | None = None) -> None:
        super().__init__(MIGRATE, context, request.timeout_s, emit)
        self._request = request
        self._surveyed: Surveyed | None = None
        self._placement: Placement | None = None
        self._moving: list[int] = []  # indices of the handles that move, once they are exported
        self._ahead: Twin | None = None
        self._twin: Twin | None = None
        self._old_fds: list[int] = []
        self._rounds: list[int] = []
        self._copied_bytes = 0

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError with the target's state."""
        try:
            self.runner.run(self._steps())
        except WoodfrogError as failure:
            raise self._settle(failure) from failure
        finally:
            self._release()
        return self._result()

    def _steps(self) -> list[Step]:
        limits = self._limits
        ahead = Phase(PRECOPY, self._precopy, self._release_ahead, limit_s=limits.long_s)
        return [
            Phase("survey", self._survey, limit_s=limits.short_s),
            Phase("prepare", self._prepare, limit_s=limits.long_s),
            *([ahead] if self._request.precopy else []),
            Phase("quiesce", self._quiesce, self._bring_home, limit_s=limits.quiesce_s),
            Phase("handover", self._handover, limit_s=limits.short_s),
            Beside(
                [
                    Phase("import", self._import, self._release_twin, limit_s=limits.short_s),
                    Phase("allocate", self._allocate, limit_s=limits.short_s),
                    Phase("copy", self._copy, limit_s=limits.long_s),
                ],
                [
                    Phase("control", self._control, limit_s=limits.driver_s),
                    Phase("restore", self._restore, limit_s=limits.driver_s),
                ],
            ),
            Phase("commit", self._commit, self._uncommit, limit_s=limits.short_s, commits=True),
            Phase("return", self._return, limit_s=limits.driver_s),
            Phase("end", self._end, limit_s=limits.short_s),
        ]

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _survey(self) -> None:
        context = self._context
        surveyed = survey(context, self._request.root_pid, image=False)
        on = {device.ordinal: device.uuid for device in surveyed.devices}
        placement = Placement(context, on, self._request.gpu_map)
        if not placement.pairs:
            raise RefusedError(
                f"{surveyed.name} is on the GPUs that were asked for already",
                advice="--gpu HERE, or --gpu THERE=HERE for one of several",
                pid=surveyed.pid,
            )
        room.require_host(surveyed.control_state_bytes, "the driver's checkpoint of the target", surveyed.pid)
        for device in surveyed.devices:
            new = placement.devices[device.ordinal]
            if new != device.uuid:
                needed = device.owned_bytes + surveyed.gpu_control_state_bytes
                room.require_gpu(context.devices.by_uuid(new), needed, "the target")
        self._surveyed, self._placement = surveyed, placement
        log.info("plan of the migration: %s to %s", surveyed.to_dict(), placement.gpu_map)

    def _prepare(self) -> None:
        assert self._surveyed is not None
        self._frozen = FrozenTarget(self._context, self._surveyed.notes(MIGRATE))
        self._target.export_ahead()
        if not self._request.precopy:  # its pause would give the offered memory back
            self._offer_control_memory(self._surveyed)

    def _precopy(self) -> None:
        """Rounds of copies while the target runs; it waits for descriptors of its memory only."""
        assert self._surveyed is not None
        target = self._target
        handles, fds, _ = target.peek(self._timeout_s)
        try:
            handles = sharing.numbered(target, handles, fds)
            moving = self._select(handles)
            self._ahead = twin = self._make_twin([handles[index] for index in moving])
            twin.source.import_all([fds[index] for index in moving])
        finally:
            close_all(fds)
        twin.copy.create_all()
        twin.take_rings()
        progress = twin.source.new_progress(whole=True)
        with self.runner.counting(PRECOPY, progress):
            self._rounds.append(twin.move(progress))
            while len(self._rounds) < MOST_ROUNDS and self._rounds[-1] > SMALL_BYTES:
                target.check_alive()
                self._rounds.append(twin.move_changed(progress))
        twin.source.release()  # what the target frees from now on is free at once
        target.export_ahead()  # what it has allocated meanwhile
        self._offer_control_memory(self._surveyed)

    def _handover(self) -> None:
        target = self._target
        # Its memory will be filled by us: what it wrote since its last image is no measure of that any more.
        self._context.baselines.forget(target.identity)
        self._export()
        handles = target.notes.handles
        self._moving = self._select(handles)
        self._twin = self._make_twin([handles[index] for index in self._moving])
        target.release()
        target.detach()

    def _import(self) -> None:
        self._moved.source.import_all([self._target.fds[index] for index in self._moving])

    def _allocate(self) -> None:
        twin, ahead = self._moved, self._ahead
        if ahead is None:
            twin.copy.create_all()
        else:
            twin.adopt(ahead)
            self._release_ahead()
        twin.take_rings()

    def _copy(self) -> None:
        twin = self._moved
        progress = twin.source.new_progress(whole=True)
        with self.runner.counting("copy", progress):
            self._copied_bytes = twin.move_changed(progress) if self._request.precopy else twin.move(progress)
            twin.require_same()

    def _restore(self) -> None:
        assert self._placement is not None
        target = self._target
        # Before it is true: a daemon that finds a process which the driver has restored must know where that is.
        target.notes.gpu_pairs = self._placement.pairs
        target.record.update(target.notes)
        target.restore_driver()

    def _commit(self) -> None:
        assert self._placement is not None
        target = self._target
        fds = self._new_fds()
        self._old_fds, target.fds = target.fds, fds
        target.record.add(fds)
        target.notes.memory_from = 1 + len(self._old_fds)
        target.notes.devices = self._placement.devices
        target.record.update(target.notes)

    def _uncommit(self) -> None:
        target = self._target
        if self._old_fds:
            target.close()
            self._old_fds, target.fds = [], self._old_fds
        target.notes.memory_from = 0
        target.notes.devices = self._on

    def _return(self) -> None:
        self._target.return_and_resume()

    def _end(self) -> None:
        """The target runs on its new memory: the old one may go. Safe to repeat."""
        self._target.record.drop()

    # ── undo and the rest ───────────────────────────────────────────────────────────────────────────────────────

    def _bring_home(self) -> None:
        retreat(self._target)
        self._target.bring_back()

    def _release_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.release()

    def _release_twin(self) -> None:
        if self._twin is not None:
            self._twin.release()

    def _release(self) -> None:
        super()._release()
        self._release_ahead()
        self._release_twin()
        close_all(self._old_fds)
        self._old_fds = []

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        """`failure` with what has become of the target."""
        if self._frozen is None:
            return failure
        if not self.runner.committed:
            return explain(failure, self._frozen, self.runner)
        failure.pid = failure.pid or self._frozen.notes.pid
        try:
            self._frozen.bring_back()
        except WoodfrogError as second:
            log.error("migrating %s: %s", self._frozen.notes.name, second.reason)
            failure.target_state = self._frozen.state_after([second])
            failure.advice = f"its memory is safe with the keeper; try `woodfrog resume {self._frozen.notes.name}`"
            return failure
        failure.target_state = TargetState.RUNNING
        return failure

    def _select(self, handles: Sequence[HandleNote]) -> list[int]:
        """Indices of the handles that move: their memory (the owner's, where several share one) is on a GPU that the
        target leaves. Host memory stays where it is."""
        assert self._placement is not None
        left = {ordinal for ordinal, uuid in self._on.items() if self._placement.devices[ordinal] != uuid}
        owners = [handles[owner] for owner in plan_owners(handles)]
        return [at for at, owner in enumerate(owners) if owner.device in left and owner.host_node < 0]

    def _make_twin(self, handles: Sequence[HandleNote]) -> Twin:
        assert self._placement is not None
        return Twin(self._context, handles, self._on, self._placement.devices, self._target.notes.user)

    def _new_fds(self) -> list[int]:
        """A descriptor for each handle: of the copies, and of what stays."""
        target = self._target
        fds = dict(zip(self._moving, self._moved.copy.export_all(), strict=True))
        try:
            for index, fd in enumerate(target.fds):
                if index not in fds:
                    fds[index] = os.dup(fd)
        except OSError:
            close_all(list(fds.values()))
            raise
        return [fds[index] for index in range(len(target.fds))]

    @property
    def _on(self) -> dict[int, str]:
        """The GPUs that the target left."""
        assert self._surveyed is not None
        return {device.ordinal: device.uuid for device in self._surveyed.devices}

    @property
    def _moved(self) -> Twin:
        assert self._twin is not None
        return self._twin

    def _result(self) -> dict[str, Any]:
        assert self._placement is not None
        notes = self._target.notes
        return {
            "name": notes.name,
            "pid": notes.pid,
            "gpu_pids": [member.pid for member in notes.gpu_processes],
            "state": TargetState.RUNNING,
            "gpu_map": {self._on[ordinal]: uuid for ordinal, uuid in self._placement.devices.items()},
            "phases": dict(self.runner.times),
            "stall_s": self._target.stall_s,
            "bytes": self._moved.source.size_bytes,
            "copied_bytes": self._copied_bytes,
            "precopied_bytes": self._rounds,
        }


def retreat(target: FrozenTarget) -> None:
    """Processes of a migration that is not committed give the new GPUs up, so that bringing the target back leads to
    the old ones. Safe to repeat."""
    if target.notes.gpu_pairs:
        suspend_driver(target, lambda: target.record.update(target.notes))
        target.notes.gpu_pairs = []
        target.record.update(target.notes)
