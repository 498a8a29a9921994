"""The machine itself: its copy ceilings and the driver's control state alone, measured without woodfrog.

Run first in a session: it shows whether the machine is what it should be, and it touches as much host memory as the
other benchmarks will use, since a virtual machine may have to ask its host for memory it has not used before.

summary: ceiling_d2h_gb_per_s, ceiling_h2d_gb_per_s, warm_s
"""

from __future__ import annotations

import sys

import psutil

import driver_baseline
import harness


def main() -> int:
    """Returns the exit status: 0 if everything was measured."""
    parser = harness.parser(__doc__ or "", budget_s=60)
    parser.add_argument("--warm-gib", type=float, default=8.0, help="host memory to touch")
    parser.add_argument("--copy-gib", type=float, default=16.0, help="bytes of each copy")
    arguments = parser.parse_args()
    copy_gib = min(arguments.copy_gib, 2.0) if arguments.quick else arguments.copy_gib
    results = harness.Results("machine")
    before = psutil.virtual_memory()
    warm_s = driver_baseline.warm_host_memory(int(arguments.warm_gib * harness.GIB))
    after = psutil.virtual_memory()
    results.add(
        kind="host memory", warm_gib=arguments.warm_gib, warm_s=warm_s,
        total_bytes_before=before.total, total_bytes_after=after.total,
        available_bytes_before=before.available, available_bytes_after=after.available,
        processors=psutil.cpu_count(),
        huge_pages=harness.huge_pages(),
    )  # fmt: skip
    ceiling = driver_baseline.copy_ceiling(int(copy_gib * harness.GIB))
    results.add(kind="copies", size_bytes=ceiling.size_bytes, streams=ceiling.streams, **ceiling.members())
    results.summary.update({"warm_s": warm_s, **ceiling.members()})
    harness.finish(results, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
