"""Taking a standby process: its memory is put in place, and it runs.

A resume of a target that was never suspended: what `woodfrog standby` left waiting. Until the commit any failure leaves
it waiting; must never drop its data before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from woodfrog.errors import TargetState, WoodfrogError
from woodfrog.operations import hook as hooks
from woodfrog.operations import telling
from woodfrog.operations.context import Context
from woodfrog.operations.data import require_digests
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.history import LastImage
from woodfrog.operations.hook import DEFAULT_TIMEOUT_S
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.notes import Notes
from woodfrog.operations.phases import Emit, Phase, Runner, Step
from woodfrog.operations.promote import EAGER
from woodfrog.operations.resume import Resume, ResumeRequest

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest


@dataclass(frozen=True)
class TakeRequest:
    """The notes of the standby process, and the image that it is from."""

    notes: Notes
    manifest: Manifest
    store_url: str
    verify: bool = False
    mode: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    hook: str = ""
    hook_timeout_s: float = DEFAULT_TIMEOUT_S


class Take:
    """One taking; use once."""

    def __init__(self, context: Context, request: TakeRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self.runner = Runner("take", emit)
        self._told: list[telling.Told] = []
        self._resume = Resume(context, ResumeRequest(request.notes, mode=request.mode), runner=self.runner)

    @property
    def frozen_target(self) -> FrozenTarget | None:
        """For the table of those that could not be brought back."""
        return self._resume.frozen_target

    @property
    def promotion(self) -> Notes | None:
        """What is to be promoted once it runs."""
        return self._resume.promotion

    def run(self) -> dict[str, Any]:
        """Do it; the result as `daemon.sock` carries it, that of a restore. Raises a WoodfrogError; the process then
        still waits, unless the error says that it is gone."""
        resume = self._resume
        verify = [Phase("verify", self._verify, limit_s=PhaseLimits().long_s)] if self._request.verify else []
        steps: list[Step] = [
            *resume.begin(),
            *resume.data(),
            *verify,
            *self._hook_phases(),
            replace(resume.commit(), do=self._commit),
            resume.back(),
            resume.end(),
        ]
        try:
            if resume.frozen_target.alive:  # a job with all its processes, or not at all
                resume.frozen_target.check_alive()
            self.runner.run(steps)
        except WoodfrogError as failure:
            settled = resume.settle(failure)
            if settled.target_state == TargetState.RUNNING:
                telling.call(self._told)
                self._remember()
            raise settled from failure
        finally:
            resume.release()
        telling.call(self._told)
        self._remember()
        return self._result()

    def _verify(self) -> None:
        """What it is about to run on, hashed in HBM and compared with the manifest."""
        manifest = self._request.manifest
        require_digests(manifest.digests, self._resume.digests(manifest.chunk_bytes))

    def _hook_phases(self) -> list[Step]:
        limit_s = self._request.hook_timeout_s + PhaseLimits().short_s
        return [Phase(hooks.PHASE, self._hook, limit_s=limit_s)] if self._request.hook else []

    def _hook(self) -> None:
        request = self._request
        hooks.run_hook(request.hook, request.notes, "take", request.environment, request.hook_timeout_s)

    def _commit(self) -> None:
        """The last that may fail: from here on it runs, or will."""
        self._told = telling.tell(self._request.notes, self._request.environment)

    def _remember(self) -> None:
        """Its next image is an increment to the one it is from."""
        notes, stats = self._request.notes, self._request.manifest.stats
        last = LastImage(notes.image, stats.gpu.new, stats.cpu.new)
        self._context.history.record(notes.pid, notes.start_ticks, self._request.store_url, last)

    def _result(self) -> dict[str, Any]:
        notes, manifest = self._request.notes, self._request.manifest
        return {
            **self._resume.result(),
            "root_pid": notes.root_pid,
            "image": notes.image,
            "instance": notes.instance,
            "ports": {str(old): new for old, new in notes.ports.items()},
            "log": notes.log_path,
            "cpu_bytes": manifest.cpu_bytes,
            "verified": self._request.verify,
            "standby": notes.hold,
            "mode": self.promotion.mode if self.promotion else EAGER,
            "warnings": [],
        }
