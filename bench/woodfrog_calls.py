"""The benchmarks' view of woodfrog's Python API: calls that are timed, and phases read from their results.

One place, so that a change of the API is a change of one file. Phases are found by the names of the design; a phase
that a result does not have is an error, not a zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timed:
    """A result of woodfrog's API with the wall clock interval of the call."""

    result: Any
    begin_s: float  # time.time(): comparable with the times in a target's log
    end_s: float

    @property
    def call_s(self) -> float:
        """Seconds that the whole call took."""
        return self.end_s - self.begin_s

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {str(name): float(seconds) for name, seconds in self.result.phases.items()}

    def phase_s(self, *names: str) -> float:
        """Seconds of the first of ``names`` that the result has; KeyError, with what it has, if none."""
        phases = self.phases
        for name in names:
            if name in phases:
                return phases[name]
        raise KeyError(f"none of the phases {', '.join(names)} among {', '.join(phases) or 'no phases at all'}")

    def members(self) -> dict[str, Any]:
        """For a row: the call's seconds and those of each phase."""
        return {"call_s": self.call_s, "phases_s": {name: round(value, 6) for name, value in self.phases.items()}}


def timed(function: Any, *arguments: Any, **options: Any) -> Timed:
    """Calls ``function`` and notes when."""
    begin_s = time.time()
    result = function(*arguments, **options)
    return Timed(result, begin_s, time.time())


def remove_image(reference: str | None) -> None:
    """Deletes an image that a benchmark made: its disk may not be large."""
    import woodfrog

    if reference is not None:
        woodfrog.rm(reference)
