"""Latencies by how an instance was started for a request: as Prometheus text, and as a table for people."""

from __future__ import annotations

import bisect
import threading

# Seconds, upper ends. From a request to a ready server up to a restore from a slow disk.
BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
KEPT = 10_000  # of each kind, for the table's quantiles


class Latencies:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._newest: dict[str, list[float]] = {}

    def add(self, start: str, seconds: float) -> None:
        """One answered request. `start`: what had to be done for it, see front.STARTS."""
        with self._lock:
            counts = self._counts.setdefault(start, [0] * (len(BUCKETS_S) + 1))
            counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
            self._sums[start] = self._sums.get(start, 0.0) + seconds
            newest = self._newest.setdefault(start, [])
            newest.append(seconds)
            del newest[:-KEPT]

    def prometheus(self) -> str:
        """The histogram `serverless_request_seconds`."""
        name = "serverless_request_seconds"
        lines = [f"# HELP {name} Time from a request's arrival to its answer.", f"# TYPE {name} histogram"]
        with self._lock:
            for start, counts in sorted(self._counts.items()):
                total = 0
                for end, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                    total += count
                    lines.append(f'{name}_bucket{{start="{start}",le="{end}"}} {total}')
                lines.append(f'{name}_sum{{start="{start}"}} {self._sums[start]:.6f}')
                lines.append(f'{name}_count{{start="{start}"}} {total}')
        return "\n".join(lines) + "\n"

    def table(self) -> str:
        """Count, median, 90th and 99th percentile and the longest, in milliseconds."""
        lines = [f"{'start':<10}{'requests':>10}{'median':>10}{'p90':>10}{'p99':>10}{'longest':>10}  (ms)"]
        with self._lock:
            for start, seconds in sorted(self._newest.items()):
                ordered = sorted(seconds)
                quantiles = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000 for q in (0.5, 0.9, 0.99, 1))
                lines.append(f"{start:<10}{len(ordered):>10}" + "".join(f"{one:>10.1f}" for one in quantiles))
        return "\n".join(lines) + "\n"
