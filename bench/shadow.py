"""Shadow execution: what following launches costs a target, and how near what it tells is to what the hashes say.

Of each target there are four processes, started at once, all under the interposer:

* one with --track that calls the driver now through the interposer and now past it (within.py): the throughput. It has
  a checkpoint first: until then everything counts as written anyway, and nothing is evaluated. What it launches past
  the interposer is not seen, so what it would tell afterwards is worth nothing, and its images are not used;
* one with --track that is checkpointed --rounds times, with everything hashed all the same and compared
  (--check-clean), and works in between: the dirty sets;
* two without: do equal processes compute the same? All four are compared step by step, as far as all of them came. If
  the two differ from each other, the target itself does, which is said; if only one with --track differs, that is a
  failure of what is measured here.

The targets:

* launch     launch_loop: the time that a call of cuLaunchKernel takes more than one past the interposer, with --track
             and without; one process of each
* compiled   compiled_decode.py: torch.compile, so all kernels are Triton's
* serve      serve_transformer.py: PyTorch's own kernels and graphs come without PTX, so few launches have a template
* train      train_gpt2.py, the same
* sparse     sparse_writes.py: copies only, also for the simulated GPU (--quick takes this one and launch)

summary, for each target: throughput_<target> with _low and _high (goal at least 0.995), _equal of blocks of one kind
and the rest as within.py has them; <target>_covered_share (launches that have a template), <target>_clean_share (bytes
not hashed), <target>_excess (bytes that may have been written over bytes in chunks that differ), <target>_dirty_s
(handover, in which they are told), <target>_plain_equal and <target>_tracked_equal (1 or 0, over <target>_compared
steps); launch_tracked_ns and launch_untracked_ns; and misses: clean ranges that differed, which must be 0. What a part
measured stands in the file before the next one begins.

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import increments
import target_process
import within
import woodfrog_calls
from interleaved import Player

TRACK = {"WOODFROG_TRACK": "1"}
WARM_STEPS = 3
CATALOGUES_S = 40.0  # an image's kernels are analysed and compiled once
QUIET_S = 6.0  # no catalogue was finished for so long: what is left is a library's, takes minutes, and is hardly used
START_SHARE = 0.7  # of all the time, for what all targets do before they are measured
WITHIN_SHARE = 0.6  # of the time of a target
STORE_FACTOR = 1.5  # room in the store for the first image and what changes, over the state of the target
LAUNCH_S = 8.0
END = 1 << 40  # a step that is never reached
ROLES = ("alternating", "checked", "plain", "plain")


@dataclass(frozen=True)
class Case:
    """A target; it makes ``steps`` steps between two checkpoints, and blocks of ``alternate`` past and through the
    interposer. ``weight``: its share of the time."""

    name: str
    target: str
    steps: int
    alternate: int
    options: tuple[str, ...]
    quick: tuple[str, ...]
    weight: float = 1.0


CASES = (
    Case("sparse", "sparse_writes", 20, 50, ("--burst", "0"), ("--burst", "0"), 0.3),
    Case("compiled", "compiled_decode", 12, 6, ("--tokens", "16"), ("--layers", "2", "--width", "512")),
    Case(
        "serve", "serve_transformer", 4, 4, ("--burst", "0", "--layers", "8", "--tokens-out", "32"),
        ("--burst", "0", "--layers", "2", "--width", "512", "--tokens-in", "64", "--tokens-out", "8"),
    ),
    Case("train", "train_gpt2", 4, 4, ("--state-gib", "2"), ("--state-gib", "0.5")),
)  # fmt: skip


@dataclass
class Started:
    """The processes of one case, in the order of ROLES; ``failure``: why they could not all be started."""

    case: Case
    players: list[Player] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def alternating(self) -> Player:
        return self.players[0]

    @property
    def checked(self) -> Player:
        return self.players[1]

    @property
    def plain(self) -> list[Player]:
        return self.players[2:]


def start(stack: contextlib.ExitStack, case: Case, arguments: argparse.Namespace) -> Started:
    """Starts all processes of a case, which run up to their first steps and wait there."""
    started = Started(case)
    options = ["--steps", "1000000", *(case.quick if arguments.quick else case.options)]
    # A cache of their own, so that what torch.compile makes is made anew, once for all of them.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(arguments.work / "inductor")}
    try:
        for number, role in enumerate(ROLES):
            alternates = role == "alternating"
            label = f"shadow-{case.name}-{number}"
            hold = arguments.work / f"{label}.hold"
            # Whole groups of blocks before and after its checkpoint.
            hold.write_text(str(4 * case.alternate if alternates else WARM_STEPS))
            one = [*options, "--hold", str(hold), *(["--alternate", str(case.alternate)] if alternates else [])]
            env = environment if role == "plain" else {**environment, **TRACK}
            run = stack.enter_context(target_process.interposed(case.target, one, arguments.work, label, env))
            started.players.append(Player(run, hold, role != "plain"))
    except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others)
        started.failure = failure
    return started


def wait_for(started: Started, budget: harness.Budget) -> None:
    """Returns when all processes of a case are at rest after their first steps, or one will not be."""
    try:
        for player in started.players:
            player.run.wait_start(timeout_s=budget.left_s + 1)
        for player in started.players:
            player.run.wait_step(int(player.hold.read_text()), timeout_s=budget.left_s + 1)
    except target_process.TargetError as failure:
        started.failure = started.failure or failure


def wait_for_catalogues(most_s: float) -> int:
    """Waits until the daemon has made what targets have asked for, or makes no progress; how many it has not made."""
    from woodfrog.daemon import runtime_dir

    folder = runtime_dir.path() / "kernels"
    before, changed_s = -1, time.monotonic()
    deadline_s = changed_s + most_s
    while True:
        waiting, now_s = sum(1 for _ in folder.glob("*.image")), time.monotonic()
        if waiting != before:
            before, changed_s = waiting, now_s
        if not waiting or now_s > min(deadline_s, changed_s + QUIET_S):
            return waiting
        time.sleep(0.1)


def checkpoint(run: target_process.TargetRun, store: Path, **options: Any) -> woodfrog_calls.Timed:
    import woodfrog

    return woodfrog_calls.timed(woodfrog.checkpoint, run.handle, store=store, cpu=False, compress="none", **options)


def launch_members(result: Any) -> dict[str, Any]:
    return {
        "launches": result.launches,
        "covered_launches": result.covered_launches,
        "clean_bytes": result.clean_bytes,
        "gpu_bytes": result.gpu_bytes,
        "gpu_new_bytes": result.gpu_new_bytes,
        "unclean_reason": result.unclean_reason,
    }


def measure(
    results: harness.Results, budget: harness.Budget, started: Started, store: Path, arguments: argparse.Namespace
) -> None:
    """Everything about one target; counts misses in the summary."""
    if started.failure is not None:
        raise started.failure
    case = started.case
    needed = int(STORE_FACTOR * int((started.checked.run.log.start or {}).get("state_bytes", 0)))
    room = shutil.disk_usage(store.parent).free
    results.add(case=case.name, kind="room", needed_bytes=needed, free_bytes=room)
    if room < needed:
        raise target_process.TargetError(
            f"{case.target}: its images need {needed} bytes, the store has room for {room}"
        )
    begin_s = budget.left_s
    waiting = wait_for_catalogues(min(CATALOGUES_S, budget.left_s / 3))
    results.add(case=case.name, kind="catalogues", not_made=waiting, waited_s=begin_s - budget.left_s)
    measure_throughput(results, harness.Budget(budget.left_s * WITHIN_SHARE), started, store, arguments)
    measure_dirty(results, budget, started, store, arguments)
    compare(results, started)


def measure_throughput(
    results: harness.Results, budget: harness.Budget, started: Started, store: Path, arguments: argparse.Namespace
) -> None:
    """Steps past ÷ through the interposer, of the process that does both."""
    case, player = started.case, started.alternating
    first = checkpoint(player.run, store)
    results.add(case=case.name, kind="first", **launch_members(first.result), **first.members())
    begin = player.run.log.last_step
    group = 4 * case.alternate
    warm = begin + group  # loads its catalogues, and is not measured
    player.hold_at(END)
    player.run.wait_step(warm)
    reached = warm
    while reached - warm < (2 if arguments.quick else arguments.groups) * group:
        before_s = budget.left_s
        player.run.wait_step(reached + group)
        reached += group
        if not budget.allows(before_s - budget.left_s):
            break
    # It stops at the end of a group: a block through the interposer.
    stop = (player.run.log.last_step - begin) // group * group + begin + 2 * group
    player.hold_at(stop)
    player.run.wait_step(stop)
    name = f"throughput_{case.name}"
    places = int((player.run.log.start or {}).get("places", 0))
    found = within.members_of(results, name, player.run.log.lines[warm:stop], places)
    results.summary[name] = found.pop(f"{name}_within")
    results.summary |= {key.replace("_within", ""): value for key, value in found.items()}
    # Whether its launches were recorded to the end, or everything had come to count as written.
    last = checkpoint(player.run, store)
    results.add(case=case.name, kind="last", **launch_members(last.result), **last.members())
    results.summary[f"{name}_launches_per_step"] = last.result.launches / max(1, (stop - begin) // 2)
    results.summary[f"{name}_recorded"] = int(not last.result.unclean_reason)


def measure_dirty(
    results: harness.Results, budget: harness.Budget, started: Started, store: Path, arguments: argparse.Namespace
) -> None:
    """Checkpoints of the process that sees all its launches, with everything compared."""
    from woodfrog.errors import WoodfrogError
    from woodfrog.image.repository import ImageRepository

    case, player = started.case, started.checked
    calls: list[woodfrog_calls.Timed] = []
    round_s = 0.0
    for number in range(arguments.rounds + 1):
        if number > 1 and not budget.allows(2 * round_s):
            break
        before_s = budget.left_s
        if number:
            player.turn(case.steps)
        try:
            call = checkpoint(player.run, store, check_clean=True)
        except WoodfrogError as failure:
            results.summary["misses"] += 1
            results.add(case=case.name, kind="miss", number=number, **harness.error_members(failure))
            continue
        calls.append(call)
        round_s = before_s - budget.left_s
        results.add(
            case=case.name, kind="checkpoint", number=number, image=call.result.image,
            **launch_members(call.result), **call.members(),
        )  # fmt: skip
    with ImageRepository(store, create=False) as repository:
        summarise(results, case.name, calls, repository, arguments)


def summarise(
    results: harness.Results,
    name: str,
    calls: Sequence[woodfrog_calls.Timed],
    repository: Any,
    arguments: argparse.Namespace,
) -> None:
    # The first one counts from the start of the process, when nothing has templates yet.
    later = calls[1:]
    launches = sum(call.result.launches for call in later)
    if launches:
        results.summary[f"{name}_covered_share"] = sum(call.result.covered_launches for call in later) / launches
    results.summary[f"{name}_clean_share"] = harness.median(c.result.clean_bytes / c.result.gpu_bytes for c in later)
    results.summary[f"{name}_dirty_s"] = harness.median(call.phase_s("handover") for call in later)
    excess = []
    for before, call in itertools.pairwise(calls):
        found = increments.changes(
            repository, str(before.result.image), str(call.result.image), most_bytes=arguments.compare_bytes
        )
        dirty_bytes = call.result.gpu_bytes - call.result.clean_bytes
        results.add(
            case=name, kind="changes", image=call.result.image, may_be_written_bytes=dirty_bytes,
            changed_chunk_bytes=found.changed_chunk_bytes, sampled=found.sampled,
        )  # fmt: skip
        if found.changed_chunk_bytes:
            excess.append(dirty_bytes / found.changed_chunk_bytes)
    if excess:
        results.summary[f"{name}_excess"] = harness.median(excess)


def compare(results: harness.Results, started: Started) -> None:
    """All processes step by step; TargetError if those without --track agree and one with it does not."""
    case = started.case
    steps = started.checked.run.log.last_step
    for player in started.plain:
        player.hold_at(steps)
    for player in started.plain:
        player.run.wait_step(steps, timeout_s=120.0)
    steps = min(steps, started.alternating.run.log.last_step)
    one, other = (player.run.log for player in started.plain)
    plain = target_process.steps_differ(one, other, 1, steps)
    tracked = {
        name: target_process.steps_differ(one, player.run.log, 1, steps)
        for name, player in (("checked", started.checked), ("alternating", started.alternating))
    }
    begins = [
        {name: value for name, value in (player.run.log.start or {}).items() if name in ("weights", "first_token")}
        for player in started.players
    ]
    results.add(case=case.name, kind="values", steps=steps, plain=plain, **tracked, begins=begins)
    results.summary[f"{case.name}_compared"] = steps
    results.summary[f"{case.name}_plain_equal"] = int(plain is None)
    results.summary[f"{case.name}_tracked_equal"] = int(not any(tracked.values()))
    if plain is not None:
        print(f"{case.target}: two processes without --track do not compute the same: {plain}", flush=True)
    elif any(tracked.values()):
        raise target_process.TargetError(f"{case.target}: with --track other results: {tracked}; begins: {begins}")


def measure_launch(
    results: harness.Results, budget: harness.Budget, store: Path, arguments: argparse.Namespace
) -> None:
    """What launch_loop says that a launch takes longer than past the interposer, with --track and without."""
    options = ["--steps", "1000000", "--launches", "2000" if arguments.quick else "20000"]
    for name, env in (("tracked", TRACK), ("untracked", {})):
        label = f"shadow-launch-{name}"
        hold = arguments.work / f"{label}.hold"
        hold.write_text(str(WARM_STEPS))
        with target_process.interposed(
            "launch_loop", [*options, "--hold", str(hold)], arguments.work, label, env
        ) as run:
            player = Player(run, hold, bool(env))
            run.wait_step(WARM_STEPS)
            waiting = wait_for_catalogues(min(CATALOGUES_S, budget.left_s / 3))
            # At rest both times: what it launches past the interposer does not wait for a checkpoint.
            checkpoint(run, store)
            begin = WARM_STEPS + 1  # one that loads its catalogue
            end_s = time.monotonic() + min(LAUNCH_S, budget.left_s / 3)
            player.hold_at(END)
            run.wait_step(begin + 3)
            while time.monotonic() < end_s:
                run.wait_more_steps(1)
            stop = run.log.last_step + 2
            player.hold_at(stop)
            run.wait_step(stop)
            lines = run.log.lines[begin:]
            call = checkpoint(run, store)
        added = [line["submit_ns_per_launch"] - line["direct_ns_per_launch"] for line in lines]
        direct_ns = harness.median(line["direct_ns_per_launch"] for line in lines)
        low, high = within.interval(added)
        results.add(
            case="launch", kind=name, not_made=waiting, direct_ns=direct_ns,
            **harness.Spread.of(added).members("added_ns"), **launch_members(call.result), **call.members(),
        )  # fmt: skip
        median = harness.median(added)
        results.summary |= {f"launch_{name}_ns": median, f"launch_{name}_low": low, f"launch_{name}_high": high}
        results.summary[f"launch_{name}_direct_ns"] = direct_ns


def main() -> int:
    """Returns the exit status: 0 if every target was measured and no clean range differed."""
    parser = harness.parser(__doc__ or "", budget_s=300)
    names = ["launch", *(case.name for case in CASES)]
    parser.add_argument("--cases", nargs="*", choices=names)
    parser.add_argument("--groups", type=int, default=60, help="of four blocks, at most")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints after the first")
    parser.add_argument("--compare-bytes", type=int, default=1 << 30, help="read at most so much of each image")
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 2)
    chosen = arguments.cases or (["launch", "sparse"] if arguments.quick else ["compiled", "launch", "serve"])

    results = harness.Results("shadow")
    results.summary["misses"] = 0
    overall = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    stores = Path(os.environ.get("WOODFROG_STORE", arguments.work / "stores")) / f"shadow-{os.getpid()}"
    stores.mkdir(mode=0o700, parents=True)
    shutil.rmtree(arguments.work / "inductor", ignore_errors=True)
    try:
        with contextlib.ExitStack() as stack:
            everyone = {case.name: start(stack, case, arguments) for case in CASES if case.name in chosen}
            # What loads its weights would disturb what is measured.
            ready = harness.Budget(overall.left_s * START_SHARE)
            for started in everyone.values():
                wait_for(started, ready)
            weights = {name: everyone[name].case.weight if name in everyone else 0.3 for name in chosen}
            for number, name in enumerate(chosen):
                left = [weights[later] for later in chosen[number:]]
                budget = harness.Budget(overall.left_s * left[0] / sum(left))
                try:
                    if name in everyone:
                        measure(results, budget, everyone[name], stores / name, arguments)
                    else:
                        measure_launch(results, budget, stores / name, arguments)
                except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others)
                    failures.append(f"{name}: {failure}")
                    results.add(case=name, kind="failure", **harness.error_members(failure))
                for player in everyone[name].players if name in everyone else []:
                    player.run.end()  # the next has the machine for itself
                shutil.rmtree(stores / name, ignore_errors=True)
    finally:
        shutil.rmtree(stores, ignore_errors=True)
    goals = {f"throughput_{name}": ">= 0.995" for name in everyone}
    harness.finish(results, {**goals, "misses": "0"}, failures)
    return 1 if failures or results.summary["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
