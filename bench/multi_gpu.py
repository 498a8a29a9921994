"""A job of several processes, on several GPUs or on one: what a checkpoint of all of it costs, and whether it goes on
unchanged.

`--program`: data-parallel training (train_ddp, the default), tensor-parallel generation (tp_generate), or CUDA tensors
passed between processes (share_tensors); NCCL with NCCL_NVLS_ENABLE=0. `--launcher`: whether torchrun is part of the
job, or a shell starts the ranks. `--gpus 1` puts all ranks on one GPU:
share_tensors as it is, train_ddp with gloo. driver_ranks and driver_share do the same without PyTorch, also on the
simulated GPU. It runs once undisturbed; then under woodfrog it is stopped and restored in new processes, with the GPUs
exchanged too where there are several, and checkpointed ten times as it runs; then suspended, resumed and migrated, as
far as there is time. A second undisturbed run goes as far as the jobs went: each rank's steps must be bitwise the same,
and each operation says whether the comparison reached beyond it. A training job of its own tells train_ratio: all its
ranks make some steps through the interposer, some past it, and so on (within.py), since two jobs one after the other
differ by more than is looked for. The driver's own checkpoint of the training, without
woodfrog, is tried last. Every operation has a time limit of its own; what fails is a row with its reason, and the rest
goes on.

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH, WOODFROG_SIMGPU_DEVICES=2, and use
--quick --program driver_ranks (with --launcher torchrun: $WOODFROG_BENCH_TORCH_PYTHON is the Python that has PyTorch).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import harness
import target_process
import within

GOALS = {
    "stall_over_control_floor": "≤ 1.25",
    "drain_ratio_sum": "≥ 0.95",
    "busbw_ratio": "≥ 0.99",
    "train_ratio": "≥ 0.998",
}
QUICK = {
    "train_ddp": ["--width=128", "--layers=2", "--batch=2", "--sequence=32"],
    "tp_generate": ["--width=256", "--layers=2", "--batch=2", "--length=32"],
    "share_tensors": ["--words=65536"],
    "driver_ranks": ["--kib=512"],
    "driver_share": ["--kib=512"],
}
# Where several ranks are on one GPU their gradients go through the CPU.
ONE_GPU = {"train_ddp": ["--width=512", "--layers=8"]}
# Programs whose steps take next to no time: jobs that something is done to pause after each; undisturbed runs, which
# have to come as far, do not.
PACED, PACE_MS = ("share_tensors", "driver_ranks", "driver_share"), 20
ALONE = ("share_tensors", "driver_share")  # they start their processes themselves: one target with one log
INTERPOSED = ("driver_share",)  # undisturbed as well: the simulated driver has no legacy IPC of its own
OPERATION_S = 15.0  # of one operation, as far as it can be foreseen
DRIVER_ALONE_S = 45.0
WITHIN_BLOCK, WITHIN_GROUPS = 4, 12  # steps of a block, groups of four blocks
LAUNCHER_TRIALS = 2  # operations that may fail before the ranks are started without torchrun
MOST_STEPS = 100_000  # a job ends when it is ended
NCCL = {
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "4",
}
DRIVER_ALONE = """
import sys, threading, time
from woodfrog.driver.process import DriverProcess
ranks = [DriverProcess(int(pid)) for pid in sys.argv[1:]]
def each(what, work):
    begun, failures = time.monotonic(), []
    def run(rank):
        try:
            work(rank)
        except Exception as failure:
            failures.append(failure)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(what, f"{time.monotonic() - begun:.4f}", "failed: " + str(failures[0]) if failures else "ok", flush=True)
    if failures:
        sys.exit(1)
each("lock", lambda rank: rank.lock(20.0))
each("checkpoint", lambda rank: rank.checkpoint())
each("restore", lambda rank: rank.restore())
each("unlock", lambda rank: rank.unlock())
"""
PINNED = """
import threading, time, torch
size, kind = 4 << 30, torch.uint8
pairs = [
    (torch.ones(size, dtype=kind, device=f"cuda:{k}"), torch.empty(size, dtype=kind, pin_memory=True))
    for k in range(torch.cuda.device_count())
]
best = 0.0
for _ in range(4):
    [torch.cuda.synchronize(k) for k in range(len(pairs))]
    begun = time.monotonic()
    for there, here in pairs:
        here.copy_(there, non_blocking=True)
    [torch.cuda.synchronize(k) for k in range(len(pairs))]
    best = max(best, len(pairs) * size / (time.monotonic() - begun) / 1e9)
