"""A training run that is checkpointed while it goes on: what it waits for, what the drain costs it, what is left of its
time, against the driver alone, against waiting for the data (stop), and against saving itself.

For each size the target is checkpointed into an empty store each time, so that all of its state moves:

* auto, cow, stop   woodfrog.checkpoint(concurrent=…), each without and with the CPU side; `early_bytes`, `waits` and
  `waited_s` say what cow captured because the target was about to write it, and how long its calls waited for that
* driver       cuCheckpointProcess{Lock,Checkpoint,Restore,Unlock} on the same program without the interposer
* torch.save, dcp.async_save   the program saves its model and optimizer itself (targets/saving.py): no gradients, so
  12 of the 16 bytes a parameter. A baseline for which the host has no memory is not begun, and its row says so

As the target sees it: `lost_s` is the time from its last step before the operation to its first one after all of it,
less what that many usual steps take, so it has the stall and what the drain and the writing slow down. What is usual is
the mean of two medians, of CALM_STEPS steps before it and of as many behind it, when its store is gone. What that is
worth is seen with --quiet-steps: `quiet_speed` is the speed of so many steps with nothing beside them, told in the
same way. `steps` has all of them.

summary, the worse of the sizes: stall_beyond_floor_ms (the stall without the CPU side, less the driver's own calls in
it; driver_s_… says what those took, which copies beside them may slow), gpu_stall_beyond_floor_ms (the same without the
wait for what the target itself had in flight, see `in_flight_s`), drain_iteration_speed (of the steps while it
drains; 1 if it had drained before the target ran on), effective_ratio_1min and _5min (1 - lost_s / interval, with the
CPU side); per size and way with a suffix. Where that stall went is in the rows: `stall_detail_ms`, and of it in the
summary handle_calls_ms_… (the driver's calls for the handles) and between_ms_… (between the daemon's parts).

Results go to concurrent.json. (A file concurrent.py in this folder would hide Python's own module from the others.)

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import bisect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import driver_baseline
import harness
import target_process
import woodfrog_calls

GOALS = {
    "stall_beyond_floor_ms": "<= 20",
    "gpu_stall_beyond_floor_ms": "<= 20",
    "drain_iteration_speed": ">= 0.95",
    "effective_ratio_1min": "",
    "effective_ratio_5min": ">= 0.998 (GCR 0.991)",
}
INTERVALS_S = {"1min": 60.0, "5min": 300.0}
WAYS = ("auto", "cow", "stop")
SAVES = {"torch": "torch_save", "async": "dcp_async_save"}
# Of the time budget, for woodfrog's own checkpoints; sizes share it by their bytes and START_GIB more for the start.
WOODFROG_SHARE, START_GIB = 0.65, 10.0
# What a baseline is expected to take: the start, and then the driver's 9.7 to 15.9 s + 2.9 s for 16 GiB, or two
# savings at the 2.7 to 3.5 GB/s of pageable memory (FACTS section 1; of 16 bytes a parameter 12 are saved).
START_S = 25.0
SECONDS_PER_GIB = {"driver": 1.2, "torch": 0.6, "async": 0.9}
# Host memory for each byte of state: the driver's copy; the file in memory; that and the copy it is written from.
HOST_MEMORY = {"driver": 1.0, "torch": 0.75, "async": 1.5}
SPARE_GIB = 8.0
CALM_STEPS = 12  # before and behind each operation, for the usual time of a step
SETTLING_STEPS = 3  # behind it, before those


class Marks:
    """When phases began and ended, by the clock that targets write their steps by. Pass it as on_event."""

    def __init__(self) -> None:
        self.at: dict[tuple[str, str], float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] in ("begin", "end"):
            self.at[event["phase"], event["event"]] = time.time()


@contextmanager
def empty_store(work: Path) -> Iterator[Path]:
    """A store of its own, gone afterwards."""
    place = Path(os.environ.get("WOODFROG_STORE", work / "stores")) / f"concurrent-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def options(name: str, size_gib: float) -> list[str]:
    if name == "train_gpt2":
        # Nothing but state is large, so that 64 GiB of it and a copy of all memory fit a GPU of 141 GB: a short batch,
        # and fp32, because autocast keeps a second copy of the weights.
        shape = ["--batch", "1", "--sequence", "128", "--precision", "fp32"]
        return ["--steps", "1000000", "--state-gib", str(size_gib), *shape]
    return ["--state-gib", str(size_gib), "--burst", "0", "--pace-ms", "5"]


def speed(log: target_process.Log, begin_s: float, end_s: float, usual_s: float) -> float | None:
    """The speed of the steps in an interval, 1 as usual; None if no step begins in it. A drain is a few steps long, so
    the one that outlasts it counts too, and all that the steps took too long is laid at the interval's door."""
    times = [line["time_s"] for line in log.lines]
    first = bisect.bisect_left(times, begin_s)  # the end of the step in which the target stood
    last = bisect.bisect_left(times, end_s)
    if first >= last or last >= len(times):
        return None
    span_s = end_s - times[first]
    excess_s = times[last] - times[first] - (last - first) * usual_s
    return max(0.0, 1.0 - excess_s / span_s)


