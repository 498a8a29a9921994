"""Overhead: throughput of four targets with the interposer, divided by their throughput without it.

launch and alloc run in pairs, one run with and one without, in alternating order, so that a drift of the machine's
clocks falls on both alike. One more pair without the interposer on either side shows how much two equal runs differ: a
ratio closer to 1 than that says nothing.

train and decode, where much less is looked for than two runs or processes differ by, are measured within one process
that calls the driver now through the interposer and now past it (within.py), and their memory apart, the interposer's
beside the driver's in one process. With --turns processes with and without also take turns of a few steps
(interleaved.py), which includes everything and shows less.
The batch of train is as large as training wants it: the GPU sets the pace. With a small one the processor does, and
equal steps of one process differed by a third on the machine that this was measured on.

The launch loop calls the driver's own function in every other burst, past the interposer: what its calls take less than
the others, in one process and at one time, is what the interposer adds to a launch (launch_added_ns; without interposer
launch_added_ns_same). launch_calls is the ratio of the two. train_launch_bound and decode_launch_bound, with --turns,
are what is left of the throughput if a step takes that much longer for each of its launches: the application waits for
none of them where the GPU is the slower of the two, so launching costs no more than that; it says nothing of the rest.

summary: train, decode (goal at least 0.999), launch (0.99), alloc (0.9); for launch and alloc the median over the
pairs, and `<name>_same` of the pair of equal runs; for train and decode the median over groups of blocks (within.py),
`<name>_turns` of the turns (interleaved.py), `memory_<kernel>` of the kinds of memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import interleaved
import target_process
import within
from target_process import TargetRun

GOALS = {"train": ">= 0.999", "decode": ">= 0.999", "launch": ">= 0.99", "alloc": ">= 0.9"}


def reported(name: str) -> Callable[[TargetRun], float]:
    """The rate that the target itself reports in its last line under ``name``."""

    def rate(run: TargetRun) -> float:
        if run.log.done is None:
            raise target_process.TargetError(f"{run.name} did not write its last line")
        return float(run.log.done[name])

    return rate


@dataclass(frozen=True)
class Case:
    """One target of the comparison; ``quick`` are the options of a short run. ``rate`` None: it is measured within one
    process, by blocks of ``alternate`` steps, and by turns of ``steps`` steps."""

    name: str
    target: str
    options: tuple[str, ...]
    quick: tuple[str, ...]
    rate: Callable[[TargetRun], float] | None = None
    steps: int = 0
    alternate: int = 0


CASES = (
    Case(
        "launch", "launch_loop", ("--steps", "40"), ("--steps", "5", "--launches", "2000"), reported("launches_per_s")
    ),
    Case("alloc", "alloc_churn", ("--steps", "30"), ("--steps", "5", "--state-gib", "1"), reported("operations_per_s")),
    Case("decode", "decode_graphs", (), ("--state-gib", "0.25"), steps=100, alternate=40),
    Case(
        "train", "train_gpt2", ("--state-gib", "2", "--batch", "24", "--sequence", "512"),
        ("--state-gib", "0.5", "--batch", "2", "--sequence", "64"), steps=15, alternate=4,
    ),
)  # fmt: skip
SHARE = {"train": 4.0, "decode": 2.0}  # of the time, where the others have 1
WITHIN_GROUPS = 200  # of four blocks, at most
MEMORY_S = 40.0  # left for the kinds of memory


def measure(
    case: Case, arguments: list[str], work: Path, label: str, *, with_interposer: bool
) -> tuple[float, dict[str, Any]]:
    """The rate of one run and its last line."""
    start: Callable[..., AbstractContextManager[TargetRun]] = (
        target_process.interposed if with_interposer else target_process.plain
    )
    with start(case.target, arguments, work, label) as run:
        run.wait_start()
        run.wait_done()
        if run.log.done is None:
            raise target_process.TargetError(f"{case.target} ended without its last line")
        assert case.rate is not None, "a target that takes turns"
        return case.rate(run), run.log.done


def measure_steps(results: harness.Results, budget: harness.Budget, case: Case, arguments: argparse.Namespace) -> None:
    """Measures a target whose steps are compared; raises TargetError if processes did not compute the same."""
    quick = bool(arguments.quick)
    options = case.quick if quick else case.options
    turns = 2 if quick else arguments.turns
    # Where there are turns too, both have half of the time.
    share = harness.Budget(budget.left_s / 2) if turns else budget
    found = within.calls(
        results, share, case.name, case.target, options, arguments.work,
        steps=4 * case.alternate * (1 if quick else WITHIN_GROUPS), alternate=case.alternate,
    )  # fmt: skip
    results.summary |= found | {case.name: found[f"{case.name}_within"]}
    if turns:
        results.summary |= interleaved.play(
            results, budget, f"{case.name}_turns", case.target, options, arguments.work,
            each=1 if quick else arguments.each, turns=turns, steps=case.steps,
        )  # fmt: skip


def calls(last: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Of runs that call the driver directly too: nanoseconds that a usual call takes more, and direct ÷ usual."""
    pairs = [
        (line["submit_ns_per_launch"], line["direct_ns_per_launch"]) for line in last if "direct_ns_per_launch" in line
    ]
    if not pairs:
        return None
    added = harness.median([usual - direct for usual, direct in pairs])
    return added, harness.median([direct / usual for usual, direct in pairs])


