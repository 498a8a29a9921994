"""`suspend`: the data goes to the arena; the process stays. Cold: checkpointed by the driver, the GPU is left empty.
Warm: its context stays on the GPU with the control state, and it waits at the gate; back in milliseconds and a copy.

The commit point is the keeper's acknowledgement of the `suspend:` record: notes and the arena's memfd. Until then the
target's own memory is in the keeper and goes back on any failure; must never let go of that memory before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from woodfrog.errors import NoSpaceError, RefusedError, TargetState, WoodfrogError
from woodfrog.operations import lent, room
from woodfrog.operations.context import Context
from woodfrog.operations.data import GpuData
from woodfrog.operations.failure import explain
from woodfrog.operations.freezing import FreezingOperation
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.lent import LentMemory
from woodfrog.operations.notes import COLD, WARM, ExtentNote, Record, suspend_key
from woodfrog.operations.phases import Beside, Emit, Phase, Runner, Step
from woodfrog.operations.space import Space
from woodfrog.operations.survey import Surveyed, survey
from woodfrog.target.watchdogs import time_outs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SuspendRequest:
    """What was asked for."""

    root_pid: int
    timeout_s: float = 30.0
    level: str = COLD


@dataclass(frozen=True)
class SuspendPlan:
    """What the survey decided; can be printed."""

    surveyed: Surveyed
    arena_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.surveyed.to_dict(), "arena_bytes": self.arena_bytes}


class Suspend(FreezingOperation):
    """One suspend; use once."""

    def __init__(
        self,
        context: Context,
        request: SuspendRequest,
        emit: Emit | None = None,
        *,
        runner: Runner | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__("suspend", context, request.timeout_s, emit, runner=runner, prefix=prefix)
        self._request = request
        self.ended = False  # the target's own memory has been let go
        self._record: Record | None = None
        self._plan: SuspendPlan | None = None
        self._warnings: list[str] = []

    # ── the phases, in their order ──────────────────────────────────────────────────────────────────────────────

    def begin(self) -> list[Phase]:
        """Until the data is on its way the target waits for nothing but these."""
        limits = self._limits
        return [
            self._phase("survey", self._survey, limit_s=limits.short_s),
            self._phase("prepare", self._prepare, limit_s=limits.long_s),
            self._phase("quiesce", self._quiesce, self._bring_back, limit_s=limits.quiesce_s),
            self._phase("handover", self._handover, limit_s=limits.short_s),
        ]

    def data(self) -> list[Phase]:
        limits = self._limits
        return [
            self._phase("import", self._import, self._release_data, limit_s=limits.short_s),
            self._phase("drain", self._drain, limit_s=limits.long_s),
        ]

    def control(self) -> list[Phase]:
        """Beside `data`."""
        if self._request.level == WARM:
            return []
        return [self._phase("control", self._control, limit_s=self._limits.driver_s)]

    def commit(self, *, last: bool = True) -> Phase:
        """`last`: nothing can be taken back afterwards."""
        return self._phase("commit", self._commit, self._uncommit, limit_s=self._limits.short_s, commits=last)

    def end(self) -> Phase:
        return self._phase("end", self._end, limit_s=self._limits.short_s)

    def _phase(self, name: str, do: Callable[[], None], undo: Callable[[], None] | None = None, **more: Any) -> Phase:
        return Phase(self._prefix + name, do, undo, **more)

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError with the target's state."""
        steps: list[Step] = [*self.begin(), Beside(self.data(), self.control()), self.commit(), self.end()]
        try:
            self.runner.run(steps)
        except WoodfrogError as failure:
            raise self.settle(failure) from failure
        finally:
            self._release()
        return self.result()

    def _survey(self) -> None:
        surveyed = survey(self._context, self._request.root_pid, image=False)
        warm = self._request.level == WARM
        if warm and not surveyed.managed:
            raise RefusedError(
                "the driver keeps this target's memory, and only its own checkpoint takes it off the GPU",
                advice="leave out --level warm, or start the program with `woodfrog run`",
                pid=surveyed.pid,
            )
        control_bytes = 0 if warm else surveyed.control_state_bytes
        to_populate = max(0, surveyed.owned_bytes - self._context.arenas.prepared_bytes)
        room.require_host(control_bytes + to_populate, "suspending the target", surveyed.pid)
        require_arena(self._context, surveyed)
        self._plan = SuspendPlan(surveyed, surveyed.owned_bytes)
        log.info("plan of the suspend: %s", self._plan.to_dict())

    def _prepare(self) -> None:
        """Memory at hand while the target still runs: it shall not wait for it."""
        assert self._plan is not None
        surveyed = self._plan.surveyed
        for device in surveyed.devices:
            if device.owned_bytes:
                node = self._context.devices.node_of(device.uuid)
                self._spaces[device.ordinal] = Space.take(
                    self._context.arenas, device.owned_bytes, surveyed.user, node=node
                )

        self._frozen = FrozenTarget(self._context, surveyed.notes("suspend"))
        self._frozen.notes.level = self._request.level
        if not surveyed.managed and lent.wanted():
            pids = [member.pid for member in self._frozen.members]
            self._frozen.lent = LentMemory.prepared(self._context, self._frozen.notes, self._spaces, pids)
        stopped = self._frozen.stop_clocks()
        self._warnings = time_outs([member.pid for member in self._frozen.members], stopped)
        self._target.export_ahead()
        if self._request.level != WARM:
            self._offer_control_memory(surveyed)

    def _handover(self) -> None:
        target = self._target
        self._reserve_loan()
        if not target.notes.managed:
            return
        # Its memory will be filled by us: what it wrote since its last image is no measure of that any more.
        self._context.baselines.forget(target.identity)
        self._export()
        self._data = GpuData(self._context.devices, target.notes.handles, target.notes.devices)
        for part in self._data.parts:
            if part.device not in self._spaces:
                self._spaces[part.device] = Space.take(self._context.arenas, part.size_bytes, target.notes.user)
            self._spaces[part.device].extend(part.size_bytes)
        target.release()
        target.detach()

    def _drain(self) -> None:
        data = self._data
        if data is None or not data.parts:
            return
        progress = data.new_progress()
        with self.runner.counting(self._prefix + "drain", progress):
            data.drain(self._context.arenas, [self._spaces[part.device] for part in data.parts], progress)

    def _commit(self) -> None:
        notes = self._target.notes
        if self._target.lent is not None:
            self._target.lent.trim()
        notes.extents = [
            ExtentNote(device, extent.node, extent.offset, extent.size)
            for device, space in sorted(self._spaces.items())
            for extent in space.extents
        ]
        nodes = sorted({extent.node for extent in notes.extents})
        self._record = Record(self._context.keeper, suspend_key(notes.pid, notes.start_ticks))
        self._record.keep(notes, [self._context.arenas.arena(node).fd for node in nodes])

    def _uncommit(self) -> None:
        if self._record is not None:
            self._record.drop()

    def _end(self) -> None:
        """The data is safe in the arena: now the GPU's memory may go. Safe to repeat."""
        target = self._target
        self.ended = True
        self._context.suspended[(target.notes.pid, target.notes.start_ticks)] = target.notes
        self._spaces.clear()  # they belong to the suspended target now
        self._release_data()
        target.close()
        target.record.drop()

    def release(self) -> None:
        """Everything that the operation itself still holds; safe to repeat."""
        self._release()

    def take_back(self) -> None:
        """From behind the commit, while the target's own memory is still there: it runs on with that."""
        self._uncommit()
        self._bring_back()

    def settle(self, failure: WoodfrogError) -> WoodfrogError:
        """`failure` with what has become of the target."""
        if self._frozen is None:
            return failure
        if self.runner.committed:
            self._end()
            failure.target_state = TargetState.SUSPENDED
            failure.pid = failure.pid or self._frozen.notes.pid
            return failure
        self._leave_loan()
        return explain(failure, self._frozen, self.runner)

    def result(self) -> dict[str, Any]:
        notes = self._target.notes
        return {
            "name": notes.name,
            "pid": notes.pid,
            "gpu_pids": [member.pid for member in notes.gpu_processes],
            "state": TargetState.SUSPENDED,
            "level": notes.level,
            "phases": dict(self.runner.times),
            "stall_s": self._target.stall_s,
            "bytes": self._target.lent.size_bytes if self._target.lent is not None else self._gpu_bytes,
            "visit": self._target.visit.to_dict(),
            "warnings": self._warnings,
        }


def require_arena(context: Context, surveyed: Surveyed) -> None:
    """NoSpaceError unless the arena can take all of the target's data."""
    free_bytes = context.arenas.free_bytes
    if surveyed.owned_bytes > free_bytes:
        raise NoSpaceError(
            f"the target has {surveyed.owned_bytes >> 20} MiB of GPU memory, the arena {free_bytes >> 20} MiB free",
            advice="resume or stop suspended targets, start the daemon with a larger --arena, or checkpoint to disk",
            pid=surveyed.pid,
            details={"needed_bytes": surveyed.owned_bytes, "free_bytes": free_bytes},
        )