def measure_woodfrog(
    results: harness.Results, budget: harness.Budget, budget_s: float, name: str, size_gib: float, arguments: Any
) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Checkpoints in every way, with and without the CPU side, each once and again in `budget_s` seconds; their rows by
    (way, cpu), the way with the background's setting where that is not the first one."""
    import woodfrog

    rows: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    longest_s = 0.0
    env = {"WOODFROG_POOL_MIB": str(arguments.pool_mib)} if arguments.pool_mib else {}
    log = f"concurrent-{size_gib:g}"
    with target_process.interposed(name, options(name, size_gib), arguments.work, log, env=env) as target:
        target.wait_start()
        share = harness.Budget(min(budget.left_s, budget_s))
        plan = []
        for setting in arguments.background:
            # The first one of a daemon populates the arena: it is reported, as number 0, and not counted.
            plan += [(setting, "auto", False, 0)]
            plan += [
                (setting, way, cpu, n)
                for n in range(1, arguments.repetitions + 1)
                for cpu in arguments.cpu
                for way in arguments.ways
            ]
        before_s = calm_step_s(target)
        for setting, way, cpu, number in plan:
            if number > 1 and not share.allows(2 * longest_s):
                continue
            if number == 0 and len(arguments.background) > 1:
                use_background(setting)
            quiet: dict[str, float | None] = {}
            if arguments.quiet_steps and number:
                begin_s = time.time()
                target.wait_more_steps(arguments.quiet_steps)
                end_s = time.time()
                earlier_s, before_s = before_s, calm_step_s(target)
                quiet = {"quiet_speed": speed(target.log, begin_s, end_s, (earlier_s + before_s) / 2)}
            marks = Marks()
            with empty_store(arguments.work) as store:
                call = woodfrog_calls.timed(
                    woodfrog.checkpoint, target.handle, store=store, cpu=cpu, concurrent=way, compress="none",
                    on_event=marks,
                )  # fmt: skip
            longest_s = max(longest_s, call.call_s)
            target.wait_more_steps(SETTLING_STEPS)
            after_s = calm_step_s(target)
            usual = {"before_step_s": before_s, "after_step_s": after_s, "usual_step_s": (before_s + after_s) / 2}
            before_s = after_s
            row = {**usual, **quiet, **woodfrog_row(target.log, call, marks, usual["usual_step_s"])}
            row |= {"pool_mib": arguments.pool_mib, "background": setting}
            row["steps"] = steps(target.log, call.begin_s, marks)
            results.add(
                kind="woodfrog", size_gib=size_gib, way=way, cpu=cpu, repetition=number, **row, **call.members()
            )
            if number:
                label = way if setting == arguments.background[0] else f"{way}_background_{setting or 'usual'}"
                rows.setdefault((label, cpu), []).append(row)
    return rows


def use_background(setting: str) -> None:
    """A new daemon at the next call, with these bounds of what it does beside a target that runs: THREADS[:RATE]."""
    threads, _, rate = setting.partition(":")
    for variable, text in (("WOODFROG_BACKGROUND_THREADS", threads), ("WOODFROG_BACKGROUND_RATE", rate)):
        os.environ.pop(variable, None)
        if text:
            os.environ[variable] = text
    subprocess.run([sys.executable, "-m", "woodfrog", "daemon", "stop"], check=True, stdout=subprocess.DEVNULL)


def calm_step_s(target: target_process.TargetRun) -> float:
    """The median time of the next CALM_STEPS steps; nothing may be beside them."""
    target.wait_more_steps(CALM_STEPS)
    return float(target.log.usual_step_s(time.time(), CALM_STEPS))


