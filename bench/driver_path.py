"""The driver's own checkpoint, and what can be done about it: its control state, and processes that we did not start.

Control state: `fill_state` with no data (an empty context) and a small PyTorch training, suspended and resumed by
woodfrog with the memory that it has ready for the driver (`with`), without it (WOODFROG_CONTROL_MEMORY=0), and by the
driver alone. The times are those of the driver's calls: lock and checkpoint, restore and unlock.

Control state in images: an empty context is checkpointed running on and restored from a stop, in turns with its saved
state in a file that CRIU passes over (`file`) and in memory of its own, which CRIU saves (`private`).

Processes that we did not start: `fill_state` with `--state-gib`, not under woodfrog, by the driver alone and with
woodfrog-enter beside it (native/enter), in turns. Its memory is checked on the GPU after every cycle. Then once each:
the ways of populating, both with every system call recorded (rows `where the time went`), two processes side by side,
and the same through `woodfrog suspend` and `resume`.

The same process, with threads in it that help with the driver's copies (rows `unmanaged copies`): `populate + copies 4`
(in both directions), `populate` (as above), `the driver alone`, in turns and in this order. With `--copies-only` that
is all.

* control_checkpoint_ms, control_restore_ms                     with, of the empty context; …_without_ms, …_driver_ms
* torch_control_checkpoint_ms, torch_control_restore_ms         of PyTorch, likewise
* image_stall_file_ms, image_restore_file_ms                   of an image with the control state; …_private_ms
* copies_checkpoint_s, copies_restore_s                         populate + copies 4; populate_…, alone_… the other ways
* copies_checkpoint_speedup, copies_restore_speedup             the driver alone over populate + copies 4
* unmanaged_checkpoint_speedup, unmanaged_restore_speedup       the driver alone over the driver with woodfrog-enter

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import driver_baseline
import harness
import target_process
from woodfrog.driver import calls as driver_calls
from woodfrog.driver.entering import Entered, driver_threads

GOALS = {
    "control_checkpoint_ms": "<= 150",
    "control_restore_ms": "<= 170",
    "unmanaged_checkpoint_speedup": ">= 2.2",
    "unmanaged_restore_speedup": ">= 1",
}
# The environment of each way; the driver's own has nothing of ours.
WAYS: dict[str, dict[str, str]] = {
    "with": {},
    "alone": {"WOODFROG_CONTROL_COPIES": "0"},
    "without": {"WOODFROG_CONTROL_MEMORY": "0"},
    "driver": {},
}
TOP_KINDS = 14  # of system calls, in a row each


class Failures(list[str]):
    """What went wrong; a part that fails does not keep the others from being measured."""

    @contextlib.contextmanager
    def kept(self, results: harness.Results, what: str) -> Iterator[None]:
        """Turns a failure of the block into a row and a line at the end."""
        try:
            yield
        except Exception as failure:  # noqa: BLE001 (what was measured before must not be lost)
            self.append(f"{what}: {failure}")
            results.add(kind=what, **harness.error_members(failure))


# ── control state ────────────────────────────────────────────────────────────────────────────────────────────────────


def control_cycle(target: target_process.TargetRun, way: str) -> tuple[float, float]:
    """Seconds of the driver's checkpoint and of its restore of one target."""
    if way == "driver":
        cycle = driver_baseline.driver_cycle(target.pid)
        return cycle.lock_s + cycle.checkpoint_s, cycle.restore_s + cycle.unlock_s
    import woodfrog

    out = woodfrog.suspend(target.handle)
    back = woodfrog.resume(target.handle)
    return out.phases["control"], back.phases["control"]


def control(results: harness.Results, arguments: Any, label: str, name: str, options: list[str], prefix: str) -> None:
    """One program, all ways; the first cycle of each is not counted."""
    more = {f"with_{helpers}": {"WOODFROG_CONTROL_COPIES": str(helpers)} for helpers in arguments.helpers}
    for way, env in {**WAYS, **more}.items():
        start = target_process.plain if way == "driver" else target_process.interposed
        with start(name, options, arguments.work, f"control-{label}-{way}", env=env) as target:
            target.wait_start()
            target.wait_more_steps(2)
            cycles = []
            for _ in range(arguments.control_repetitions + 1):
                cycles.append(control_cycle(target, way))
                target.wait_more_steps(2)
            if way == "with" and not arguments.control_only:
                record_control(results, target, label)
        checkpoint = harness.Spread.of(1000 * one[0] for one in cycles[1:])
        restore = harness.Spread.of(1000 * one[1] for one in cycles[1:])
        results.add(
            kind="control state", program=label, way=way, **checkpoint.members("checkpoint_ms"),
            **restore.members("restore_ms"), first_checkpoint_ms=1000 * cycles[0][0],
        )  # fmt: skip
        suffix = "" if way == "with" else f"{way}_"
        results.summary[f"{prefix}control_checkpoint_{suffix}ms"] = checkpoint.median
        results.summary[f"{prefix}control_restore_{suffix}ms"] = restore.median


