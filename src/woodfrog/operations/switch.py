"""`switch`: one target leaves the GPU and a suspended one comes back, with both directions of the bus in use at once.

Where the GPU has room for both, the drain of the one goes beside the refill of the other, and only when all of that is
done is either committed: until then any failure leaves the first running and the second suspended. Where it has not,
the first is suspended before the second is resumed, and resumed again if the second cannot come. Must never leave both
off the GPU by a failure of its own (a daemon killed between the two halves of a switch in turn does).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from woodfrog.errors import NoSpaceError, TargetState, WoodfrogError
from woodfrog.operations import room
from woodfrog.operations.context import Context
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.notes import COLD, WARM, Notes
from woodfrog.operations.phases import Beside, Emit, Runner, Step
from woodfrog.operations.resume import Resume, ResumeRequest
from woodfrog.operations.survey import Surveyed, survey
from woodfrog.operations.suspend import Suspend, SuspendRequest

log = logging.getLogger(__name__)

OUT, IN = "out_", "in_"


@dataclass(frozen=True)
class SwitchRequest:
    """What was asked for: the tree that leaves, and the notes of the suspended target that comes."""

    out_root_pid: int
    incoming: Notes
    timeout_s: float = 30.0
    level: str = COLD


class Runners:
    """The runner at work, for whoever wants to cancel or to know the times of all."""

    def __init__(self) -> None:
        self._all: list[Runner] = []

    def add(self, runner: Runner) -> Runner:
        self._all.append(runner)
        return runner

    @property
    def times(self) -> dict[str, float]:
        return {name: seconds for runner in self._all for name, seconds in runner.times.items()}

    def cancel(self, reason: str) -> bool:
        """As Runner.cancel."""
        return bool(self._all) and self._all[-1].cancel(reason)


class Switch:
    """One switch; use once."""

    def __init__(self, context: Context, request: SwitchRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self._emit = emit
        self._leaving = SuspendRequest(request.out_root_pid, request.timeout_s, request.level)
        self.runner = Runners()
        self._suspend, self._resume = self._operations(self.runner.add(Runner("switch", emit)))

    def _operations(self, runner: Runner) -> tuple[Suspend, Resume]:
        coming = ResumeRequest(self._request.incoming)
        return (
            Suspend(self._context, self._leaving, runner=runner, prefix=OUT),
            Resume(self._context, coming, runner=runner, prefix=IN),
        )

    @property
    def frozen_target(self) -> FrozenTarget | None:
        """The one that was to leave; for the table of those that could not be brought back."""
        return self._suspend.frozen_target

    @property
    def promotion(self) -> Notes | None:
        """What of the one that came is to be promoted now that it runs."""
        return self._resume.promotion

    @property
    def frozen_incoming(self) -> FrozenTarget | None:
        """The one that was to come, likewise."""
        return self._resume.frozen_target

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it. Raises a WoodfrogError with the state of the one that was to
        leave; its details have that of the other: `in`, `in_state`."""
        surveyed = survey(self._context, self._request.out_root_pid, image=False)
        overlapped = self._fits_both(surveyed)
        try:
            if overlapped:
                self._run_overlapped()
            else:
                self._run_in_turn()
        finally:
            self._suspend.release()
            self._resume.release()
        leaving, coming = self._suspend.result(), self._resume.result()
        return {
            "out_": {key: leaving[key] for key in ("name", "pid", "state", "level", "bytes", "stall_s")},
            "in_": {key: coming[key] for key in ("name", "pid", "state", "bytes")},
            "overlapped": overlapped,
            "phases": dict(self.runner.times),
            "bytes": leaving["bytes"] + coming["bytes"],
            "warnings": leaving["warnings"],
        }

    def _fits_both(self, leaving: Surveyed) -> bool:
        """Whether all of the coming one has room beside the leaving one; NoSpaceError if not even without it."""
        freed = {device.uuid: device.owned_bytes for device in leaving.devices}
        if self._request.level != WARM:
            control_bytes = room.gpu_control_state_bytes(leaving.simulated)
            freed = {uuid: size_bytes + control_bytes for uuid, size_bytes in freed.items()}
        both = True
        for uuid, needed in self._resume.needed_bytes().items():
            device = self._context.devices.by_uuid(uuid)
            free = device.free_bytes()
            both = both and needed <= free
            if needed > free + freed.get(uuid, 0):
                raise NoSpaceError(
                    f"{self._request.incoming.name} needs {needed >> 20} MiB on GPU {device.ordinal}, and without "
                    f"{leaving.name} {(free + freed.get(uuid, 0)) >> 20} MiB would be free",
                    advice="suspend or end what else uses that GPU",
                    pid=leaving.pid,
                    device=device.ordinal,
                    target_state=TargetState.RUNNING,
                    details=self._other(TargetState.SUSPENDED),
                )
        return both

    def _run_overlapped(self) -> None:
        leaving, coming = self._suspend, self._resume
        runner = coming.runner
        # Mapping takes several times as long beside copies, so both copies begin once both are mapped.
        out, back = leaving.data(), coming.data()
        out[1], back[1] = replace(out[1], after=(back[0].name,)), replace(back[1], after=(out[0].name,))
        steps: list[Step] = [
            *leaving.begin(),
            *coming.begin(),
            Beside(out, [*leaving.control(), *coming.control()], [back]),
            leaving.commit(last=False),
            coming.commit(),
            coming.back(),
            leaving.end(),
            coming.end(),
        ]
        try:
            runner.run(steps)
        except WoodfrogError as failure:
            raise self._settle(failure, runner) from failure

    def _settle(self, failure: WoodfrogError, runner: Runner) -> WoodfrogError:
        if not runner.committed:
            failure.details |= self._other(TargetState.SUSPENDED)
            return self._suspend.settle(failure)
        failure = self._resume.settle(failure)
        failure.details |= self._other(failure.target_state)
        if failure.target_state == TargetState.RUNNING or self._suspend.ended:
            return self._suspend.settle(failure)
        self._suspend.take_back()
        failure.target_state = TargetState.RUNNING
        return failure

    def _run_in_turn(self) -> None:
        """The first is off the GPU before the second comes: there is no room for both."""
        leaving = self._suspend
        try:
            leaving.runner.run(
                [*leaving.begin(), Beside(leaving.data(), leaving.control()), leaving.commit(), leaving.end()]
            )
        except WoodfrogError as failure:
            failure.details |= self._other(TargetState.SUSPENDED)
            failure = leaving.settle(failure)
            if failure.target_state == TargetState.SUSPENDED:  # it failed behind its commit
                leaving.release()
                self._bring_first_back(failure)
            raise failure
        _, self._resume = self._operations(self.runner.add(Runner("switch", self._emit)))
        coming = self._resume
        try:
            coming.runner.run(
                [*coming.begin(), Beside(coming.data(), coming.control()), coming.commit(), coming.back(), coming.end()]
            )
        except WoodfrogError as failure:
            failure = coming.settle(failure)
            failure.details |= self._other(failure.target_state)
            if failure.target_state == TargetState.RUNNING:  # it came all the same
                failure.target_state = TargetState.SUSPENDED
            else:
                coming.release()
                self._bring_first_back(failure)
            raise failure

    def _bring_first_back(self, failure: WoodfrogError) -> None:
        frozen = self._suspend.frozen_target
        assert frozen is not None
        failure.target_state = TargetState.SUSPENDED
        try:
            Resume(self._context, ResumeRequest(frozen.notes), self._emit).run()
        except WoodfrogError as second:
            log.error("%s could not be brought back: %s", frozen.notes.name, second.reason)
            failure.target_state = second.target_state
            failure.advice = f"`woodfrog resume {frozen.notes.name}` tries again to bring it back: {second.reason}"
            return
        failure.target_state = TargetState.RUNNING

    def _other(self, state: str) -> dict[str, Any]:
        coming = self._request.incoming
        return {"in": coming.name, "in_state": str(state if coming.alive else TargetState.GONE)}
