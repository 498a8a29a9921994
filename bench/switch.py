"""A training run out, a model server in: how long until the server computes again, warm and cold, against the driver.

Both targets are started once, and take each other's place: `switch OUT IN` with both copies at once where the GPU has
room for both. `warm` leaves the context of what leaves on the GPU, so that the switch back needs no driver's restore;
each level is measured in both directions, and the one with the training going out is the summary's.

* warm_s, cold_s             from the call to the end of the incoming target's first step
* data_over_larger_transfer  from the begin of the first copy to the end of the last one, over the larger of the two
                             transfers at the speed of pinned copies, measured in the same run (cold)
* speedup_vs_driver          cuCheckpointProcess* of the same programs without the interposer, out and then in, over
                             cold_s

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import driver_baseline
import harness
import target_process
import woodfrog_calls

GOALS = {"data_over_larger_transfer": "<= 1.1"}
COPIES = ("out_drain", "in_refill")


def programs(arguments: Any) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Name and options of the one that leaves and of the one that comes."""
    if arguments.quick:
        small = ["--burst", "0", "--pace-ms", "5", "--state-gib"]
        return ("sparse_writes", [*small, "0.125"]), ("sparse_writes", [*small, "0.0625", "--seed", "2"])
    serving = ["--layers", str(arguments.layers), "--width", str(arguments.width), "--burst", "0"]
    # Little beside the state, so that the data of both fits an arena of 40 GiB.
    shape = ["--batch", "1", "--sequence", "128", "--precision", "fp32"]
    return ("train_gpt2", ["--steps", "1000000", "--state-gib", str(arguments.train_gib), *shape]), (
        "serve_transformer",
        serving,
    )


def first_step_s(target: target_process.TargetRun, begin_s: float) -> float:
    """Seconds from that moment to the end of the target's first step after it."""
    target.wait_more_steps(1)
    return next(line["time_s"] for line in target.log.lines if line["time_s"] > begin_s) - begin_s


def switch(
    results: harness.Results,
    leaving: target_process.TargetRun,
    coming: target_process.TargetRun,
    ceiling: driver_baseline.Ceiling,
    *,
    level: str,
    repetition: int,
) -> tuple[float, float]:
    """One switch: seconds to the first step, and the data part over the larger transfer."""
    import woodfrog

    marks: dict[tuple[str, str], float] = {}

    def mark(event: dict[str, Any]) -> None:
        if event["event"] in ("begin", "end"):
            marks[event["phase"], event["event"]] = time.time()

    coming.log.read()
    call = woodfrog_calls.timed(woodfrog.switch, leaving.handle, coming.handle, level=level, on_event=mark)
    seconds = first_step_s(coming, call.begin_s)
    result = call.result
    data_s = max(marks[one, "end"] for one in COPIES) - min(marks[one, "begin"] for one in COPIES)
    larger_s = max(result.out_["bytes"] / ceiling.d2h_bytes_per_s, result.in_["bytes"] / ceiling.h2d_bytes_per_s)
    results.add(
        kind="woodfrog", out=leaving.name, level=level, repetition=repetition, first_step_s=seconds, data_s=data_s,
        larger_transfer_s=larger_s, overlapped=result.overlapped, out_bytes=result.out_["bytes"],
        in_bytes=result.in_["bytes"], **call.members(),
    )  # fmt: skip
    return seconds, data_s / larger_s


def measure_woodfrog(results: harness.Results, budget: harness.Budget, arguments: Any) -> None:
    """Both levels, there and back again."""
    import woodfrog

    size_bytes = (64 << 20) if arguments.quick else 4 * harness.GIB
    ceiling = driver_baseline.copy_ceiling(size_bytes)
    results.summary |= ceiling.members()
    (out_name, out_options), (in_name, in_options) = programs(arguments)
    with (
        target_process.interposed(in_name, in_options, arguments.work, "switch-in") as coming,
    ):
        coming.wait_start()
        coming.wait_more_steps(3)
        woodfrog.suspend(coming.handle)
        with target_process.interposed(out_name, out_options, arguments.work, "switch-out") as leaving:
            leaving.wait_start()
            for level in ("cold", "warm"):
                seconds: list[float] = []
                ratios: list[float] = []
                # The first repetition populates the arena, and for `warm` it finds the other one cold.
                for repetition in range(arguments.repetitions + 1):
                    if repetition > 1 and not budget.allows(4 * max(seconds)):
                        break
                    leaving.wait_more_steps(3)
                    there = switch(results, leaving, coming, ceiling, level=level, repetition=repetition)
                    coming.wait_more_steps(3)
                    switch(results, coming, leaving, ceiling, level=level, repetition=repetition)
                    if repetition:
                        seconds.append(there[0])
                        ratios.append(there[1])
                spread = harness.Spread.of(seconds)
                results.summary |= spread.members(f"{level}_s")
                if level == "cold":
                    results.summary["data_over_larger_transfer"] = harness.median(ratios)


def measure_driver(results: harness.Results, arguments: Any) -> None:
    """The driver alone, with the same programs."""
    (out_name, out_options), (in_name, in_options) = programs(arguments)
    with target_process.plain(in_name, in_options, arguments.work, "driver-in") as coming:
        coming.wait_start()
        coming.wait_more_steps(3)
        driver_baseline.driver_out(coming.pid)
        with target_process.plain(out_name, out_options, arguments.work, "driver-out") as leaving:
            leaving.wait_start()
            leaving.wait_more_steps(3)
            coming.log.read()
            begin_s = time.time()
            out_s = driver_baseline.driver_out(leaving.pid)
            in_s = driver_baseline.driver_in(coming.pid)
            seconds = first_step_s(coming, begin_s)
    results.add(kind="driver", first_step_s=seconds, out_s=sum(out_s), in_s=sum(in_s))
    results.summary["driver_s"] = seconds
    if "cold_s" in results.summary:
        results.summary["speedup_vs_driver"] = seconds / results.summary["cold_s"]


def main() -> int:
    """Returns the exit status: 0 if woodfrog's switches were measured."""
    parser = harness.parser(__doc__ or "", budget_s=240)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of the transformer")
    parser.add_argument("--width", type=int, default=4096, help="of the transformer")
    parser.add_argument("--train-gib", type=float, default=16.0)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions = 1

    results = harness.Results("switch")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    for what, measure in (
        ("woodfrog", lambda: measure_woodfrog(results, budget, arguments)),
        ("driver", lambda: measure_driver(results, arguments)),
    ):
        try:
            measure()
        except Exception as failure:  # noqa: BLE001 (what was measured before must not be lost)
            failures.append(f"{what}: {failure}")
            results.add(kind=what, **harness.error_members(failure))
    harness.finish(results, GOALS, failures)
    return 1 if any(text.startswith("woodfrog") for text in failures) else 0


if __name__ == "__main__":
    sys.exit(main())
