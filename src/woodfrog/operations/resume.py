"""`resume`: a suspended target gets its memory back and runs on, on the GPUs that it left or on others.

Refill (arena → new memory in HBM) goes beside the driver's restore. When both are done the memory is in the keeper and
there is no way but forward: what fails after that leaves the target frozen, and resuming again goes on from there.
Must never drop the suspended data before the target runs.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from woodfrog.driver.process import ProcessState
from woodfrog.errors import RefusedError, TargetLostError, TargetState, WoodfrogError
from woodfrog.operations import room
from woodfrog.operations.context import Context
from woodfrog.operations.data import GpuData
from woodfrog.operations.frozen import LOCK_TIMEOUT_S, FrozenTarget, settled_state
from woodfrog.operations.lent import LentMemory
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.members import Member, side_by_side
from woodfrog.operations.notes import COLD, HOLD_DEVICE, HOLD_MAPPED, WARM, Notes, Record, promote_key, suspend_key
from woodfrog.operations.phases import Beside, Emit, Phase, Runner, Step
from woodfrog.operations.placement import Placement
from woodfrog.operations.promote import MAPPED, ORDERED, movable
from woodfrog.operations.space import Space

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeRequest:
    """What was asked for: the notes of the suspended target, and which of its GPUs becomes which (as people write it,
    placement.resolve). `mode`: of one whose data is to be promoted."""

    notes: Notes
    gpu_map: dict[str, str] = field(default_factory=dict)
    mode: str = ""


class Resume:
    """One resume; use once."""

    def __init__(
        self,
        context: Context,
        request: ResumeRequest,
        emit: Emit | None = None,
        *,
        runner: Runner | None = None,
        prefix: str = "",
    ) -> None:
        """`runner`: of an operation that this one is a part of, whose phases are told apart by `prefix`."""
        self._context = context
        self._suspended = request.notes
        self.runner = runner or Runner("resume", emit)
        self._prefix = prefix
        self._limits = PhaseLimits()
        self._key = (request.notes.pid, request.notes.start_ticks)
        self._record = Record(context.keeper, suspend_key(*self._key), exists=True)
        notes = copy.copy(request.notes)
        notes.operation = "resume"
        notes.gpu_pairs = []
        if request.gpu_map:
            self._place(notes, request.gpu_map)
        self._target = FrozenTarget(context, notes)
        self._data = GpuData(context.devices, notes.handles, notes.devices)
        self._spaces = spaces_of(context, notes)
        self._target.lent = loan_of(context, notes, self._spaces)
        self._is_held = notes.hold in (HOLD_DEVICE, HOLD_MAPPED)  # the keeper has descriptors of its data
        self._on_host = movable(notes.handles) if notes.hold == HOLD_MAPPED else []
        self._mode = ORDERED if request.mode == ORDERED else MAPPED

    def _place(self, notes: Notes, gpu_map: dict[str, str]) -> None:
        if notes.level == WARM:
            raise RefusedError(
                f"{notes.name} waits with its context on its GPU, and the driver moves only what it has checkpointed",
                advice="resume it, then `woodfrog migrate`; or suspend it cold",
                pid=notes.pid,
                target_state=self._waiting,
            )
        if lent_by_driver(notes):
            raise RefusedError(
                f"the driver lends {notes.name} its memory on the GPU where it was",
                advice="resume it without --gpu",
                pid=notes.pid,
                target_state=self._waiting,
            )
        placement = Placement(self._context, notes.devices, gpu_map)
        notes.devices, notes.gpu_pairs = placement.devices, placement.pairs

    # ── the phases, in their order ──────────────────────────────────────────────────────────────────────────────

    def begin(self) -> list[Phase]:
        return [self._phase("survey", self._survey, limit_s=self._limits.short_s)]

    def data(self) -> list[Phase]:
        limits = self._limits
        return [
            self._phase("allocate", self._allocate, self._unallocate, limit_s=limits.short_s),
            self._phase("refill", self._refill, limit_s=limits.long_s),
        ]

    def control(self) -> list[Phase]:
        """Beside `data`."""
        return [self._phase("control", self._control, self._uncontrol, limit_s=self._limits.driver_s)]

    def commit(self) -> Phase:
        return self._phase("commit", self._commit, limit_s=self._limits.short_s, commits=True)

    def back(self) -> Phase:
        return self._phase("return", self._return, limit_s=self._limits.short_s)

    def end(self) -> Phase:
        return self._phase("end", self._end, limit_s=self._limits.short_s)

    def _phase(self, name: str, do: Callable[[], None], undo: Callable[[], None] | None = None, **more: Any) -> Phase:
        return Phase(self._prefix + name, do, undo, **more)

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError with the target's state."""
        steps: list[Step] = [
            *self.begin(),
            Beside(self.data(), self.control()),
            self.commit(),
            self.back(),
            self.end(),
        ]
        try:
            self.runner.run(steps)
        except WoodfrogError as failure:
            raise self.settle(failure) from failure
        finally:
            self.release()
        return self.result()

    def result(self) -> dict[str, Any]:
        return {
            "name": self._target.notes.name,
            "pid": self._target.notes.pid,
            "gpu_pids": [member.pid for member in self._target.members if member.alive],
            "state": TargetState.RUNNING,
            "phases": dict(self.runner.times),
            "bytes": self._data.size_bytes,
            "visit": self._target.visit.to_dict(),
        }

    def release(self) -> None:
        """Everything that the operation itself still holds; safe to repeat."""
        self._data.release()
        self._target.close()

    def needed_bytes(self) -> dict[str, int]:
        """Device memory that the target comes back to, by the devices' UUIDs."""
        notes = self._target.notes
        warm = notes.level == WARM
        control_bytes = 0 if warm else len(self._target.members) * room.gpu_control_state_bytes(notes.simulated)
        needed = dict.fromkeys(notes.devices.values(), control_bytes)
        for uuid in [] if warm else list(needed)[:1]:
            needed[uuid] += notes.driver_bytes  # on which of them is not known
        for part in self._data.parts if not self._is_held else ():
            needed[notes.devices[part.device]] += part.size_bytes
        for index in self._on_host:
            needed[notes.devices[notes.handles[index].device]] += notes.handles[index].size
        return needed

    @property
    def frozen_target(self) -> FrozenTarget:
        """For the table of those that could not be brought back."""
        return self._target

    def _survey(self) -> None:
        if not self._target.alive:
            self.discard()
            raise TargetLostError(
                f"process {self._target.notes.pid} ended while it was suspended",
                pid=self._target.notes.pid,
                target_state=TargetState.GONE,
                advice="see the target's log; restore an image of it",
            )
        wanted = ProcessState.RUNNING if self._target.notes.level == WARM else ProcessState.CHECKPOINTED
        for member in self._target.members:
            if not member.alive:
                log.warning("process %d of %s ended while it was suspended", member.pid, self._target.notes.name)
                continue
            state = member.driver.state()
            if state is not wanted:
                raise WoodfrogError(
                    f"the driver says process {member.pid} is {state.name.lower()}, not {wanted.name.lower()}",
                    advice="somebody else has had it in hand; end the process",
                    pid=member.pid,
                    target_state=self._waiting,
                )
        for uuid, size in self.needed_bytes().items():
            room.require_gpu(self._context.devices.by_uuid(uuid), size, "resuming the target")

    def _allocate(self) -> None:
        if self._target.lent is not None:
            return  # the driver makes it, and lends it
        if self._is_held:
            notes_fd, *self._target.fds = self._context.keeper.fetch(self._record.key)
            os.close(notes_fd)
            return
        self._data.create_all()
        self._target.fds = self._data.export_all()

    def _refill(self) -> None:
        data, target = self._data, self._target
        if target.lent is not None:
            return
        if data.parts and not self._is_held:
            progress = data.new_progress()
            with self.runner.counting(self._prefix + "refill", progress):
                data.refill(self._context.arenas, [self._spaces[part.device] for part in data.parts], progress)
        # Only now: what the record holds must be whole, for a daemon that finds it.
        target.record.keep(target.notes, target.fds)

    def _unallocate(self) -> None:
        self._target.record.drop()
        self._target.close()
        self._data.release()

    def _control(self) -> None:
        if not self._target.alive:
            self._target.check_alive()
        if self._suspended.gpu_pairs != self._target.notes.gpu_pairs:
            # For a daemon that finds processes which the driver has restored: that is where they are.
            self._suspended.gpu_pairs = self._target.notes.gpu_pairs
            self._record.update(self._suspended)
        if self._target.lent is not None:
            bring_in(self._target)  # unlocked once there is no way back: what it writes is in the arena no more
            return
        self._target.restore_driver()

    def _uncontrol(self) -> None:
        if self._target.notes.level != WARM:
            suspend_driver(self._target, self._remember)

    def _remember(self) -> None:
        self._record.update(self._suspended)  # it has the same members
        if self._target.record.exists:
            self._target.record.update(self._target.notes)

    def _commit(self) -> None:
        """Nothing to do: both halves are there, and from here the way is forward."""

    def _return(self) -> None:
        target = self._target
        if target.lent is not None:
            target.restore_driver()
        if self._on_host:  # a daemon that finds this goes on with the promotion
            notes = self._promotion_notes()
            target.return_memory()
            for member in target.members:
                member.link().follow_access(True)
            promoting = Record(self._context.keeper, promote_key(notes.pid, notes.start_ticks))
            promoting.keep(notes, [])
        target.return_and_resume()

    @property
    def promotion(self) -> Notes | None:
        """What is to be promoted once it runs."""
        return self._promotion_notes() if self._on_host else None

    def _promotion_notes(self) -> Notes:
        notes = copy.copy(self._target.notes)
        notes.operation, notes.handles, notes.mode = "promote", [], self._mode
        notes.level, notes.hold, notes.extents = COLD, "", []
        return notes

    def _end(self) -> None:
        """The target runs on its own memory: the suspended data and the records may go. Safe to repeat."""
        self._record.drop()
        self._target.record.drop()
        self._forget()

    def _forget(self) -> None:
        # Whoever takes it out of the table gives its memory back: another thread may see the process's end as well.
        if self._context.suspended.pop(self._key, None) is not None:
            for space in self._spaces.values():
                space.free()

    @property
    def _waiting(self) -> str:
        """What it is until it has come back."""
        return TargetState.STANDBY if self._suspended.hold else TargetState.SUSPENDED

    def digests(self, chunk_bytes: int) -> bytes:
        """Of its memory as it lies in HBM now, before it is returned."""
        data = self._data
        if self._is_held:
            data.import_all(self._target.fds)
        progress = data.new_progress()
        with self.runner.counting(self._prefix + "verify", progress):
            return b"".join(data.hash(chunk_bytes, progress))

    def discard(self) -> None:
        """The process is gone: its data is of no use to anybody."""
        self._record.drop()
        self._forget()

    def settle(self, failure: WoodfrogError) -> WoodfrogError:
        """`failure` with what has become of the target."""
        failure.pid = failure.pid or self._target.notes.pid
        if isinstance(failure, TargetLostError):
            return failure
        if not self.runner.committed:
            failure.target_state = TargetState.FROZEN if self.runner.undo_failures else self._waiting
            return failure
        try:
            self._target.bring_back()
            self._end()
        except WoodfrogError as second:
            log.error("resuming %s: %s", self._target.notes.name, second.reason)
            failure.target_state = TargetState.FROZEN
            failure.advice = "its data is safe with the keeper; try `woodfrog resume` again"
            return failure
        failure.target_state = TargetState.RUNNING
        return failure