def measure_case(
    results: harness.Results, budget: harness.Budget, case: Case, pairs: int, work: Path, quick: bool
) -> bool:
    """Measures one target; whether all its runs gave the same digest."""
    options = list(case.quick if quick else case.options)
    ratios: list[float] = []
    rates: dict[bool, list[float]] = {True: [], False: []}
    lasts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    pair_s = 0.0
    for pair in range(pairs):
        if pair and not budget.allows(pair_s):
            break
        before_s = budget.left_s
        order = (False, True) if pair % 2 == 0 else (True, False)
        measured: dict[bool, float] = {}
        for side in order:
            label = f"overhead-{case.name}-{pair}-{'with' if side else 'without'}"
            measured[side], last = measure(case, options, work, label, with_interposer=side)
            lasts[side].append(last)
            rates[side].append(measured[side])
        ratios.append(measured[True] / measured[False])
        pair_s = before_s - budget.left_s
        results.add(
            case=case.name, pair=pair, order="without first" if not order[0] else "with first", ratio=ratios[-1],
            rate_with_per_s=measured[True], rate_without_per_s=measured[False],
            **{name: value for name, value in lasts[True][-1].items() if name.endswith("_ns_per_launch")},
        )  # fmt: skip
    spread = harness.Spread.of(ratios)
    results.summary.update(spread.members(case.name))
    results.summary[f"{case.name}_of_medians"] = harness.median(rates[True]) / harness.median(rates[False])
    if budget.allows(pair_s / 2):
        rate, last = measure(case, options, work, f"overhead-{case.name}-same", with_interposer=False)
        lasts[False].append(last)
        results.summary[f"{case.name}_same"] = rate / rates[False][-1]
        results.add(case=case.name, kind="same", ratio=rate / rates[False][-1])
    for side, suffix in ((True, ""), (False, "_same")):
        if found := calls(lasts[side]):
            results.summary[f"{case.name}_added_ns{suffix}"], results.summary[f"{case.name}_calls{suffix}"] = found
    return len({str(line["digest"]) for line in (*lasts[True], *lasts[False])}) == 1


def main() -> int:
    """Returns the exit status: 0 if every target was measured and computed the same with and without."""
    parser = harness.parser(__doc__ or "", budget_s=300)
    parser.add_argument("--pairs", type=int, default=5, help="of runs of launch and alloc")
    parser.add_argument("--turns", type=int, default=0, help="of each process of train and decode; 0: none")
    parser.add_argument("--each", type=int, default=2, help="processes with, and as many without, of train and decode")
    parser.add_argument("--cases", nargs="+", default=[*(case.name for case in CASES), "memory"])
    arguments = parser.parse_args()
    results = harness.Results("overhead")
    cases = [case for case in CASES if case.name in arguments.cases]
    failures: list[str] = []
    with_memory = "memory" in arguments.cases
    overall = harness.Budget(arguments.budget_s - (MEMORY_S if with_memory else 0.0))
    for number, case in enumerate(cases):
        # What is left is shared out, so that a slow target does not take the others' time.
        shares = [SHARE.get(later.name, 1.0) for later in cases[number:]]
        budget = harness.Budget(overall.left_s * shares[0] / sum(shares))
        try:
            if case.rate is None:
                measure_steps(results, budget, case, arguments)
                continue
            same = measure_case(
                results, budget, case, 1 if arguments.quick else arguments.pairs, arguments.work, arguments.quick
            )
        except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others their measurement)
            failures.append(f"{case.name}: {failure}")
            results.add(case=case.name, **harness.error_members(failure))
            continue
        if not same:
            failures.append(f"{case.name}: the runs with and without the interposer did not compute the same")
            results.add(case=case.name, error="the final digests differ")
    if with_memory:
        try:
            options = ("--steps", "10", "--state-gib", "0.25") if arguments.quick else ()
            results.summary |= within.memory(results, arguments.work, options)
        except Exception as failure:  # noqa: BLE001 (see above)
            failures.append(f"memory: {failure}")
            results.add(case="memory", **harness.error_members(failure))
    if added_ns := results.summary.get("launch_added_ns"):
        for name in ("train", "decode"):
            if step_s := results.summary.get(f"{name}_turns_step_s"):
                per_step = results.summary[f"{name}_turns_launches_per_step"]
                results.summary[f"{name}_launch_bound"] = step_s / (step_s + per_step * added_ns * 1e-9)
    harness.finish(results, GOALS, failures)
    return 0 if not failures else 1


if __name__ == "__main__":
    sys.exit(main())
