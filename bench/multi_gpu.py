"""Two ranks of a NCCL job on two GPUs: what a checkpoint of the whole job costs, and whether it trains on unchanged.

Data-parallel training (targets/train_ddp.py, NCCL_NVLS_ENABLE=0) runs once undisturbed; then under
woodfrog with checkpoints in mid-training (without and with the CPU side), suspend and resume, and stop + restore; each
rank's losses must be bitwise those of the undisturbed run. At last the driver's own checkpoint of the same job, without
woodfrog. Every step has a time limit of its own; what fails is a row with its reason, and the rest goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import harness
from target_process import TARGETS

GOALS = {
    "stall_over_control_floor": "≤ 1.25",
    "drain_ratio_sum": "≥ 0.95",
    "busbw_ratio": "≥ 0.99",
    "train_ratio": "≥ 0.998",
}
MOST_STEPS = 100_000  # a job ends when it is ended
NCCL = {
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "OMP_NUM_THREADS": "4",
    # CRIU cannot save an io_uring. libuv has one whatever UV_USE_IO_URING says, and torchrun's own process has a store
    # on libuv that cannot be had otherwise; so the ranks are started without it, with a store of the plain kind.
    "USE_LIBUV": "0",
    "MASTER_ADDR": "127.0.0.1",
}
LAUNCHER = 'n=$1; shift; for ((r = 0; r < n; r++)); do RANK=$r LOCAL_RANK=$r WORLD_SIZE=$n "$@" & done; wait'
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


def _free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Job:
    """One launcher with its ranks' logs."""

    def __init__(self, label: str, arguments: Any, *, managed: bool) -> None:
        self.log = arguments.work / f"{label}.jsonl"
        self.output = arguments.work / f"{label}.out"
        self.ranks = arguments.ranks
        for rank in range(self.ranks):
            Path(f"{self.log}.{rank}").unlink(missing_ok=True)
        self.output.unlink(missing_ok=True)
        argv = [
            "bash", "-c", LAUNCHER, "launcher", str(self.ranks), sys.executable,
            str(TARGETS / "train_ddp.py"), "--steps", str(MOST_STEPS), *arguments.target,
        ]  # fmt: skip
        environment = {**os.environ, **NCCL, "TRAIN_DDP_LOG": str(self.log), "MASTER_PORT": str(_free_port())}
        if managed:
            import woodfrog

            self.handle: Any = woodfrog.run(argv, name=f"{label}-{os.getpid()}", env=environment, log=self.output)
            self.pid = self.handle.pid
        else:
            with self.output.open("wb") as file:
                self.pid = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                ).pid  # fmt: skip

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = Path(f"{self.log}.{rank}")
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def values(self, rank: int) -> dict[int, str]:
        return {line["step"]: line["value"] for line in self.lines(rank) if "step" in line}

    def last_step(self) -> int:
        return min(max(self.values(rank), default=0) for rank in range(self.ranks))

    def start_of(self, rank: int) -> dict[str, Any]:
        return next((line for line in self.lines(rank) if "start" in line), {})

    def pids(self) -> list[int]:
        return [self.start_of(rank)["pid"] for rank in range(self.ranks)]

    def step_s(self) -> float:
        """Median seconds between rank 0's steps."""
        times = [line["time"] for line in self.lines(0) if "step" in line]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[2:]))

    def reach(self, step: int, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while self.last_step() < step:
            if not self.alive:
                raise LimitError(f"the job ended: {self.tail()}")
            if time.monotonic() > end_s:
                raise LimitError(
                    f"step {step} not reached within {limit_s:g} s, it is at {self.last_step()}: {self.tail()}"
                )
            time.sleep(0.05)

    def go_on(self, limit_s: float = 30.0) -> None:
        self.reach(self.last_step() + 3, limit_s)

    @property
    def alive(self) -> bool:
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-1500:] if self.output.exists() else ""

    def end(self) -> None:
        try:
            everybody = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            everybody = []
        ranks = [self.start_of(rank).get("pid", 0) for rank in range(self.ranks)]
        pids = [self.pid, *(process.pid for process in everybody), *ranks]
        for pid in pids:
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def compared(reference: Job, other: Job) -> dict[str, Any]:
    """How many steps of how many ranks both have, and the first that differs, in words."""
    steps = 0
    for rank in range(reference.ranks):
        there, here = reference.values(rank), other.values(rank)
        both = sorted(set(there) & set(here))
        steps += len(both)
        for step in both:
            if there[step] != here[step]:
                different = f"rank {rank} differs at step {step}: {here[step]} instead of {there[step]}"
                return {"compared_steps": steps, "different": different}
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