def spaces_of(context: Context, notes: Notes) -> dict[int, Space]:
    """The arena memory that a suspended target's data lies in, by the target's device ordinals."""
    spaces: dict[int, Space] = {}
    for device in {extent.device for extent in notes.extents}:
        extents = [extent for extent in notes.extents if extent.device == device]
        spaces[device] = Space(context.arenas, extents, notes.user)
    return spaces


def loan_of(context: Context, notes: Notes, spaces: dict[int, Space]) -> LentMemory | None:
    """Of a suspended target whose driver lends its memory."""
    return LentMemory(context, notes, spaces) if lent_by_driver(notes) else None


def lent_by_driver(notes: Notes) -> bool:
    """Whether the target's data is in the arena although it has no interposer."""
    return bool(notes.extents) and not notes.managed


def bring_in(target: FrozenTarget) -> None:
    """What a driver lends for its restore is filled; the processes stay locked."""
    assert target.lent is not None
    for member in target.members:
        if member.alive and settled_state(member) is ProcessState.CHECKPOINTED:
            target.lent.bring_in(member)


def suspend_driver(target: FrozenTarget, remember: Callable[[], None]) -> None:
    """The driver's state off the GPU again, from whichever of its states it is in. `remember` writes the notes down:
    which GPUs a process that is checkpointed comes from nobody else could tell."""
    living = [member for member in target.members if member.alive]
    if target.lent is not None:
        # Its data is in the arena, and it was not let run: what was filled of its memory so far may go.
        for member in living:
            settled_state(member)
            target.lent.discard(member)
        return
    states = side_by_side(living, _locked)
    locked = [member for member, state in zip(living, states, strict=True) if state is ProcessState.LOCKED]
    if any(member.note.moved != target.notes.gpu_pairs for member in locked):
        for member in locked:
            member.note.moved = list(target.notes.gpu_pairs)
        remember()
    side_by_side(locked, lambda member: member.driver.checkpoint())


def _locked(member: Member) -> ProcessState:
    state = settled_state(member)
    if state is ProcessState.RUNNING:
        member.driver.lock(LOCK_TIMEOUT_S)
        state = member.driver.state()
    return state
