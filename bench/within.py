"""Throughput with and without the interposer, within one process (targets/driver_calls.py).

Two processes that are equal in everything differ by more than what is looked for, for as long as they live. Here one
process makes some steps through the interposer, some past it, past it, through it, and so on: four such blocks make one
ratio. It compares calls; memory comes from the interposer all the time, so that is compared apart (memory_kinds).
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import target_process

DRAWS = 2000


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Holds the median of as many in 95 of 100 draws (bootstrap, percentiles)."""
    draw = random.Random(1)
    drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return drawn[DRAWS * 25 // 1000], drawn[DRAWS * 975 // 1000]


def block_times(lines: Sequence[dict[str, Any]]) -> list[tuple[bool, float]]:
    """Of each block: whether it went past the interposer, and the mean time of its steps but the first."""
    times: dict[int, list[float]] = defaultdict(list)
    direct: dict[int, bool] = {}
    for line in lines:
        direct[line["block"]] = line["direct"]
        if not line["cold"]:
            times[line["block"]].append(line["took_s"])
    return [(direct[block], statistics.fmean(times[block])) for block in sorted(times)]


def calls(
    results: harness.Results, budget: harness.Budget, case: str, target: str, options: Sequence[str], work: Path,
    *, steps: int, alternate: int,
) -> dict[str, Any]:  # fmt: skip
    """Members of the summary: ``case``_within, time of steps past ÷ through the interposer, the median over groups of
    four blocks; _low and _high; the same of blocks that are equal (1st ÷ 4th, 2nd ÷ 3rd); how many addresses were
    switched. Ends early when the budget does."""
    label = f"within-{case}"
    arguments = [*options, "--steps", str(steps), "--alternate", str(alternate)]
    with target_process.interposed(target, arguments, work, label) as run:
        run.wait_start()
        group = 4 * alternate
        reached = 0
        while reached + group <= steps:
            before_s = budget.left_s
            run.wait_step(reached + group, timeout_s=300.0)
            reached += group
            if not budget.allows(before_s - budget.left_s):
                break
        lines = run.log.lines[:reached]
        places = int((run.log.start or {}).get("places", 0))
    return members_of(results, case, lines, places)


def members_of(results: harness.Results, case: str, lines: Sequence[dict[str, Any]], places: int) -> dict[str, Any]:
    """The members of `calls` from a target's lines, which begin with a group; a row for each group."""
    blocks = block_times(lines)
    ratios, equal = [], []
    for first in range(0, len(blocks) - 3, 4):
        (_, a), (_, b), (_, c), (_, d) = blocks[first : first + 4]
        ratios.append((b + c) / (a + d))
        equal += [a / d, b / c]
        results.add(case=case, kind="within", through_s=[a, d], past_s=[b, c], ratio=ratios[-1])
    low, high = interval(ratios)
    equal_low, equal_high = interval(equal)
    return {
        f"{case}_within": statistics.median(ratios), f"{case}_within_low": low, f"{case}_within_high": high,
        f"{case}_within_groups": len(ratios), f"{case}_within_equal": statistics.median(equal),
        f"{case}_within_equal_low": equal_low, f"{case}_within_equal_high": equal_high,
        f"{case}_within_step_s": statistics.median([a for direct, a in blocks if not direct]),
        f"{case}_within_places": places,
    }  # fmt: skip


def memory(results: harness.Results, work: Path, options: Sequence[str]) -> dict[str, Any]:
    """Members of the summary: for each kernel of memory_kinds its time in the driver's memory ÷ in the interposer's."""
    with target_process.interposed("memory_kinds", options, work, "within-memory") as run:
        run.wait_start()
        run.wait_done(120.0)
        lines = run.log.lines
    summary: dict[str, Any] = {}
    for name in ("stream", "gather", "matmul"):
        ratios = [line[f"{name}_direct_s"] / line[f"{name}_interposed_s"] for line in lines]
        low, high = interval(ratios)
        results.add(case="memory", kind="within", kernel=name, ratios=ratios)
        summary |= {f"memory_{name}": statistics.median(ratios)}
        summary |= {f"memory_{name}_low": low, f"memory_{name}_high": high}
    return summary