def operations(results: harness.Results, budget: harness.Budget, arguments: Any, reference: Job) -> list[Job]:
    """All operations, on as few jobs as live through them; these jobs, ended."""
    import woodfrog

    job: Job | None = None
    stalls: list[float] = []
    jobs: list[Job] = []

    def running() -> Job:
        nonlocal job
        if job is None or not job.alive:
            job = Job(f"managed-{len(results.rows)}", arguments, managed=True)
            jobs.append(job)
            job.reach(10, arguments.start_s)
        return job

    def leave_running(**options: Any) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            result = woodfrog.checkpoint(mine.pid, timeout=arguments.timeout_s, **options)
            mine.go_on()
            row = timings(result)
            # CRIU's dump is no part of it; the floor is the driver's own calls in this very operation.
            ratio = (row["stall_s"] - row["stall_parts"].get("cpu", 0.0)) / row["driver_s"]
            stalls.append(ratio)
            woodfrog.rm(result.image)
            return {**row, "at_step": mine.last_step(), "stall_over_control": ratio}

        return work

    def suspend_resume(level: str) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            mine = running()
            out = timings(woodfrog.suspend(mine.pid, level=level, timeout=arguments.timeout_s))
            back = timings(woodfrog.resume(mine.pid))
            mine.go_on()
            drain_gb_s = out["bytes"] / out["phases"]["drain"] / 1e9
            return {"suspend": out, "resume": back, "drain_gb_s": drain_gb_s, "at_step": mine.last_step()}

        return work

    def stop_restore() -> dict[str, Any]:
        mine = running()
        out = woodfrog.checkpoint(mine.pid, stop=True, timeout=arguments.timeout_s)
        mine.handle.wait(30)  # its number must be free, and it is our child
        restored = mine.handle = woodfrog.restore(out.image, verify=True)
        mine.go_on()
        row = {
            "checkpoint": timings(out),
            "restore": timings(restored.details),
            "at_step": mine.last_step(),
        }
        woodfrog.rm(out.image)
        return row

    def start() -> dict[str, Any]:
        mine = running()
        mine.reach(40, arguments.start_s)
        return {
            "step_s": mine.step_s(),
            "busbw_gb_s": mine.start_of(0).get("busbw_gb_s"),
            "ps": [vars(one) for one in woodfrog.ps()],
        }

    first = measured(results, "start under woodfrog", arguments.start_s + 10, start)
    if first is not None:
        results.summary["train_ratio"] = reference.step_s() / first["step_s"]
        if first["busbw_gb_s"]:
            results.summary["busbw_ratio"] = first["busbw_gb_s"] / reference.start_of(0)["busbw_gb_s"]
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("checkpoint, no CPU side", leave_running(cpu=False)),
        *((f"checkpoint {number}", leave_running()) for number in range(1 if arguments.quick else 3)),
        ("suspend and resume, warm", suspend_resume("warm")),
        ("suspend and resume, cold", suspend_resume("cold")),
        ("stop and restore", stop_restore),
    ]
    wrong = 0
    for what, work in steps:
        if not budget.allows(50):
            results.add(what=what, ok=0, error="no time left")
            continue
        row = measured(results, what, arguments.step_s, work)
        wrong += row is None
        if row is None and job is not None:
            results.add(what=f"{what}: the job afterwards", alive=int(job.alive), output=job.tail())
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
    """Each job's losses with those of a run that nothing disturbs, which goes as far as the time allows."""
    wanted = max((job.last_step() for job in jobs), default=0)
    longer = Job("undisturbed-to-the-end", arguments, managed=False)
    try:
        limit_s = max(20.0, budget.left_s)
        measured(
            results, "undisturbed to the end", limit_s + 5, lambda: longer.reach(wanted, limit_s) or {"steps": wanted}
        )
    finally:
        longer.end()
    found = [{"what": "losses", "last_step": job.last_step(), **compared(longer, job)} for job in jobs]
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
        timeout=60,
        check=False,
    )
    row: dict[str, Any] = {"exit_status": done.returncode, "said": done.stdout + done.stderr[-500:]}
    if done.returncode == 0:
        job.go_on(20)
    return row


def pinned_copies() -> dict[str, Any]:
    """GB/s from all GPUs together to pinned host memory."""
    argv = [sys.executable, "-c", PINNED]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=35)
    return {"gb_s": float(done.stdout)}


def main() -> int:
    parser = harness.parser(__doc__ or "", budget_s=280.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=45.0, help="the most seconds of one operation")
    parser.add_argument("--start-s", type=float, default=60.0, help="the most seconds of a job's start")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="for the job to come to rest")
    parser.add_argument("--steps", type=int, default=150, help="of the undisturbed run that is timed")
    parser.add_argument("target", nargs="*", help="options of targets/train_ddp.py, after --")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.target = [*arguments.target, "--width=128", "--layers=2", "--batch=2", "--sequence=32"]
    arguments.work.mkdir(parents=True, exist_ok=True)
    results, budget = harness.Results("multi_gpu"), harness.Budget(arguments.budget_s)
    reference = Job("undisturbed", arguments, managed=False)

    def undisturbed() -> dict[str, Any]:
        reference.reach(arguments.steps, arguments.start_s + 25)
        return {"step_s": reference.step_s(), **reference.start_of(0)}

    try:
        found = measured(results, "undisturbed", arguments.start_s + 30, undisturbed)
        if found is None:
            results.add(what="output", output=reference.tail())
        else:
            measured(results, "the driver alone", 80, lambda: driver_alone(reference))
    finally:
        reference.end()
    pinned = measured(results, "pinned copies of all GPUs at once", 40, pinned_copies)
    if found is not None:
        compare(results, budget, arguments, operations(results, budget, arguments, reference))
    if pinned is not None and "drain_gb_s" in results.summary:
        results.summary["drain_ratio_sum"] = results.summary["drain_gb_s"] / pinned["gb_s"]
    harness.finish(results, GOALS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
