"""How good access templates are, and how fast: over the corpus of tests/kernels and the Triton kernels beside it.

For each kernel: what its reads and writes are called, bytes named ÷ bytes touched by its writes (the simulated GPU
records the truth), and the time to evaluate one launch, compiled and interpreted. No GPU is used.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Results, parser, print_summary

TESTS = REPOSITORY / "tests" / "kernels"
sys.path.insert(0, str(TESTS))
FILES = ("elementwise", "blocks", "irregular")
GOALS = {
    "template_share": ">= 0.9",
    "triton_template_share": ">= 0.95",
    "kv_cache_amplification": "<= 1.05",
    "eval_us_p95": "<= 15",
    "misses": "0",
}
REPETITIONS = 5  # of one evaluation; the fastest counts, the machine is shared


def main() -> int:
    arguments = parser(__doc__ or "", budget_s=600).parse_args()
    from conftest import BUILD

    from woodfrog.kernels import Exactness, templates
    from woodfrog.kernels.catalogue import Catalogue
    from woodfrog.kernels.report import judged

    launches_each = 3 if arguments.quick else 25
    results = Results("templates")
    times: list[float] = []
    interpreted: list[float] = []
    amplifications: list[float] = []
    judged_all = []
    seen: dict[str, Any] = {}  # the least exact that writes were called, in any launch
    misses = 0
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            (ptx,) = sorted((BUILD / "ptx").glob(f"{file}-sm_90-O3-*.ptx"))[-1:]
            found = templates(ptx.read_text())
            catalogue = Catalogue(found, cache=Path(folder))
            qualities = {one.template.kernel: one for one in judged(ptx)[0]}
            for number, template in enumerate(found):
                measured = _measure(ptx, number, template, catalogue, launches_each)
                one = qualities[template.kernel]
                judged_all.append(one)
                times += measured.pop("times")
                interpreted += measured.pop("interpreted")
                misses += measured["misses"]
                seen[template.kernel] = measured.pop("seen")
                if measured["amplification"]:
                    amplifications.append(measured["amplification"])
                results.add(
                    kernel=template.kernel,
                    reads="none" if one.reads is None else one.reads.name.lower(),
                    writes="none" if one.writes is None else one.writes.name.lower(),
                    writes_seen="none" if seen[template.kernel] is None else seen[template.kernel].name.lower(),
                    **measured,
                )
    triton = [one for path in sorted((TESTS / "triton").glob("*-sm_90.ptx")) for one in judged(path)[0]]
    by_name = {row["kernel"]: row for row in results.rows}
    with_writes = [quality for quality in seen.values() if quality is not None]
    results.summary = {
        "kernels": len(judged_all),
        "template_share": sum(quality <= Exactness.BOUNDED for quality in with_writes) / len(with_writes),
        "exact_share": sum(quality is Exactness.EXACT for quality in with_writes) / len(with_writes),
        "triton_kernels": len(triton),
        "triton_template_share": sum(one.has_template for one in triton) / len(triton),
        "amplification_median": statistics.median(amplifications),
        "kv_cache_amplification": by_name["kv_cache_append"]["amplification"],
        "kv_cache_slots_in_memory_amplification": by_name["kv_cache_write"]["amplification"],
        "eval_us_p50": statistics.median(times),
        "eval_us_p95": sorted(times)[int(0.95 * len(times))],
        "interpreted_us_p50": statistics.median(interpreted),
        "launches": len(times),
        "misses": misses,
    }
    print_summary(results, GOALS)
    results.finish()
    return 1 if misses else 0


def _measure(ptx: Path, number: int, template: Any, catalogue: Any, launches_each: int) -> dict[str, Any]:
    """Bytes named and touched, misses and times of some launches of one kernel."""
    import launches
    from conftest import BUILD
    from intervals import size_bytes
    from recorder import Recorder
    from test_differential import launch_of, missed

    from woodfrog.kernels import WRITES
    from woodfrog.kernels.catalogue import PreparedLaunch, new_ranges

    program = sorted(BUILD.glob("recorder-*"), key=lambda path: path.stat().st_mtime)[-1]
    times, interpreted = [], []
    named_bytes = touched_bytes = misses = 0
    seen = None
    out = new_ranges(4096)
    with Recorder(program, ptx) as recorder:
        for seed in range(launches_each):
            made = launches.make(template.kernel, seed)
            recorded = recorder.run(template.kernel, made)
            launch = launch_of(made, recorder)
            begun = time.perf_counter()
            named = template.ranges(launch, kinds=WRITES)
            interpreted.append((time.perf_counter() - begun) * 1e6)
            if named:
                worst = max(one.exactness for one in named)
                seen = worst if seen is None else max(seen, worst)
            touched = recorded.stores + recorded.atomics
            misses += bool(missed(named, touched))
            named_bytes += size_bytes((one.address, one.size_bytes) for one in named)
            touched_bytes += size_bytes(touched)
            prepared = PreparedLaunch(template, launch)
            fastest = float("inf")
            for _ in range(REPETITIONS):
                begun = time.perf_counter()
                catalogue.evaluate(number, prepared, WRITES, out)
                fastest = min(fastest, (time.perf_counter() - begun) * 1e6)
            times.append(fastest)
    return {
        "amplification": named_bytes / touched_bytes if touched_bytes else 0.0,
        "misses": misses,
        "seen": seen,
        "eval_us": statistics.median(times),
        "times": times,
        "interpreted": interpreted,
    }


if __name__ == "__main__":
    sys.exit(main())
