"""What checkpoint and suspend share: a running target is surveyed, comes to rest, hands its memory over, and goes back.

Each owns what it took here until its `run` is over. Must never free arena space that a suspended target's data is in.
"""

from __future__ import annotations

from woodfrog.operations import room, sharing
from woodfrog.operations.context import Context
from woodfrog.operations.data import GpuData
from woodfrog.operations.frozen import OnOneTarget
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.phases import Emit, Runner
from woodfrog.operations.space import Space
from woodfrog.operations.survey import Surveyed


class FreezingOperation(OnOneTarget):
    """Base of an operation on one running target; use once."""

    def __init__(
        self,
        name: str,
        context: Context,
        timeout_s: float,
        emit: Emit | None,
        *,
        runner: Runner | None = None,
        prefix: str = "",
    ) -> None:
        """`runner`: of an operation that this one is a part of, whose phases are told apart by `prefix`."""
        self._context = context
        self._timeout_s = timeout_s
        self.runner = runner or Runner(name, emit)
        self._prefix = prefix
        self._limits = PhaseLimits(timeout_s)
        self._data: GpuData | None = None
        self._spaces: dict[int, Space] = {}  # by the target's device ordinal

    @property
    def _gpu_bytes(self) -> int:
        return self._data.size_bytes if self._data is not None else 0

    def _offer_control_memory(self, surveyed: Surveyed) -> None:
        self._target.offer_control_memory(room.control_state_bytes(surveyed.simulated))

    def _quiesce(self) -> None:
        self._target.quiesce(self._timeout_s)

    def _reserve_loan(self) -> None:
        """Room for what the driver is going to lend of a process that cannot allocate any more, and the keeper told."""
        target = self._target
        if target.lent is not None:
            target.lent.reserve([member.pid for member in target.members])
            target.lent.tell(target.record)

    def _leave_loan(self) -> None:
        """After an undo that failed: its data is in the arena still; who brings it back gives that back."""
        if self._target.lent is not None and self.runner.undo_failures:
            self._spaces.clear()

    def _export(self) -> None:
        """The target's memory to the keeper; RefusedError when processes outside of it share that."""
        self._target.export()
        sharing.settle([self._target])

    def _import(self) -> None:
        """Map what was handed over; the target waits for its driver meanwhile, not for this."""
        if self._data is not None:
            self._data.import_all(self._target.fds)

    def _control(self) -> None:
        self._target.checkpoint_driver()

    def _bring_back(self) -> None:
        self._target.bring_back()

    def _release_data(self) -> None:
        if self._data is not None:
            self._data.release()

    def _release(self) -> None:
        """Everything that the operation itself still holds; safe to repeat."""
        if self._frozen is not None:
            self._frozen.withdraw_control_memory()
        self._release_data()
        for space in self._spaces.values():
            space.free()
        if self._frozen is not None:
            self._frozen.close()