def lost_in_s(target: target_process.TargetRun, before_s: float, begin_s: float, end_s: float) -> float:
    """What an operation in that interval cost, which the steps before it took `before_s` for."""
    target.wait_more_steps(SETTLING_STEPS)
    return float(target.log.lost_s(begin_s, end_s, (before_s + calm_step_s(target)) / 2))


def steps(log: target_process.Log, begin_s: float, marks: Marks) -> dict[str, Any]:
    """For whoever asks later: each step from CALM_STEPS before the call to the last one, as the time of its end after
    the call's begin, and when the phases ended by the same clock."""
    ends = [line["time_s"] - begin_s for line in log.lines]
    first = max(0, bisect.bisect_left(ends, 0.0) - CALM_STEPS - 1)
    told = {phase: round(at - begin_s, 4) for (phase, what), at in marks.at.items() if what == "end"}
    return {"ends_s": [round(end, 4) for end in ends[first:]], "phase_ends_s": told}


def woodfrog_row(log: target_process.Log, call: woodfrog_calls.Timed, marks: Marks, usual_s: float) -> dict[str, Any]:
    result = call.result
    resumed_s, drained_s = marks.at["return", "end"], marks.at["drain", "end"]
    beyond_s = result.stall_s - result.driver_s - result.stall_parts.get("cpu", 0.0)
    flight_s = in_flight_s(result)
    return {
        "gap_s": max(log.gaps_s(call.begin_s, call.end_s)) - usual_s,
        "stall_s": result.stall_s,
        "stall_beyond_floor_s": beyond_s,
        "in_flight_s": flight_s,
        "gpu_stall_beyond_floor_s": None if flight_s is None else beyond_s - flight_s,
        "stall_parts_s": result.stall_parts,
        "driver_s": result.driver_s,
        "stall_detail_ms": stall_detail_ms(result),
        "lost_s": log.lost_s(call.begin_s, call.end_s, usual_s),
        "drained_after_s": max(0.0, drained_s - resumed_s),
        "drain_speed": speed(log, resumed_s, drained_s, usual_s),
        "write_speed": speed(log, max(resumed_s, drained_s), marks.at["commit", "end"], usual_s),
        "concurrent": result.concurrent,
        "copy_on_write": result.copy_on_write,
        "retaken": result.retaken,
        "gpu_bytes": result.gpu_bytes,
        "gpu_handles": result.gpu_handles,
        "gpu_new_bytes": result.gpu_new_bytes,
        "ring": result.ring,
    }


def in_flight_s(result: Any) -> float | None:
    """Of the stall, what the quiesce waited for work that the target itself had begun; None where that is not known.

    It is the agent's time in two steps: `gate`, from when no further call may begin until every thread has left the one
    that it is in (a blocking copy, a synchronisation), and `idle`, from then until all contexts have finished what is
    queued. All that time the GPU works for the target, or a thread of it is in a call of its own: it would have waited
    for the same work without a checkpoint. Left out with it is our own share of the two steps (a membarrier, an event
    for each context), 0.1 ms where nothing is in flight. And where a thread is long in a call that gives the GPU no
    work (it loads a module), others wait at the gate that would have gone on: their wait is left out as well.

    Of several processes the longest, since they are waited for together, and never more than the daemon waited."""
    detail = result.stall_detail
    if not detail or not detail["agents"]:
        return None
    of_agents = [
        sum(agent.get("quiesce", {}).get(spending, (0.0, 0))[0] for spending in ("gate", "idle"))
        for agent in detail["agents"]
    ]
    return float(min(max(of_agents), detail["daemon"].get("quiesce", 0.0)))


def stall_detail_ms(result: Any) -> dict[str, Any]:
    """Where the stall beyond the driver's own checkpoint went. `daemon`: its thread by part, and `between` them (phases
    begin and end there); parts named after a message include the agent's share. That is in `agents`, by command and by
    what it was spent on, with how often. `calls`: of all of it, the driver's calls for the handles."""
    detail = result.stall_detail
    if not detail:
        return {}
    parts = {name: 1e3 * seconds for name, seconds in detail["daemon"].items()}
    waited_s = result.stall_s - result.driver_s - sum(result.stall_parts.get(name, 0.0) for name in ("cpu", "data"))
    parts["between"] = 1e3 * waited_s - sum(parts.values())
    agents: list[dict[str, dict[str, list[float]]]] = [
        {
            command: {spending: [round(1e3 * seconds, 3), count] for spending, (seconds, count) in spent.items()}
            for command, spent in agent.items()
        }
        for agent in detail["agents"]
    ]
    calls = [
        sum(spent[0] for row in agent.values() for spending, spent in row.items() if spending.endswith("_call"))
        for agent in agents
    ]
    return {
        "daemon": {name: round(value, 3) for name, value in parts.items()},
        "agents": agents,
        "calls": max(calls, default=0.0),
    }


