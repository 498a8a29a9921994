"""Counters of what the daemon did. A seam: an exporter reads `snapshot`, nothing here speaks a protocol."""

from __future__ import annotations

import threading
from collections import defaultdict


class Metrics:
    """Thread-safe sums by name, and seconds by operation and phase."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._bytes: dict[str, int] = defaultdict(int)

    def record(self, operation: str, outcome: str, phases: dict[str, float], size_bytes: int) -> None:
        """One operation ended: `outcome` is "ok" or the name of the error."""
        with self._lock:
            self._operations[f"{operation}.{outcome}"] += 1
            self._bytes[operation] += size_bytes
            for phase, seconds in phases.items():
                self._seconds[f"{operation}.{phase}"] += seconds

    def snapshot(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {
                "operations_total": {name: float(count) for name, count in self._operations.items()},
                "phase_seconds_total": dict(self._seconds),
                "bytes_total": {name: float(size) for name, size in self._bytes.items()},
            }
