"""What an operation's failure says once everything has been taken back: whose fault, and how the target is now."""

from __future__ import annotations

from woodfrog.errors import TargetLostError, TargetState, WoodfrogError
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.phases import Runner


def explain(failure: WoodfrogError, target: FrozenTarget, runner: Runner) -> WoodfrogError:
    """`failure` with the target's state after the undo filled in; TargetLostError when the target is gone."""
    failure.pid = failure.pid or target.notes.pid
    failure.target_state = target.state_after(runner.undo_failures)
    if runner.undo_failures:
        failure.details["undo_failures"] = [undo.reason for undo in runner.undo_failures]
    if failure.target_state == TargetState.FROZEN:
        failure.advice = (
            f"its memory is safe with the keeper: `woodfrog resume {target.notes.name}` tries again to bring it back"
        )
    if failure.target_state == TargetState.GONE and not isinstance(failure, TargetLostError):
        return TargetLostError(
            f"the target ended during the operation: {failure.reason}",
            advice="see the target's log; restore an earlier image",
            phase=failure.phase,
            pid=failure.pid,
            target_state=TargetState.GONE,
            details=failure.details,
        )
    return failure