def measure_driver(results: harness.Results, name: str, size_gib: float, arguments: Any) -> float:
    """What one cycle of the driver alone costs the target."""
    with target_process.plain(name, options(name, size_gib), arguments.work, f"driver-{size_gib:g}") as target:
        target.wait_start()
        before_s = calm_step_s(target)
        call = woodfrog_calls.timed(driver_baseline.driver_cycle, target.pid)
        lost_s = lost_in_s(target, before_s, call.begin_s, call.end_s)
    results.add(kind="driver", size_gib=size_gib, lost_s=lost_s, total_s=call.result.total_s)
    return lost_s


def measure_saving(results: harness.Results, mode: str, size_gib: float, arguments: Any) -> float:
    """What the program's own saving costs it, the second time (the first populates host memory)."""
    with empty_store(arguments.work) as place:
        more = ["--save", mode, "--save-to", str(place)]
        program = [*options("train_gpt2", size_gib), *more]
        with target_process.plain("train_gpt2", program, arguments.work, f"{mode}-{size_gib:g}") as target:
            target.wait_start()
            lost_s = 0.0
            for number in range(2):
                before_s = calm_step_s(target)
                begin_s, end_s = target.save()
                lost_s = lost_in_s(target, before_s, begin_s, end_s)
                results.add(
                    kind=SAVES[mode], size_gib=size_gib, repetition=number, lost_s=lost_s, total_s=end_s - begin_s
                )
    return lost_s


def median(rows: list[dict[str, Any]], member: str) -> float:
    return harness.median(row[member] for row in rows if row[member] is not None)


def ratios(lost_s: float) -> dict[str, float]:
    return {label: 1.0 - lost_s / interval_s for label, interval_s in INTERVALS_S.items()}


def summarise(results: harness.Results, size_gib: float, rows: dict[tuple[str, bool], list[dict[str, Any]]]) -> None:
    """One size: its own members, and the headline's, where this size is worse than those before."""
    summary = results.summary

    def worst(name: str, value: float, worse: Any) -> None:
        summary[name] = worse(summary[name], value) if name in summary else value

    for (way, cpu), some in rows.items():
        label = f"{way}{'_cpu' if cpu else ''}_{size_gib:g}gib"
        summary[f"stall_s_{label}"] = median(some, "stall_s")
        summary[f"driver_s_{label}"] = median(some, "driver_s")
        summary[f"gpu_handles_{label}"] = median(some, "gpu_handles")
        if details := [row["stall_detail_ms"] for row in some if row["stall_detail_ms"]]:
            summary[f"handle_calls_ms_{label}"] = harness.median(one["calls"] for one in details)
            summary[f"between_ms_{label}"] = harness.median(one["daemon"]["between"] for one in details)
        summary[f"stall_beyond_floor_ms_{label}"] = 1e3 * median(some, "stall_beyond_floor_s")
        if told := [row for row in some if row["gpu_stall_beyond_floor_s"] is not None]:
            summary[f"gpu_stall_beyond_floor_ms_{label}"] = 1e3 * median(told, "gpu_stall_beyond_floor_s")
        for interval, ratio in ratios(median(some, "lost_s")).items():
            summary[f"effective_ratio_{interval}_{label}"] = ratio
        if any(row["drain_speed"] is not None for row in some):
            summary[f"drain_iteration_speed_{label}"] = median(some, "drain_speed")
        if known := [row["quiet_speed"] for row in some if row.get("quiet_speed") is not None]:
            summary[f"quiet_speed_{label}"] = harness.median(known)
            summary[f"quiet_speed_min_{label}"], summary[f"quiet_speed_max_{label}"] = min(known), max(known)
        if way == "cow":
            captured = [row["copy_on_write"] for row in some if row["copy_on_write"]]
            summary[f"retaken_{label}"] = sum(1 for row in some if row["retaken"])
            for member in ("early_bytes", "waits", "waited_s") if captured else ():
                summary[f"{member}_{label}"] = harness.median(one[member] for one in captured)
    if quick := rows.get(("auto", False)):
        worst("stall_beyond_floor_ms", 1e3 * median(quick, "stall_beyond_floor_s"), max)
        if told := [row for row in quick if row["gpu_stall_beyond_floor_s"] is not None]:
            worst("gpu_stall_beyond_floor_ms", 1e3 * median(told, "gpu_stall_beyond_floor_s"), max)
        slowed = [row for row in quick if row["drain_speed"] is not None]
        if slowed:  # else no step ran during a drain, and there is nothing to say
            worst("drain_iteration_speed", median(slowed, "drain_speed"), min)
    if whole := rows.get(("auto", True)):
        for interval, ratio in ratios(median(whole, "lost_s")).items():
            worst(f"effective_ratio_{interval}", ratio, min)


