"""A training run out, a model server in: how long until the server computes again, warm and cold, against the driver.

Both targets take each other's place: `switch OUT IN` with both copies at once where the GPU has room for both. `warm`
leaves the context of what leaves on the GPU, so that the switch back needs no driver's restore; each level is measured
in both directions, and the one with the training going out is the summary's.

* warm_s, cold_s             from the call to the end of the incoming target's first step
* data_over_larger_transfer  from the begin of the first copy to the end of the last one, over the larger of the two
                             transfers alone at the speed of pinned copies, measured in the same run (cold; with
                             `warm_` warm; with `back_` of the switch back)
* bidirectional_ceiling_s    pinned copies of the same two sizes, both directions at once, while neither target runs;
                             data_over_bidirectional is the same part over that
* speedup_vs_driver          cuCheckpointProcess* of the same programs without the interposer, out and then in, over
                             cold_s

The driver's two programs are started with the others, because a start takes as long as everything else, and stopped
(SIGSTOP) until woodfrog's part is done: all four must fit the GPU, some 75 GB. Most valuable first: cold, ceiling, warm
(left out for what the driver needs), driver.

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Switched:
    """One switch."""

    first_step_s: float
    data_s: float
    larger_transfer_s: float
    out_bytes: int
    in_bytes: int

    @property
    def ratio(self) -> float:
        """The data part over the larger transfer."""
        return self.data_s / self.larger_transfer_s


def switch(
    results: harness.Results,
    leaving: target_process.TargetRun,
    coming: target_process.TargetRun,
    ceiling: driver_baseline.Ceiling,
    *,
    level: str,
    repetition: int,
) -> Switched:
    """One switch, to the first step of the one that comes."""
    import woodfrog

    marks: dict[tuple[str, str], float] = {}

    def mark(event: dict[str, Any]) -> None:
        if event["event"] in ("begin", "end"):
            marks[event["phase"], event["event"]] = time.time()

    coming.log.read()
    call = woodfrog_calls.timed(woodfrog.switch, leaving.handle, coming.handle, level=level, on_event=mark)
    result = call.result
    one = Switched(
        first_step_s(coming, call.begin_s),
        max(marks[copy, "end"] for copy in COPIES) - min(marks[copy, "begin"] for copy in COPIES),
        max(result.out_["bytes"] / ceiling.d2h_bytes_per_s, result.in_["bytes"] / ceiling.h2d_bytes_per_s),
        result.out_["bytes"],
        result.in_["bytes"],
    )
    begins_s = {copy: marks[copy, "begin"] - call.begin_s for copy in COPIES}
    results.add(
        kind="woodfrog", out=leaving.name, level=level, repetition=repetition, overlapped=result.overlapped,
        data_over_larger_transfer=one.ratio, begins_s=begins_s, **asdict(one), **call.members(),
    )  # fmt: skip
    return one


def measure_woodfrog(
    results: harness.Results,
    budget: harness.Budget,
    arguments: Any,
    leaving: target_process.TargetRun,
    coming: target_process.TargetRun,
    ceiling: driver_baseline.Ceiling,
) -> None:
    """Both levels, there and back again; the ceiling of both directions at once in between."""
    import woodfrog

    coming.wait_start()
    coming.wait_more_steps(1)
    woodfrog.suspend(coming.handle)
    leaving.wait_start()
    bidirectional_s: dict[str, float] = {}
    for level, repetitions in (("cold", arguments.repetitions), ("warm", arguments.repetitions - 1)):
        there: list[Switched] = []
        back: list[Switched] = []
        begin_s = time.monotonic()
        # The first repetition populates the arena, and for `warm` it finds the other one cold.
        for repetition in range(repetitions + 1):
            each_s = (time.monotonic() - begin_s) / max(1, repetition)
            if level == "warm" and repetition > 1 and not budget.allows(arguments.driver_s + each_s):
                break
            leaving.wait_more_steps(1)
            there.append(switch(results, leaving, coming, ceiling, level=level, repetition=repetition))
            back.append(switch(results, coming, leaving, ceiling, level=level, repetition=repetition))
            if not bidirectional_s:
                bidirectional_s = both_ways(results, leaving, there[0])
            if repetition:
                prefix = "" if level == "cold" else f"{level}_"
                results.summary |= harness.Spread.of(one.first_step_s for one in there[1:]).members(f"{level}_s")
                for way, of, prefix_way in ((there, "there", prefix), (back, "back", f"{prefix}back_")):
                    data_s = harness.median(one.data_s for one in way[1:])
                    results.summary[f"{prefix_way}data_over_larger_transfer"] = harness.median(
                        one.ratio for one in way[1:]
                    )
                    results.summary[f"{prefix_way}data_over_bidirectional"] = data_s / bidirectional_s[of]


def both_ways(results: harness.Results, leaving: target_process.TargetRun, one: Switched) -> dict[str, float]:
    """The ceiling of each direction of the switch, with nothing else on the bus."""
    import woodfrog

    leaving.wait_more_steps(1)
    woodfrog.suspend(leaving.handle)
    seconds = {
        "there": driver_baseline.both_ways_s(one.out_bytes, one.in_bytes),
        "back": driver_baseline.both_ways_s(one.in_bytes, one.out_bytes),
    }
    woodfrog.resume(leaving.handle)
    results.summary["bidirectional_ceiling_s"] = seconds["there"]
    results.summary["bidirectional_over_larger_transfer"] = seconds["there"] / one.larger_transfer_s
    results.add(
        kind="both ways at once", larger_transfer_s=one.larger_transfer_s,
        both_gb_per_s=(one.out_bytes + one.in_bytes) / seconds["there"] / 1e9, **seconds,
    )  # fmt: skip
    return seconds


def park(target: target_process.TargetRun) -> None:
    """Stops it once it has made a step."""
    target.wait_start()
    target.wait_more_steps(1)
    os.kill(target.pid, signal.SIGSTOP)


def measure_driver(
    results: harness.Results,
    budget: harness.Budget,
    arguments: Any,
    leaving: target_process.TargetRun,
    coming: target_process.TargetRun,
) -> None:
    """The driver alone, with the same programs, which were parked: there, back, and there again."""
    for target in (leaving, coming):
        os.kill(target.pid, signal.SIGCONT)
    driver_baseline.driver_out(coming.pid)
    seconds: list[float] = []
    for repetition in range(arguments.driver_repetitions):
        for out, into in ((leaving, coming), (coming, leaving)):
            if repetition and not budget.allows(1.2 * seconds[-1]):
                return
            into.log.read()
            begin_s = time.time()
            out_s = driver_baseline.driver_out(out.pid)
            in_s = driver_baseline.driver_in(into.pid)
            first_s = first_step_s(into, begin_s)
            results.summary["driver_s" if out is leaving else "driver_back_s"] = first_s
            if out is leaving:
                seconds.append(first_s)
                results.summary |= harness.Spread.of(seconds).members("driver_s")
                if "cold_s" in results.summary:
                    results.summary["speedup_vs_driver"] = harness.median(seconds) / results.summary["cold_s"]
            results.add(
                kind="driver",
                out=out.name,
                repetition=repetition,
                first_step_s=first_s,
                out_s=sum(out_s),
                in_s=sum(in_s),
            )


def main() -> int:
    """Returns the exit status: 0 if woodfrog's switches were measured."""
    parser = harness.parser(__doc__ or "", budget_s=160)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of the transformer")
    parser.add_argument("--width", type=int, default=4096, help="of the transformer")
    parser.add_argument("--train-gib", type=float, default=16.0)
    parser.add_argument("--driver-repetitions", type=int, default=2)
    parser.add_argument(
        "--driver-s", type=float, default=50.0, help="kept for the driver's part: two checkpoints, a restore"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.driver_s = 2, 5.0

    results = harness.Results("switch")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []

    def attempt(what: str, measure: Callable[[], None]) -> bool:
        try:
            measure()
        except Exception as failure:  # noqa: BLE001 (what was measured before must not be lost)
            failures.append(f"{what}: {failure}")
            results.add(kind=what, **harness.error_members(failure))
            return False
        return True

    ceiling = driver_baseline.copy_ceiling((64 << 20) if arguments.quick else 4 * harness.GIB)
    results.summary |= ceiling.members()
    (out_name, out_options), (in_name, in_options) = programs(arguments)
    work = arguments.work
    with (
        target_process.plain(in_name, in_options, work, "driver-in") as driver_coming,
        target_process.plain(out_name, out_options, work, "driver-out") as driver_leaving,
        target_process.interposed(in_name, in_options, work, "switch-in") as coming,
        target_process.interposed(out_name, out_options, work, "switch-out") as leaving,
    ):
        # One that could not be parked must not run beside what is measured.
        parked = [attempt("driver", lambda one=one: park(one)) or one.end() for one in (driver_coming, driver_leaving)]
        attempt("woodfrog", lambda: measure_woodfrog(results, budget, arguments, leaving, coming, ceiling))
        leaving.end()
        coming.end()
        if all(parked):
            attempt("driver", lambda: measure_driver(results, budget, arguments, driver_leaving, driver_coming))
    harness.finish(results, GOALS, failures)
    return 1 if any(text.startswith("woodfrog") for text in failures) else 0


if __name__ == "__main__":
    sys.exit(main())