def record_control(results: harness.Results, target: target_process.TargetRun, label: str) -> None:
    """One more cycle with the driver's system calls recorded: what is left of the time, and where."""
    import woodfrog

    for name, make in (("checkpoint", woodfrog.suspend), ("restore", woodfrog.resume)):
        entered = Entered(target.pid, driver_threads(target.pid), populate_threads=0, record=True)
        begin_s = time.monotonic()
        with entered:
            result = make(target.handle)
        row = {"kind": "control state recorded", "program": label, "step": name}
        results.add(**row, control_s=result.phases["control"], visit=entered.visit.to_dict())
        attribute(results, f"{label} control {name}", entered, begin_s)
    target.wait_more_steps(2)


def images(results: harness.Results, arguments: Any) -> None:
    """Checkpoints with a CPU side, and restores; the first of each way shows how large the control state is."""
    import woodfrog

    for way, setting in (("file", "1"), ("private", "private")):
        options = ["--state-gib", "0.002", "--buffers", "1"]
        env = {"WOODFROG_CONTROL_MEMORY": setting}
        stalls, dumps, restores = [], [], []
        with target_process.interposed("fill_state", options, arguments.work, f"images-{way}", env=env) as target:
            target.wait_start()
            target.wait_more_steps(2)
            woodfrog.checkpoint(target.handle, stop=False, cpu=False)
            for number in range(arguments.image_repetitions):
                running = woodfrog.checkpoint(target.handle, stop=False)
                target.wait_more_steps(2)
                stopped = woodfrog.checkpoint(target.handle, stop=True)
                target.wait_ended()
                begin_s = time.perf_counter()
                restored = woodfrog.restore(stopped.image, standby=False)
                restore_s = time.perf_counter() - begin_s
                target.adopt(restored)
                target.wait_more_steps(2)
                results.add(
                    kind="control state in an image", way=way, repetition=number, stall_s=running.stall_s,
                    phases=running.phases, stop_phases=stopped.phases, restore_phases=restored.details.phases,
                    restore_s=restore_s, cpu_bytes=running.cpu_bytes, new_bytes=running.cpu_new_bytes,
                    stored_bytes=running.stored_bytes, file_bytes=running.control_file_bytes,
                )  # fmt: skip
                stalls.append(1000 * running.stall_s)
                dumps.append(1000 * running.phases["cpu"])
                restores.append(1000 * restore_s)
            check(target)
        for name, values in (("stall", stalls), ("dump", dumps), ("restore", restores)):
            results.summary[f"image_{name}_{way}_ms"] = harness.Spread.of(values).median


# ── processes that we did not start ─────────────────────────────────────────────────────────────────────────────────


def cycle(pid: int, entered: Entered | None, restore: Entered | None = None) -> driver_baseline.DriverCycle:
    """One cycle by the driver; with `entered` beside its checkpoint, whose begin and end count as the checkpoint's, and
    `restore` beside its restore."""
    lock_s = driver_baseline.driver_lock(pid)
    begin_s = time.perf_counter()
    with entered or contextlib.nullcontext():
        driver_baseline.driver_checkpoint(pid)
    checkpoint_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    with restore or contextlib.nullcontext():
        _, unlock_s = driver_baseline.driver_in(pid)
    restore_s = time.perf_counter() - begin_s - unlock_s
    return driver_baseline.DriverCycle(lock_s, checkpoint_s, restore_s, unlock_s)


def members(one: driver_baseline.DriverCycle, entered: Entered | None) -> dict[str, Any]:
    """Of a row."""
    visit = entered.visit.to_dict() if entered else {}
    return {"checkpoint_s": one.checkpoint_s, "restore_s": one.restore_s, "lock_s": one.lock_s, "visit": visit}


def check(target: target_process.TargetRun) -> None:
    """Raises TargetError if a word of the target's memory is wrong."""
    if wrong := target.verify():
        raise target_process.TargetError(f"{wrong} words of process {target.pid} are wrong after its restore")


def turns(
    results: harness.Results, budget: harness.Budget, target: target_process.TargetRun, arguments: Any
) -> tuple[list[driver_baseline.DriverCycle], list[driver_baseline.DriverCycle]]:
    """The driver alone and entered, in turns; the first pair is not counted: it touches the memory first."""
    alone, beside = [], []
    for repetition in range(arguments.repetitions + 1):
        begin_s = time.perf_counter()
        for into, entered in ((alone, None), (beside, Entered(target.pid, driver_threads(target.pid)))):
            one = cycle(target.pid, entered)
            check(target)
            results.add(
                kind="unmanaged", way="driver" if entered is None else "entered", repetition=repetition,
                state_gib=arguments.state_gib, **members(one, entered),
            )  # fmt: skip
            if repetition:
                into.append(one)
        if repetition and not budget.allows(1.2 * (time.perf_counter() - begin_s)):
            break
    return alone, beside


