"""How good access templates are, and how fast: over the corpus of tests/kernels and the Triton kernels beside it.

For each kernel: what its reads and writes are called, bytes named ÷ bytes touched by its writes (the simulated GPU
records the truth), and the time to evaluate one launch, compiled and interpreted. Both are given without the contents
of memory and with them, as they are before the launch. Times are those of one call of the compiled evaluator with all
arguments ready, the fastest of five; none of the launches is alike another. No GPU is used.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Results, finish, parser

TESTS = REPOSITORY / "tests" / "kernels"
sys.path.insert(0, str(TESTS))
FILES = ("elementwise", "blocks", "irregular")
GOALS = {
    "template_share": ">= 0.9",
    "template_share_with_contents": ">= 0.9",
    "triton_template_share": ">= 0.95",
    "kv_cache_amplification": "<= 1.05",
    "kv_cache_slots_in_memory_with_contents_amplification": "<= 1.05",
    "eval_us_p95": "<= 15",
    "kernels_within_15_us_share": ">= 0.95",
    "triton_within_15_us_share": ">= 0.95",
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
    seen_with_contents: dict[str, Any] = {}
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
                seen_with_contents[template.kernel] = measured.pop("seen_with_contents")
                if measured["amplification"]:
                    amplifications.append(measured["amplification"])
                results.add(
                    kernel=template.kernel,
                    reads="none" if one.reads is None else one.reads.name.lower(),
                    writes="none" if one.writes is None else one.writes.name.lower(),
                    writes_seen="none" if seen[template.kernel] is None else seen[template.kernel].name.lower(),
                    **measured,
                )
    paths = [path for folder in ("triton", "inductor") for path in sorted((TESTS / folder).glob("*-sm_90.ptx"))]
    triton = [one for path in paths for one in judged(path)[0]]
    triton_times = _triton_times(paths, 3 if arguments.quick else 15)
    by_name = {row["kernel"]: row for row in results.rows}
    with_writes = [quality for quality in seen.values() if quality is not None]
    with_contents = [quality for quality in seen_with_contents.values() if quality is not None]
    results.summary = {
        "kernels": len(judged_all),
        "template_share": sum(quality <= Exactness.BOUNDED for quality in with_writes) / len(with_writes),
        "template_share_with_contents": sum(q <= Exactness.BOUNDED for q in with_contents) / len(with_contents),
        "exact_share": sum(quality is Exactness.EXACT for quality in with_writes) / len(with_writes),
        "triton_kernels": len(triton),
        "triton_template_share": sum(one.has_template for one in triton) / len(triton),
        "triton_eval_us_p50": statistics.median(triton_times),
        "triton_within_15_us_share": sum(one <= 15 for one in triton_times) / len(triton_times),
        "amplification_median": statistics.median(amplifications),
        "kv_cache_amplification": by_name["kv_cache_append"]["amplification"],
        "kv_cache_slots_in_memory_amplification": by_name["kv_cache_write"]["amplification"],
        "kv_cache_slots_in_memory_with_contents_amplification": by_name["kv_cache_write"][
            "amplification_with_contents"
        ],
        "eval_us_p50": statistics.median(times),
        "eval_us_p95": sorted(times)[int(0.95 * len(times))],
        "kernels_within_15_us_share": sum(row["eval_us"] <= 15 for row in results.rows) / len(results.rows),
        "interpreted_us_p50": statistics.median(interpreted),
        "launches": len(times),
        "misses": misses,
    }
    finish(results, GOALS)
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
    named_bytes = named_with_contents = touched_bytes = misses = 0
    seen = seen_with_contents = None
    out = new_ranges(8192)
    with Recorder(program, ptx) as recorder:
        for seed in range(launches_each):
            made = launches.make(template.kernel, seed)
            recorded = recorder.run(template.kernel, made)
            launch = launch_of(made, recorder)
            begun = time.perf_counter()
            named = template.ranges(launch, kinds=WRITES)
            interpreted.append((time.perf_counter() - begun) * 1e6)
            closer = catalogue.ranges(number, replace(launch, contents=made.contents), kinds=WRITES)
            seen, seen_with_contents = _worst(seen, named), _worst(seen_with_contents, closer)
            touched = recorded.stores + recorded.atomics
            misses += bool(missed(named, touched)) + bool(missed(closer, touched))
            named_bytes += size_bytes((one.address, one.size_bytes) for one in named)
            named_with_contents += size_bytes((one.address, one.size_bytes) for one in closer)
            touched_bytes += size_bytes(touched)
            call = catalogue.bound(number, PreparedLaunch(template, launch), WRITES, out)
            times.append(_fastest_us(call))
    return {
        "amplification": named_bytes / touched_bytes if touched_bytes else 0.0,
        "amplification_with_contents": named_with_contents / touched_bytes if touched_bytes else 0.0,
        "misses": misses,
        "seen": seen,
        "seen_with_contents": seen_with_contents,
        "eval_us": statistics.median(times),
        "times": times,
        "interpreted": interpreted,
    }


def _fastest_us(call: Callable[[], object]) -> float:
    """Microseconds of the fastest of some calls in a row."""
    fastest = float("inf")
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        call()
        fastest = min(fastest, (time.perf_counter() - begun) * 1e6)
    return fastest


def _triton_times(paths: list[Path], launches_each: int) -> list[float]:
    """Microseconds of an evaluation of each Triton kernel, median of launches with random grids and numbers."""
    import triton_launches

    from woodfrog.kernels import WRITES, templates
    from woodfrog.kernels.catalogue import Catalogue, PreparedLaunch, new_ranges

    texts = [path.read_text() for path in paths]
    found = [templates(text)[0] for text in texts]
    out = new_ranges(1 << 14)
    medians = []
    with tempfile.TemporaryDirectory() as folder:
        catalogue = Catalogue(found, cache=Path(folder))
        for number, (template, text) in enumerate(zip(found, texts, strict=True)):
            times = []
            for seed in range(launches_each):
                launch = triton_launches.unlike_any_other(template, text, seed)
                call = catalogue.bound(number, PreparedLaunch(template, launch), WRITES, out)
                times.append(_fastest_us(call))
            medians.append(statistics.median(times))
    return medians


def _worst(before: Any, named: Any) -> Any:
    """The least exact of some ranges and what was the least exact before."""
    found = [one.exactness for one in named] + ([] if before is None else [before])
    return max(found, default=None)


if __name__ == "__main__":
    sys.exit(main())
