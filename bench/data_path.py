"""The data path: how fast a suspend drains GPU memory and a resume refills it, against pinned copies of the same run.

A target with --size-gib of state is suspended and resumed; the seconds of the `drain` and `refill` phases give the
rates, and the ceiling is pinned cuMemcpy of as many bytes, measured just before. After each resume the target checks
every byte on the GPU, and a wrong one ends the benchmark as a failure.

summary: d2h_ratio, h2d_ratio (goal: at least 0.97 each)
"""

from __future__ import annotations

import sys

import driver_baseline
import harness
import target_process
import woodfrog_calls

GOALS = {"d2h_ratio": ">= 0.97", "h2d_ratio": ">= 0.97", "wrong_words": "0"}


def main() -> int:
    """Returns the exit status: 0 if everything was measured and every byte was right."""
    parser = harness.parser(__doc__ or "", budget_s=90)
    parser.add_argument("--size-gib", type=float, default=16.0, help="GPU state of the target")
    parser.add_argument("--buffers", type=int, default=8, help="allocations that the state lies in")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    size_gib = min(arguments.size_gib, 2.0) if arguments.quick else arguments.size_gib
    repetitions = min(arguments.repetitions, 2) if arguments.quick else arguments.repetitions
    size_bytes = int(size_gib * harness.GIB)

    import woodfrog

    results = harness.Results("data_path")
    budget = harness.Budget(arguments.budget_s)
    warm_s = driver_baseline.warm_host_memory(size_bytes)
    ceiling = driver_baseline.copy_ceiling(size_bytes)
    results.add(kind="ceiling", size_bytes=size_bytes, streams=ceiling.streams, warm_s=warm_s, **ceiling.members())
    results.summary.update(ceiling.members())

    wrong_words = 0
    drained: list[float] = []
    refilled: list[float] = []
    options = ["--state-gib", str(size_gib), "--buffers", str(arguments.buffers), "--pace-ms", "1"]
    with target_process.interposed("fill_state", options, arguments.work, "data_path") as target:
        target.wait_start()
        target.wait_more_steps(20)
        # The first repetition fills the arena with memory that the kernel has yet to hand out: it is reported apart.
        for repetition in range(repetitions + 1):
            if repetition > 1 and not budget.allows(5.0):
                break
            suspend = woodfrog_calls.timed(woodfrog.suspend, target.handle)
            resume = woodfrog_calls.timed(woodfrog.resume, target.handle)
            target.wait_more_steps(5)
            wrong = target.verify()
            wrong_words += wrong
            drain_s, refill_s = suspend.phase_s("drain"), resume.phase_s("refill")
            if repetition:
                drained.append(size_bytes / drain_s)
                refilled.append(size_bytes / refill_s)
            results.add(
                kind="woodfrog", repetition=repetition, size_bytes=size_bytes, wrong_words=wrong,
                drain_gb_per_s=size_bytes / drain_s / 1e9, refill_gb_per_s=size_bytes / refill_s / 1e9,
                suspend=suspend.members(), resume=resume.members(),
            )  # fmt: skip

    drain, refill = harness.Spread.of(drained), harness.Spread.of(refilled)
    results.summary.update(
        d2h_ratio=drain.median / ceiling.d2h_bytes_per_s,
        h2d_ratio=refill.median / ceiling.h2d_bytes_per_s,
        drain_gb_per_s=drain.median / 1e9,
        drain_gb_per_s_min=drain.minimum / 1e9,
        drain_gb_per_s_max=drain.maximum / 1e9,
        refill_gb_per_s=refill.median / 1e9,
        refill_gb_per_s_min=refill.minimum / 1e9,
        refill_gb_per_s_max=refill.maximum / 1e9,
        repetitions=drain.count,
        wrong_words=wrong_words,
    )
    results.finish()
    harness.print_summary(results, GOALS)
    return 0 if wrong_words == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