def unmanaged(results: harness.Results, budget: harness.Budget, arguments: Any) -> None:
    """16 GiB in turns, then each of the rest once."""
    options = ["--state-gib", str(arguments.state_gib)]
    with target_process.plain("fill_state", options, arguments.work, "unmanaged") as target:
        target.wait_start(timeout_s=120)
        target.wait_more_steps(2)
        alone, beside = turns(results, budget, target, arguments)
        for name in ("checkpoint_s", "restore_s"):
            spreads = [harness.Spread.of(getattr(one, name) for one in of) for of in (alone, beside)]
            results.summary |= spreads[0].members(f"driver_{name}") | spreads[1].members(f"entered_{name}")
            short = name.removesuffix("_s")
            results.summary[f"unmanaged_{short}_speedup"] = spreads[0].median / spreads[1].median
        results.summary["entered_checkpoint_gb_per_s"] = (
            arguments.state_gib * harness.GIB / 1e9 / results.summary["entered_checkpoint_s"]
        )
        expected_s = 1.5 * (alone[-1].checkpoint_s + alone[-1].restore_s)
        threads = driver_threads(target.pid)
        others: list[tuple[str, Callable[[], Entered]]] = [
            ("waited for", lambda: Entered(target.pid, threads, wait=True)),
            ("8 threads", lambda: Entered(target.pid, threads, populate_threads=8)),
            ("all threads traced, recorded", lambda: Entered(target.pid, record=True)),
            ("driver, recorded", lambda: Entered(target.pid, populate_threads=0, record=True)),
            ("entered, recorded", lambda: Entered(target.pid, threads, record=True)),
        ]
        for name, make in others:
            if not budget.allows(expected_s):
                break
            entered = make()
            begin_s = time.monotonic()
            one = cycle(target.pid, entered)
            check(target)
            results.add(kind="unmanaged", way=name, state_gib=arguments.state_gib, **members(one, entered))
            attribute(results, name, entered, begin_s)
        if budget.allows(expected_s):
            through_the_daemon(results, target)


COPY_THREADS = 4


def copies(results: harness.Results, budget: harness.Budget, arguments: Any) -> None:
    """Ways of one process in turns, the most helped first; the first cycle of all is not counted."""
    ways: dict[str, tuple[str, bool, int]] = {  # in rows: in the summary, populated, threads that help
        f"populate + copies {COPY_THREADS}": ("copies", True, COPY_THREADS),
        "populate": ("populate", True, 0),
        "the driver alone": ("alone", False, 0),
    }
    ways |= {f"populate + copies {count}": (f"copies_{count}", True, count) for count in arguments.copy_threads}
    options = ["--state-gib", str(arguments.state_gib)]
    seen: dict[str, list[driver_baseline.DriverCycle]] = {way: [] for way in ways}
    with target_process.plain("fill_state", options, arguments.work, "copies") as target:
        target.wait_start(timeout_s=120)
        target.wait_more_steps(2)
        threads = driver_threads(target.pid)

        def one(way: str, repetition: int) -> driver_baseline.DriverCycle:
            _, populated, helpers = ways[way]
            out = Entered(target.pid, threads, copy_threads=helpers) if populated else None
            back = Entered(target.pid, threads, populate_threads=0, copy_threads=helpers, step="restore")
            taken = cycle(target.pid, out, back if helpers else None)
            check(target)
            results.add(
                kind="unmanaged copies", way=way, repetition=repetition, state_gib=arguments.state_gib,
                restore_visit=back.visit.to_dict() if helpers else {}, **members(taken, out),
            )  # fmt: skip
            return taken

        one(next(iter(ways)), 0)  # touches the memory first
        repetitions = arguments.repetitions if arguments.copies_only else min(2, arguments.repetitions)
        for repetition in range(1, repetitions + 1):
            for way, taken in seen.items():
                # What a cycle of this way took before; of the driver alone nothing is known at first: 16 s were seen.
                last = taken[-1].checkpoint_s + taken[-1].restore_s if taken else arguments.state_gib
                if budget.allows(1.3 * last):
                    taken.append(one(way, repetition))
                    summarize_copies(results, ways[way][0], taken)


