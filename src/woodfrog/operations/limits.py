"""How long each phase may take before it counts as hung and the operation is taken back.

Not the target's time-out (`--timeout` bounds how long its own work may take to come to rest): these are bounds for
things that should never hang. WOODFROG_PHASE_LIMIT_S sets all of them, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseLimits:
    """Limits in seconds for an operation whose target gets `timeout_s` to come to rest."""

    timeout_s: float = 30.0

    @property
    def short_s(self) -> float:
        """Conversations of milliseconds."""
        return _override(60.0)

    @property
    def quiesce_s(self) -> float:
        """The agent itself keeps to `timeout_s`."""
        return _override(self.timeout_s + 10.0)

    @property
    def driver_s(self) -> float:
        """The driver's checkpoint or restore: 16 s measured at 16 GiB where the driver had to keep all of it."""
        return _override(600.0)

    @property
    def long_s(self) -> float:
        """Copies to a disk, and CRIU: 140 GB at 50 MB/s."""
        return _override(3600.0)


def _override(seconds: float) -> float:
    return float(os.environ.get("WOODFROG_PHASE_LIMIT_S", seconds))