print(best)
"""


class LimitError(Exception):
    """A step took longer than it may."""


def limited(seconds: float, work: Callable[[], Any]) -> Any:
    """`work`, on a thread of its own that is given up after `seconds`."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as raised:  # noqa: BLE001 - raised again below
            failure.append(raised)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise LimitError(f"not done within {seconds:g} s")
    if failure:
        raise failure[0]
    return result[0]


class Job:
    """One job with its ranks' logs; `run` is it as a target. Ended by `end`."""

    def __init__(self, label: str, arguments: Any, *, undisturbed: bool, more: Sequence[str] = ()) -> None:
        self._stack = ExitStack()
        alone = arguments.program in ALONE
        options = ["--steps", str(MOST_STEPS), *arguments.target, *more]
        if not undisturbed and arguments.program in PACED:
            options += ["--pace-ms", str(PACE_MS)]
        managed = not undisturbed or arguments.program in INTERPOSED
        options += ["--workers", str(max(1, arguments.ranks - 1))] if alone else []
        start = target_process.interposed if managed else target_process.plain
        ranks = target_process.NO_RANKS if alone else target_process.Ranks(arguments.ranks, arguments.launcher)
        environment = dict(NCCL)
        if arguments.pool_mib:
            environment["WOODFROG_POOL_MIB"] = str(arguments.pool_mib)
        if arguments.gpus < arguments.ranks:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(arguments.gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: arguments.gpus])
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # connections that lead out of the job could not be restored
        context = start(arguments.program, options, arguments.work, label, environment, ranks=ranks)
        self.run: target_process.TargetRun = self._stack.enter_context(context)
        self.turn = 0  # how far its GPUs are from where they were
        self.marks: list[tuple[str, int]] = []  # operations, and the step that it had reached some steps after each

    @property
    def logs(self) -> list[target_process.Log]:
        log = self.run.log
        return log.parts if isinstance(log, target_process.Logs) else [log]

    def last_step(self) -> int:
        self.run.log.read()
        return int(self.run.log.last_step)

    def pids(self) -> list[int]:
        return [log.start["pid"] for log in self.logs if log.start]

    def step_s(self) -> float:
        """Median seconds between rank 0's steps."""
        return statistics.median(self.logs[0].step_times_s(2))

    def reach(self, step: int, limit_s: float) -> None:
        self.run.wait_step(step, limit_s)

    def go_on(self, limit_s: float = 30.0) -> None:
        self.run.wait_more_steps(3, limit_s)

    def next_gpus(self, count: int) -> dict[str, str]:
        """Every GPU of the job becomes the next one of those that it is on."""
        self.turn += 1
        return {str(gpu): str((gpu + self.turn) % count) for gpu in range(count)}

    def end(self) -> None:
        self._stack.close()


def compared(reference: Job, other: Job) -> dict[str, Any]:
    """How many steps of how many ranks both have, and the first that differs, in words."""
    steps = 0
    for rank, (there, here) in enumerate(zip(reference.logs, other.logs, strict=True)):
        last = min(there.last_step, here.last_step)
        steps += last
        if different := target_process.steps_differ(there, here, 1, last):
            return {"compared_steps": steps, "different": f"rank {rank}: {different}"}
    return {"compared_steps": steps, "different": None}