def main() -> int:
    """Returns the exit status: 0 if every size was measured with woodfrog."""
    parser = harness.parser(__doc__ or "", budget_s=500)
    parser.add_argument("--sizes-gib", type=float, nargs="+", default=[16.0, 64.0], help="in order of importance")
    parser.add_argument("--target", choices=("train_gpt2", "sparse_writes"), help="the second runs without torch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--background", nargs="+", default=[""], metavar="THREADS[:RATE]",
        help="WOODFROG_BACKGROUND_THREADS and _RATE in turn, : is the usual ones; the first is the summary's",
    )  # fmt: skip
    parser.add_argument("--quiet-steps", type=int, default=0, help="before each checkpoint; 0: none")
    parser.add_argument(
        "--cpu", type=lambda text: text == "yes", nargs="+", default=[False, True], metavar="yes|no",
        help="without and with the CPU side (no, yes)",
    )  # fmt: skip
    parser.add_argument("--pool-mib", type=int, default=0, help="$WOODFROG_POOL_MIB of the target")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="of woodfrog's own checkpoints")
    parser.add_argument("--without", nargs="*", default=[], choices=("driver", *SAVES), help="baselines to leave out")
    arguments = parser.parse_args()
    name: str = arguments.target or ("sparse_writes" if arguments.quick else "train_gpt2")
    sizes: list[float] = [0.125] if arguments.quick else arguments.sizes_gib
    if arguments.quick:
        arguments.repetitions = 1

    results = harness.Results("concurrent")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []

    def attempt(what: str, size_gib: float, measure: Any) -> None:
        try:
            measure()
        except Exception as failure:  # noqa: BLE001 (one part that fails must not cost the others their measurement)
            failures.append(f"{what}, {size_gib:g} GiB: {failure}")
            results.add(kind=what, size_gib=size_gib, **harness.error_members(failure))

    def baseline(what: str, size_gib: float, measure: Any) -> None:
        needed_gib = HOST_MEMORY[what] * size_gib + SPARE_GIB
        available_gib = psutil.virtual_memory().available / harness.GIB
        reason = ""
        if what in arguments.without:
            reason = "left out"
        elif not budget.allows(START_S + SECONDS_PER_GIB[what] * size_gib):
            reason = "the time budget was used up"
        elif not arguments.quick and available_gib < needed_gib:
            reason = f"it needs {needed_gib:.0f} GiB of host memory, and {available_gib:.0f} GiB are there"
        if reason:
            results.add(kind=SAVES.get(what, what), size_gib=size_gib, not_measured=reason)
            return

        def measured() -> None:
            for interval, ratio in ratios(measure()).items():
                results.summary[f"{SAVES.get(what, what)}_effective_ratio_{interval}_{size_gib:g}gib"] = ratio

        attempt(what, size_gib, measured)

    shares = [START_GIB + size_gib for size_gib in sizes]
    for size_gib, share in zip(sizes, shares, strict=True):
        share_s = WOODFROG_SHARE * arguments.budget_s * share / sum(shares)

        def woodfrog_ways(size_gib: float = size_gib, share_s: float = share_s) -> None:
            summarise(results, size_gib, measure_woodfrog(results, budget, share_s, name, size_gib, arguments))

        attempt("woodfrog", size_gib, woodfrog_ways)
    for size_gib in sizes:
        baseline("driver", size_gib, lambda s=size_gib: measure_driver(results, name, s, arguments))
        for mode in SAVES if name == "train_gpt2" else ():
            baseline(mode, size_gib, lambda m=mode, s=size_gib: measure_saving(results, m, s, arguments))
    harness.finish(results, GOALS, failures)
    return 1 if any(text.startswith("woodfrog") for text in failures) else 0


if __name__ == "__main__":
    sys.exit(main())