def summarize_copies(results: harness.Results, name: str, taken: list[driver_baseline.DriverCycle]) -> None:
    """The medians so far of one way, and of what they are compared with if that is there."""
    for what in ("checkpoint", "restore"):
        spread = harness.Spread.of(getattr(one, f"{what}_s") for one in taken)
        results.summary |= spread.members(f"{name}_{what}_s")
        alone, helped = (results.summary.get(f"{one}_{what}_s") for one in ("alone", "copies"))
        if alone and helped:
            results.summary[f"copies_{what}_speedup"] = alone / helped


def attribute(results: harness.Results, way: str, entered: Entered, begin_s: float) -> None:
    """Rows of the system calls that took longest, if they were recorded."""
    seen = driver_calls.within(driver_calls.read_calls(entered.events), begin_s, time.monotonic())
    for one in driver_calls.by_kind([call for call in seen if not call.waits])[:TOP_KINDS]:
        results.add(kind="where the time went", way=way, call=one.kind, count=one.count, seconds=one.seconds)


def through_the_daemon(results: harness.Results, target: target_process.TargetRun) -> None:
    """`suspend` and `resume`, which do the same."""
    import woodfrog

    out = woodfrog.suspend(target.pid)
    back = woodfrog.resume(target.pid)
    check(target)
    results.add(
        kind="unmanaged", way="woodfrog suspend, resume", checkpoint_s=out.phases["control"],
        restore_s=back.phases["control"], visit=out.visit,
    )  # fmt: skip


def side_by_side(results: harness.Results, arguments: Any) -> None:
    """Two processes at once, each with a quarter of the state, by the driver and entered."""
    options = ["--state-gib", str(arguments.state_gib / 4)]
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(target_process.plain("fill_state", options, arguments.work, f"side-{number}"))
            for number in range(2)
        ]
        for target in targets:
            target.wait_start(timeout_s=120)
            target.wait_more_steps(2)
        for way in ("driver", "entered", "driver", "entered"):
            begin_s = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(lambda target, way=way: one_of_two(target.pid, way), targets))
            seconds = time.perf_counter() - begin_s
            for target in targets:
                check(target)
            results.add(kind="side by side", way=way, processes=len(targets), cycle_s=seconds)


def one_of_two(pid: int, way: str) -> driver_baseline.DriverCycle:
    """A cycle of one of several processes: half of the processors populate each."""
    threads = max(1, (os.cpu_count() or 2) // 2)
    return cycle(pid, None if way == "driver" else Entered(pid, driver_threads(pid), populate_threads=threads))


def main() -> int:
    """Returns the exit status: 0 if everything was measured."""
    parser = harness.parser(__doc__ or "", budget_s=250)
    parser.add_argument("--state-gib", type=float, default=16.0, help="of the process that we did not start")
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of cycles of that process")
    parser.add_argument("--control-repetitions", type=int, default=7)
    parser.add_argument("--control-only", action="store_true", help="nothing but the control state, not recorded")
    parser.add_argument("--copies-only", action="store_true", help="nothing but the rows `unmanaged copies`")
    parser.add_argument("--copy-threads", nargs="*", type=int, default=[], help="further numbers of helpers for these")
    parser.add_argument("--helpers", nargs="*", type=int, default=[], help="$WOODFROG_CONTROL_COPIES of further ways")
    parser.add_argument("--image-repetitions", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true", help="leave the PyTorch process out")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.state_gib, arguments.repetitions, arguments.control_repetitions = 0.25, 1, 2
        arguments.image_repetitions = min(2, arguments.image_repetitions)
        # The simulated GPU does as the real one only if it is told to; a real one takes no notice.
        os.environ.setdefault("WOODFROG_SIMGPU_CONTROL_STATE", "96MiB")
        os.environ.setdefault("WOODFROG_SIMGPU_ONE_MAPPING", "1")

    results = harness.Results("driver_path")
    budget = harness.Budget(arguments.budget_s)
    failures = Failures()
    if not arguments.copies_only:
        with failures.kept(results, "control state"):
            control(results, arguments, "empty", "fill_state", ["--state-gib", "0.002", "--buffers", "1"], "")
    if not arguments.control_only:
        with failures.kept(results, "unmanaged copies"):
            copies(results, budget, arguments)
    if not arguments.control_only and not arguments.copies_only:
        with failures.kept(results, "control state in images"):
            images(results, arguments)
        with failures.kept(results, "unmanaged"):
            unmanaged(results, budget, arguments)
        with failures.kept(results, "side by side"):
            side_by_side(results, arguments)
    if not arguments.quick and not arguments.no_torch and not arguments.copies_only:
        with failures.kept(results, "control state of PyTorch"):
            options = ["--steps", "1000000", "--state-gib", "0.5"]
            control(results, arguments, "pytorch", "train_gpt2", options, "torch_")
    harness.finish(results, GOALS, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
