"""A checkpoint that is taken again, with `stop`, when copy-on-write missed a write.

The first attempt has taken everything back by then: there is no image, and the target runs. Nothing else is ever tried
twice here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from woodfrog.errors import TargetState
from woodfrog.operations import concurrent
from woodfrog.operations.checkpoint import Checkpoint
from woodfrog.operations.checkpoint_plan import CheckpointRequest
from woodfrog.operations.context import Context
from woodfrog.operations.copy_on_write import UnseenWriteError
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.phases import Emit, Runner

log = logging.getLogger(__name__)


class RetakenCheckpoint:
    """A checkpoint, and if need be another one. Use once; cancelled through `runner`, whichever is under way."""

    def __init__(self, context: Context, request: CheckpointRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self._emit = emit
        self._checkpoint = Checkpoint(context, request, emit)

    @property
    def runner(self) -> Runner:
        return self._checkpoint.runner

    @property
    def frozen_target(self) -> FrozenTarget | None:
        return self._checkpoint.frozen_target

    def run(self) -> dict[str, Any]:
        """As Checkpoint.run. The result's `retaken` says why it is that of a second attempt, or is empty."""
        try:
            return {**self._checkpoint.run(), "retaken": {}}
        except UnseenWriteError as miss:
            first = self._checkpoint
            target = first.frozen_target
            if target is None or miss.target_state != TargetState.RUNNING:
                raise
            log.warning("%s: %s; it is taken again while the target waits", miss.phase, miss.reason)
            stall_s = target.stall_s
            request = replace(self._request, concurrent=concurrent.STOP)
            self._checkpoint = Checkpoint(self._context, request, self._emit, runner=first.runner)
            first.runner.times.clear()
            result = self._checkpoint.run()
            retaken = {"reason": miss.reason, "kernels": miss.details.get("kernels", []), "stall_s": stall_s}
            return {**result, "stall_s": result["stall_s"] + stall_s, "retaken": retaken}
