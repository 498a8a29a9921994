"""What slows a training down while an image of it is written: its steps beside one part of the writing after the other.

A training runs without woodfrog, and beside it, in processes of their own (noises.py), each noise of the plan for
--noise-s seconds, with quiet in between. The training is that of concurrent_drain.py, with 16 GiB. In the rows:

* step_s         the times of its steps beside the noise; quiet_step_s: before and after it, both together
* speed          quiet ÷ noisy, of the medians; speed_mean of the means, which is what the training loses
* run_s, wait_s  of its busiest thread for each step: on a processor, and ready but waiting for one; quiet_run_s,
                 quiet_wait_s. More wait_s: it lacks a processor. More run_s: it has one and is slower on it (a sibling,
                 caches, memory). Neither: what it waits for is the GPU, or the way to it
* steal_s        that the host took from all processors of a virtual machine during the noise
* gb_per_s, user_s_per_gb, system_s_per_gb   what the noise achieved and cost
* placement      all: any processor. half: the training on one half of the cores, the noise on the other (of the noise
                 `none`: nobody). avoid: the noise everywhere but where the training's busy threads were when it began,
                 and the siblings of those. block: the noise on as many processors as it has threads, side by side and
                 far from the training's busy threads, as woodfrog chooses them (operations/background.py)

summary: speed_<noise>_<threads>, with the policy and the placement where they are not the usual ones (first: at the
usual priority, not at that of what nobody waits for); siblings (1: the
machine shows no SMT).

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import harness
import target_process
from concurrent_drain import options
from woodfrog.operations.background import Elsewhere
from woodfrog.target import procfs

NICE = 5  # woodfrog's own for what nobody waits for (operations/background.py)
SETTLE_S = 0.15  # after a noise's first and before a quiet's first step that counts
BUSY = 0.2  # of a processor: a thread of the training that is worth looking after
SPARE_GIB = 16.0  # of memory, beside what the noises take


@dataclass(frozen=True)
class Noise:
    name: str
    threads: int = 1
    policy: str = "other"
    placement: str = "all"
    nice: int = NICE  # of the processor's noises

    @property
    def where(self) -> str:
        """Which process makes it; none: nobody."""
        if self.name == "none":
            return ""
        return "gpu" if self.name.startswith(("drain", "copy_", "kernels", "releases")) else "cpu"

    @property
    def label(self) -> str:
        parts = [self.name, str(self.threads)] if self.where == "cpu" else [self.name]
        parts += [what for what, usual in ((self.policy, "other"), (self.placement, "all")) if what != usual]
        parts += ["first"] if self.nice != NICE else []
        return "_".join(parts)


# In order of importance: the budget may end before the plan does.
PLAN = (
    Noise("writer", 8),
    Noise("writer", 8, placement="block"),
    Noise("writer", 32, nice=0),  # as what an arena could not hold was written, until 2026-11-30
    Noise("writer", 16, placement="block"),
    Noise("writer", 4),
    Noise("writer", 12, placement="block"),
    Noise("drain"),
    Noise("drain_20gb"),
    Noise("drain_8gb"),
    Noise("writer", 8, placement="half"),
    Noise("hash", 8, placement="block"),
    Noise("sha256", 8),
    Noise("sha256", 8, placement="block"),
    Noise("hash", 8),
    Noise("tmpfs", 8),
    Noise("hash_cached", 8),
    Noise("copy_32mib"),
    Noise("copy_4mib"),
    Noise("kernels"),
    Noise("releases"),
    Noise("none", placement="half"),
    Noise("memcpy", 8),
    Noise("writer", 16),
    Noise("writer", 8, placement="avoid"),
    Noise("writer", 8, policy="idle"),
    Noise("writer", 8, policy="batch"),
    Noise("hash", 16),
)


class Maker:
    """A process that makes noises (noises.py)."""

    def __init__(self, what: str, arguments: list[str], output: Path) -> None:
        self._what = what
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("noises.py")), what, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip

    def said(self) -> dict[str, Any]:
        """Its next line. RuntimeError when it has ended, or the noise has failed; then it is ready for another one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._output.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"the process that makes the {self._what}'s noises has ended: {tail}")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            self.said()
            raise RuntimeError(result["error"])
        return result

    def order(self, **members: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(members) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Scheduled:
    """What the kernel has counted of a process: by thread, seconds on a processor and waiting for one."""

    threads: dict[int, tuple[float, float]]
    steal_s: float

    @staticmethod
    def of(pid: int) -> Scheduled:
        threads = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                run_ns, wait_ns, _ = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
            threads[int(task.name)] = (int(run_ns) / 1e9, int(wait_ns) / 1e9)
        return Scheduled(threads, psutil.cpu_times().steal)

    def since(self, before: Scheduled) -> dict[int, tuple[float, float]]:
        """Of threads that were there before."""
        return {
            tid: (run_s - before.threads[tid][0], wait_s - before.threads[tid][1])
            for tid, (run_s, wait_s) in self.threads.items()
            if tid in before.threads
        }


@dataclass(frozen=True)
class Interval:
    """An interval of the training's life."""

    begin_s: float
    end_s: float
    run_s: float  # of its busiest thread
    wait_s: float  # of the same
    steal_s: float

    def steps_s(self, log: target_process.Log) -> list[float]:
        """The times of those steps that lie in it as a whole."""
        times = [line["time_s"] for line in log.lines if self.begin_s + SETTLE_S <= line["time_s"] <= self.end_s]
        return [after - before for before, after in itertools.pairwise(times)]


@contextmanager
def watched(target: target_process.TargetRun) -> Iterator[list[Interval]]:
    """The interval that the block takes is in the list afterwards."""
    found: list[Interval] = []
    begin_s, before = time.time(), Scheduled.of(target.pid)
    yield found
    after = Scheduled.of(target.pid)
    run_s, wait_s = max(after.since(before).values())
    found.append(Interval(begin_s, time.time(), run_s, wait_s, after.steal_s - before.steal_s))


def siblings() -> dict[int, frozenset[int]]:
    """For each processor of this process those that share its core, itself among them."""
    found = {}
    for processor in sorted(os.sched_getaffinity(0)):
        told = procfs.listed(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        found[processor] = frozenset({processor, *told})
    return found


def halves(cores: dict[int, frozenset[int]]) -> tuple[list[int], list[int]]:
    """The processors of one half of the cores, and those of the other."""
    each = sorted(set(cores.values()), key=min)
    first = frozenset().union(*each[: max(1, len(each) // 2)])
    return sorted(first & cores.keys()), sorted(cores.keys() - first)


def busy_processors(pid: int, seconds: float) -> set[int]:
    """Where those threads of a process are that use much of a processor."""
    before = Scheduled.of(pid)
    time.sleep(seconds)
    found = set()
    for tid, (run_s, _) in Scheduled.of(pid).since(before).items():
        if run_s < BUSY * seconds:
            continue
        stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
        found.add(int(stat.rpartition(")")[2].split()[36]))  # proc(5): `processor`, the 39th
    return found


@contextmanager
def confined(pid: int, processors: list[int]) -> Iterator[None]:
    """All threads of a process on these processors, and where they were afterwards."""
    before = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        tid = int(task.name)
        before[tid] = os.sched_getaffinity(tid)
        os.sched_setaffinity(tid, processors)
    try:
        yield
    finally:
        for tid, were in before.items():
            os.sched_setaffinity(tid, were)


def machine() -> dict[str, Any]:
    """Of the processors what may explain the rows."""
    from woodfrog._native import transfer

    text = Path("/proc/cpuinfo").read_text()
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    members = {name.strip(): value.strip() for name, _, value in lines}
    flags = members.get("flags", "").split()
    caches = {}
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        name = "{}{}".format(*((cache / part).read_text().strip() for part in ("level", "type")))
        caches[name] = {part: (cache / part).read_text().strip() for part in ("size", "shared_cpu_list")}
    numa = Path("/sys/devices/system/node")
    return {
        "processor": members.get("model name", "unknown"),
        "processors": psutil.cpu_count(),
        "wide_registers": [flag for flag in flags if flag.startswith(("avx", "vaes", "sha_ni"))],
        "hypervisor": "hypervisor" in flags,
        "siblings": sorted({",".join(map(str, sorted(core))) for core in siblings().values()}),
        "caches": caches,
        "numa": {node.name: (node / "cpulist").read_text().strip() for node in sorted(numa.glob("node[0-9]*"))},
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": harness.huge_pages(),
        "blake3": transfer.blake3_implementations(),
    }


class Session:
    """The training, the makers of noises, and what was measured."""

    def __init__(self, target: target_process.TargetRun, makers: dict[str, Maker], results: harness.Results) -> None:
        self._target = target
        self._makers = makers
        self._results = results
        self._cores = siblings()

    def quiet(self, seconds: float) -> Interval:
        with watched(self._target) as found:
            time.sleep(seconds)
        return found[0]

    def noise(self, noise: Noise, seconds: float) -> tuple[Interval, dict[str, Any]]:
        """The interval, and what is to be said of the noise itself."""
        with ExitStack() as stack:
            processors: list[int] = []
            if noise.placement == "half":
                own, processors = halves(self._cores)
                stack.enter_context(confined(self._target.pid, own))
            elif noise.placement == "avoid":
                busy = busy_processors(self._target.pid, 0.3)
                near = frozenset().union(*(self._cores.get(one, frozenset({one})) for one in busy))
                processors = sorted(self._cores.keys() - near)
            elif noise.placement == "block":
                elsewhere = Elsewhere([self._target.pid], noise.threads)
                time.sleep(0.3)
                processors = sorted(elsewhere.processors())
            if not noise.where:
                return self.quiet(seconds), {}
            maker = self._makers[noise.where]
            maker.order(
                noise=noise.name, threads=noise.threads, seconds=seconds, policy=noise.policy, processors=processors,
                nice=noise.nice,
            )  # fmt: skip
            maker.said()  # it has begun
            with watched(self._target) as found:
                over = maker.said()
            maker.said()  # all is given back
        lasted_s = found[0].end_s - found[0].begin_s
        said: dict[str, Any] = {"processors": len(processors or self._cores), "lasted_s": lasted_s}
        if processors:
            said["where"] = f"{processors[0]} to {processors[-1]}"
        if gb := over["bytes"] / 1e9:
            said |= {"gb_per_s": gb / lasted_s}
        if gb and noise.where == "cpu":
            said |= {"user_s_per_gb": over["user_s"] / gb, "system_s_per_gb": over["system_s"] / gb}
        return found[0], said

    def add(self, noise: Noise, noisy: Interval, quiets: list[Interval], said: dict[str, Any]) -> None:
        """A row, and its member of the summary."""
        log = self._target.log
        log.read()
        steps = noisy.steps_s(log)
        quiet_steps = [step_s for quiet in quiets for step_s in quiet.steps_s(log)]
        if len(steps) < 2 or len(quiet_steps) < 2:
            raise RuntimeError(f"only {len(steps)} steps lie in {noise.label} and {len(quiet_steps)} beside it")
        spread, quiet_spread = harness.Spread.of(steps), harness.Spread.of(quiet_steps)
        speed = quiet_spread.median / spread.median
        count = (noisy.end_s - noisy.begin_s) / statistics.mean(steps)
        quiet_s = sum(quiet.end_s - quiet.begin_s for quiet in quiets)
        quiet_count = quiet_s / statistics.mean(quiet_steps)
        self._results.summary[f"speed_{noise.label}"] = speed
        self._results.add(
            kind="noise", noise=noise.name, threads=noise.threads, policy=noise.policy, placement=noise.placement,
            nice=noise.nice, **spread.members("step_s"), **quiet_spread.members("quiet_step_s"), speed=speed,
            speed_mean=statistics.mean(quiet_steps) / statistics.mean(steps),
            run_s=noisy.run_s / count, wait_s=noisy.wait_s / count,
            quiet_run_s=sum(quiet.run_s for quiet in quiets) / quiet_count,
            quiet_wait_s=sum(quiet.wait_s for quiet in quiets) / quiet_count,
            steal_s=noisy.steal_s, **said,
        )  # fmt: skip


def print_table(results: harness.Results) -> None:
    steps = ("step_s", "step_s_min", "step_s_max", "quiet_step_s", "speed", "speed_mean")
    why = ("run_s", "quiet_run_s", "wait_s", "quiet_wait_s", "gb_per_s", "user_s_per_gb", "system_s_per_gb")
    columns = ("noise", "threads", "nice", "policy", "placement", *steps, *why)
    rows = [[row.get(name) for name in columns] for row in results.rows if row["kind"] == "noise" and "speed" in row]
    print("\n" + harness.table("the training beside each noise", columns, rows), flush=True)


def main() -> int:
    """Returns the exit status: 0 if nothing failed that was begun."""
    parser = harness.parser(__doc__ or "", budget_s=100)
    parser.add_argument("--target", choices=("train_gpt2", "sparse_writes"), help="the second runs without torch")
    parser.add_argument("--state-gib", type=float, default=16.0)
    parser.add_argument("--noise-s", type=float, default=3.5)
    parser.add_argument("--quiet-s", type=float, default=1.5, help="between two noises")
    parser.add_argument("--data-gib", type=float, default=4.0, help="that is hashed and written again and again")
    parser.add_argument("--rounds", type=int, default=1, help="of the plan; the summary has the last one's")
    parser.add_argument("--noises", nargs="+", metavar="LABEL", help="only these of the plan (names as in the summary)")
    arguments = parser.parse_args()
    name: str = arguments.target or ("sparse_writes" if arguments.quick else "train_gpt2")
    state_gib: float = arguments.state_gib
    if arguments.quick:
        arguments.noise_s, arguments.quiet_s, arguments.data_gib, state_gib = 0.6, 0.5, 0.125, 0.125
    plan = [noise for noise in PLAN if not arguments.noises or noise.label in arguments.noises] * arguments.rounds

    results = harness.Results("interference")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    folder = Path(os.environ.get("WOODFROG_STORE", "/dev/shm")) / f"interference-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    room = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available - int(SPARE_GIB * harness.GIB)) // 2
    most_gib = 0.5 if arguments.quick else max(arguments.data_gib, min(48.0, room / harness.GIB))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        makers = {}
        for what, gib in (("cpu", arguments.data_gib), ("gpu", min(1.0, arguments.data_gib))):
            more = [
                "--size-mib",
                str(int(gib * 1024)),
                "--folder",
                str(folder),
                "--most-mib",
                str(int(most_gib * 1024)),
            ]
            arguments.work.mkdir(parents=True, exist_ok=True)
            output = arguments.work / f"interference-{what}.out"
            makers[what] = Maker(what, more if arguments.quick else [*more, "--warm"], output)
            stack.callback(makers[what].end)
        results.add(kind="machine", most_written_gib=most_gib, **machine())
        results.summary["siblings"] = max(len(core) for core in siblings().values())
        program = options(name, state_gib)
        target = stack.enter_context(target_process.plain(name, program, arguments.work, "interference"))
        for what, maker in list(makers.items()):
            try:
                maker.said()  # it is ready
            except RuntimeError as failure:  # the other one's noises can still be measured
                failures.append(str(failure))
                plan = [noise for noise in plan if noise.where != what]
        target.wait_start()
        target.wait_more_steps(10)
        session = Session(target, makers, results)
        before = session.quiet(arguments.quiet_s)
        for noise in plan:
            if not budget.allows(arguments.noise_s + arguments.quiet_s + 2.0):
                results.add(kind="noise", noise=noise.label, not_measured="the time budget was used up")
                continue
            try:
                noisy, said = session.noise(noise, arguments.noise_s)
                after = session.quiet(arguments.quiet_s)
                session.add(noise, noisy, [before, after], said)
                before = after
            except (RuntimeError, OSError) as failure:
                failures.append(f"{noise.label}: {failure}")
                results.add(kind="noise", noise=noise.label, **harness.error_members(failure))
    print_table(results)
    harness.finish(results, {}, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