def measured(
    results: harness.Results, what: str, limit_s: float, work: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """A row with what `work` returns, or with its failure; None then."""
    begun = time.monotonic()
    try:
        members = limited(limit_s, work)
    except Exception as failure:  # noqa: BLE001 - a row tells it
        results.add(what=what, ok=0, seconds=time.monotonic() - begun, **harness.error_members(failure))
        return None
    results.add(what=what, ok=1, seconds=time.monotonic() - begun, **members)
    return members  # type: ignore[no-any-return]


def timings(result: Any) -> dict[str, Any]:
    members = result.to_dict() if hasattr(result, "to_dict") else dict(vars(result))
    return {key: value for key, value in members.items() if key not in ("on_event", "log")}


def operations(
    results: harness.Results, budget: harness.Budget, arguments: Any, reference: Job, start_s: float
) -> list[Job]:
    """All operations, the most wanted first, on as few jobs as live through them; these jobs, ended. Time is left for a
    run as far as they went, whose start takes `start_s`."""
    import woodfrog

    job: Job | None = None
    gpus = arguments.gpus  # rank k is on GPU k, as far as there are so many
    stalls: list[float] = []
    jobs: list[Job] = []

    def running() -> Job:
        nonlocal job
        if job is None or not job.run.alive():
            job = Job(f"managed-{len(results.rows)}", arguments, undisturbed=False)
            jobs.append(job)
            job.reach(10, arguments.start_s)
        return job

    def leave_running(**options: Any) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            result = woodfrog.checkpoint(mine.run.pid, timeout=arguments.timeout_s, **options)
            mine.go_on()
            row = timings(result)
            # CRIU's dump is no part of it; the floor is the driver's own calls in this very operation.
            ratio = (row["stall_s"] - row["stall_parts"].get("cpu", 0.0)) / row["driver_s"]
            if not options.get("precopy"):  # its pause is no part of the floor
                stalls.append(ratio)
            woodfrog.rm(result.image)
            return {**row, "at_step": mine.last_step(), "stall_over_control": ratio}

        return work

    def suspend_resume(level: str, *, elsewhere: bool = False, for_s: float = 0.0) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            out = timings(woodfrog.suspend(mine.run.pid, level=level, timeout=arguments.timeout_s))
            time.sleep(for_s)
            gpu_map = mine.next_gpus(gpus) if elsewhere else None
            back = timings(woodfrog.resume(mine.run.pid, gpu_map=gpu_map))
            mine.go_on()
            drain_gb_s = out["bytes"] / out["phases"]["drain"] / 1e9
            return {"suspend": out, "resume": back, "drain_gb_s": drain_gb_s, "at_step": mine.last_step()}

        return work

    def stop_restore(*, elsewhere: bool = False) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            out = woodfrog.checkpoint(mine.run.pid, stop=True, timeout=arguments.timeout_s)
            mine.run.wait_ended()  # its number must be free, and it is our child
            gpu_map = mine.next_gpus(gpus) if elsewhere else None
            restored = woodfrog.restore(out.image, gpu_map=gpu_map, verify=True)
            mine.run.adopt(restored)
            mine.go_on()
            row = {"checkpoint": timings(out), "restore": timings(restored.details), "at_step": mine.last_step()}
            woodfrog.rm(out.image)
            return row

        return work

    def migrate(*, precopy: bool = False) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            goal = mine.next_gpus(gpus)
            result = timings(woodfrog.migrate(mine.run.pid, goal, precopy=precopy, timeout=arguments.timeout_s))
            mine.go_on()
            return {**result, "gb_s": result["bytes"] / result["phases"]["copy"] / 1e9, "at_step": mine.last_step()}

        return work

    def start() -> dict[str, Any]:
        mine = running()
        mine.reach(40, arguments.start_s)
        return {
            "step_s": mine.step_s(),
            "busbw_gb_s": (mine.logs[0].start or {}).get("busbw_gb_s"),
            "ps": [vars(one) for one in woodfrog.ps()],
        }

    first = measured(results, "start under woodfrog", arguments.start_s + 10, start)
    if first is not None and first["busbw_gb_s"]:
        results.summary["busbw_ratio"] = first["busbw_gb_s"] / (reference.logs[0].start or {})["busbw_gb_s"]
    # What time may not be left for comes last.
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if long_s := arguments.long_suspend_s:
        steps.append(
            (f"suspended for {long_s:g} s, its time-outs are a third of that", suspend_resume("cold", for_s=long_s))
        )
    steps.append(("stop and restore", stop_restore()))
    if gpus > 1:
        steps.append(("stop and restore, GPUs exchanged", stop_restore(elsewhere=True)))
    steps += [(f"checkpoint {number}", leave_running()) for number in range(10)]
    steps += [
        ("checkpoint, no CPU side", leave_running(cpu=False)),
        ("suspend and resume, cold", suspend_resume("cold")),
        ("suspend and resume, warm", suspend_resume("warm")),
        ("checkpoint with precopy", leave_running(precopy=True)),
    ]
    if gpus > 1:
        steps += [
            ("migrate, GPUs exchanged", migrate()),
            ("migrate with precopy, GPUs exchanged", migrate(precopy=True)),
            ("suspend and resume, GPUs exchanged", suspend_resume("cold", elsewhere=True)),
        ]
    wrong = done = 0
    step_s = reference.step_s()
    pending = deque(steps)
    while pending:
        what, work = pending.popleft()
        furthest = max((one.last_step() for one in jobs), default=0)
        if not budget.allows(start_s + 1.2 * step_s * furthest + OPERATION_S):
            results.add(what=what, ok=0, error="no time left")
            continue
        row = measured(results, what, arguments.step_s, work)
        wrong += row is None
        done += row is not None
        if done == 0 and wrong == LAUNCHER_TRIALS and arguments.launcher == "torchrun":
            results.add(what="launcher", launcher="ranks", reason=f"the first {wrong} operations failed with torchrun")
            arguments.launcher = "ranks"
            pending = deque(steps)
        if row is not None and job is not None:
            job.marks.append((what, row["at_step"]))
        if row is None and job is not None:
            results.add(what=f"{what}: the job afterwards", alive=int(job.run.alive()), output=job.run.tail())
            job.end()
            job = None
        elif row is not None and "drain_gb_s" in row:
            results.summary["drain_gb_s"] = row["drain_gb_s"]
    if stalls:
        results.summary["stall_over_control_floor"] = statistics.median(stalls)
    results.summary["failed_steps"] = wrong
    if job is not None:
        job.end()
    return jobs


def compare(results: harness.Results, budget: harness.Budget, arguments: Any, jobs: list[Job]) -> None:
    """Each job's losses with those of a run that nothing disturbs, which goes as far as the time allows; then the
    driver's own checkpoint of that run."""
    wanted = max((job.last_step() for job in jobs), default=0)
    longer = Job("undisturbed-to-the-end", arguments, undisturbed=True)
    try:
        limit_s = max(20.0, budget.left_s)
        measured(
            results, "undisturbed to the end", limit_s + 5, lambda: longer.reach(wanted, limit_s) or {"steps": wanted}
        )
        reached = longer.last_step()
        found = [{"what": "losses", "last_step": job.last_step(), **compared(longer, job)} for job in jobs]
        beyond = [what for job in jobs for what, at_step in job.marks if at_step <= reached]
        results.add(what="operations that the comparison goes beyond", reached_step=reached, operations=beyond)
        if arguments.program == "train_ddp" and budget.allows(DRIVER_ALONE_S):
            measured(results, "the driver alone", DRIVER_ALONE_S, lambda: driver_alone(longer))
    finally:
        longer.end()
    results.summary["operations"] = sum(len(job.marks) for job in jobs)
    results.summary["operations_compared"] = len(beyond)
    for row in found:
        results.add(**row)
    results.summary["compared_steps"] = sum(row["compared_steps"] for row in found)
    results.summary["different_jobs"] = sum(row["different"] is not None for row in found)


def driver_alone(job: Job) -> dict[str, Any]:
    """The driver's own checkpoint of all ranks side by side, in a process that may hang or die."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER_ALONE, *map(str, job.pids())],
        capture_output=True,
        text=True,
        timeout=DRIVER_ALONE_S - 5,
        check=False,
    )
    row: dict[str, Any] = {"exit_status": done.returncode, "said": done.stdout + done.stderr[-500:]}
    if done.returncode == 0:
        job.go_on(20)
    return row


def train_ratio(results: harness.Results, arguments: Any) -> dict[str, Any]:
    """Throughput with ÷ without the interposer, within one job."""
    groups = 1 if arguments.quick else arguments.within_groups
    job = Job("within", arguments, undisturbed=False, more=["--alternate", str(WITHIN_BLOCK)])
    try:
        steps = 4 * WITHIN_BLOCK * groups
        job.reach(steps, arguments.start_s + 40 + 4 * groups)
        log = job.logs[0]
        members = within.members_of(results, "train", log.lines[:steps], int((log.start or {})["places"]))
    finally:
        job.end()
    results.summary |= {"train_ratio": members["train_within"], **members}
    return members


def pinned_copies() -> dict[str, Any]:
    """GB/s from all GPUs together to pinned host memory."""
    argv = [sys.executable, "-c", PINNED]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=35)
    return {"gb_s": float(done.stdout)}


def main() -> int:
    parser = harness.parser(__doc__ or "", budget_s=280.0)
    parser.add_argument("--ranks", type=int, default=2, help="processes that use GPUs")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that they are on; default: one for each")
    parser.add_argument("--program", default="train_ddp", choices=list(QUICK))
    parser.add_argument(
        "--launcher",
        choices=["torchrun", "ranks"],
        help="what starts the ranks: torchrun, the default for PyTorch's where it is installed, or a shell",
    )
    parser.add_argument("--step-s", type=float, default=45.0, help="the most seconds of one operation")
    parser.add_argument("--start-s", type=float, default=60.0, help="the most seconds of a job's start")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="for the job to come to rest")
    parser.add_argument("--pool-mib", type=int, default=0, help="$WOODFROG_POOL_MIB of the job")
    parser.add_argument(
        "--long-suspend-s",
        type=float,
        default=0.0,
        help="suspend it for so long once; its time-outs are a third of that",
    )
    parser.add_argument(
        "--within-groups", type=int, default=WITHIN_GROUPS, help="that train_ratio is the median of; 0: none"
    )
    parser.add_argument("--steps", type=int, default=150, help="of the undisturbed run that is timed")
    parser.add_argument("target", nargs="*", help="options of the program, after --")
    arguments = parser.parse_args()
    arguments.gpus = arguments.gpus or arguments.ranks
    arguments.launcher = arguments.launcher or target_process.default_launcher(arguments.program)
    if arguments.gpus < arguments.ranks:
        arguments.target = [*ONE_GPU.get(arguments.program, []), *arguments.target]
    if arguments.quick:
        arguments.target = [*arguments.target, *QUICK[arguments.program]]
    if arguments.long_suspend_s:
        time_out_s = str(max(1, int(arguments.long_suspend_s / 3)))
        os.environ |= {"RANKS_TIMEOUT_S": time_out_s, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": time_out_s}
        arguments.step_s = max(arguments.step_s, arguments.long_suspend_s + OPERATION_S)
    arguments.work.mkdir(parents=True, exist_ok=True)
    name = "multi_gpu" if arguments.program == "train_ddp" else f"multi_gpu_{arguments.program}"
    name += "_one_gpu" if arguments.gpus == 1 else ""
    results, budget = harness.Results(name), harness.Budget(arguments.budget_s)
    reference = Job("undisturbed", arguments, undisturbed=True)

    begun = time.monotonic()

    def undisturbed() -> dict[str, Any]:
        reference.run.wait_start(arguments.start_s)
        start_s = time.monotonic() - begun
        reference.reach(arguments.steps, 25)
        started = {"start_s": start_s, "step_s": reference.step_s(), **(reference.logs[0].start or {})}
        return {**started, "launcher": None if arguments.program in ALONE else arguments.launcher}

    try:
        found = measured(results, "undisturbed", arguments.start_s + 30, undisturbed)
        if found is None:
            results.add(what="output", output=reference.run.tail())
    finally:
        reference.end()
    if found is not None and arguments.program == "train_ddp" and arguments.within_groups and not arguments.quick:
        measured(
            results,
            "training within one job",
            100 + 4 * arguments.within_groups,
            lambda: train_ratio(results, arguments),
        )
    jobs = operations(results, budget, arguments, reference, found["start_s"]) if found is not None else []
    if jobs:
        compare(results, budget, arguments, jobs)
    if arguments.program not in ("driver_ranks", "driver_share") and budget.allows(15):
        pinned = measured(results, "pinned copies of all GPUs at once", 40, pinned_copies)
        if pinned is not None and "drain_gb_s" in results.summary:
            results.summary["drain_ratio_sum"] = results.summary["drain_gb_s"] / pinned["gb_s"]
    harness.finish(results, GOALS)
    return 0 if results.summary.get("different_jobs") == 0 and not results.summary.get("failed_steps") else 1


if __name__ == "__main__":
    sys.exit(main())
