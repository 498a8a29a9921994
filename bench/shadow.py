"""Shadow execution: what following launches costs a target, and how near what it tells is to what the hashes say.

Of each target some processes with and as many without --track (all with the interposer) exist at the same time. They
have a checkpoint first: until then everything counts as written anyway, and nothing is evaluated. Then they take turns
of some steps each (interleaved.py): the throughput. Then the first process with --track is checkpointed --rounds times,
with everything hashed all the same and compared (--check-clean), and works in between: the dirty sets. All processes
are started at once at the beginning, and one target after the other is measured.

* compiled   compiled_decode.py: torch.compile, so all kernels are Triton's
* serve      serve_transformer.py: PyTorch's own kernels and graphs come without PTX, so few launches have a template
* train      train_gpt2.py, the same
* sparse     sparse_writes.py: copies only, also for the simulated GPU (--quick takes this one)

summary, for each target: throughput_<target> with _low and _high (goal at least 0.995; summary_of in interleaved.py
says what they are), <target>_covered_share (launches that have a template), <target>_clean_share (bytes not hashed),
<target>_excess (bytes that may have been written over bytes in chunks that differ), <target>_dirty_s (handover, in
which they are told); and misses: clean ranges that differed, which must be 0. What a part measured stands in the file
before the next one begins.

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
import interleaved
import target_process
import woodfrog_calls
from interleaved import Player

TRACK = {"WOODFROG_TRACK": "1"}
WARM_STEPS = 3
CATALOGUES_S = 40.0  # an image's kernels are analysed and compiled once
LARGE_IMAGE_BYTES = 4 << 20  # of a library: takes minutes, and hardly any of it is ever launched
START_SHARE = 0.7  # of all the time, for what all targets do before they are measured
TURNS_SHARE = 0.5  # of the time of a target


@dataclass(frozen=True)
class Case:
    """A target; it makes ``steps`` steps in a turn, and between two checkpoints. ``weight``: its share of the time."""

    name: str
    target: str
    steps: int
    options: tuple[str, ...]
    quick: tuple[str, ...]
    weight: float = 1.0


CASES = (
    Case("sparse", "sparse_writes", 20, ("--burst", "0"), ("--burst", "0"), 0.3),
    Case("compiled", "compiled_decode", 12, ("--tokens", "16"), ("--layers", "2", "--width", "512")),
    Case(
        "serve", "serve_transformer", 4, ("--burst", "0", "--layers", "8", "--tokens-out", "32"),
        ("--burst", "0", "--layers", "2", "--width", "512", "--tokens-in", "64", "--tokens-out", "8"),
    ),
    Case("train", "train_gpt2", 4, ("--state-gib", "2"), ("--state-gib", "0.5")),
)  # fmt: skip


@dataclass
class Started:
    """The processes of one case; ``failure``: why they could not all be started."""

    case: Case
    players: list[Player] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def followed(self) -> Player:
        return next(player for player in self.players if player.with_it)


def start(stack: contextlib.ExitStack, case: Case, arguments: argparse.Namespace) -> Started:
    """Starts all processes of a case, which run up to their first steps and wait there."""
    started = Started(case)
    options = ["--steps", "1000000", *(case.quick if arguments.quick else case.options)]
    # A cache of their own, so that what torch.compile makes is made anew, once for all of them.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(arguments.work / "inductor")}
    try:
        for number in range(2 * arguments.each):
            track = number % 2 == 0
            label = f"shadow-{case.name}-{number}"
            hold = arguments.work / f"{label}.hold"
            hold.write_text(str(WARM_STEPS))
            env = {**environment, **TRACK} if track else environment
            one = [*options, "--hold", str(hold)]
            run = stack.enter_context(target_process.interposed(case.target, one, arguments.work, label, env))
            started.players.append(Player(run, hold, track))
    except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others)
        started.failure = failure
    return started


def wait_for(started: Started, budget: harness.Budget) -> None:
    """Returns when all processes of a case are at rest after their first steps, or one will not be."""
    try:
        for player in started.players:
            player.run.wait_start(timeout_s=budget.left_s + 1)
        for player in started.players:
            player.run.wait_step(WARM_STEPS, timeout_s=budget.left_s + 1)
    except target_process.TargetError as failure:
        started.failure = started.failure or failure


def wait_for_catalogues(most_s: float) -> int:
    """Waits until the daemon has made what targets have asked for; returns how many are still to be made."""
    from woodfrog.daemon import runtime_dir

    folder = runtime_dir.path() / "kernels"
    deadline_s = time.monotonic() + most_s
    while True:
        waiting = 0
        for path in folder.glob("*.image"):
            with contextlib.suppress(FileNotFoundError):  # it has just been made
                waiting += path.stat().st_size < LARGE_IMAGE_BYTES
        if not waiting or time.monotonic() > deadline_s:
            return waiting
        time.sleep(0.1)


def checkpoint(player: Player, store: Path, **options: Any) -> woodfrog_calls.Timed:
    import woodfrog

    return woodfrog_calls.timed(
        woodfrog.checkpoint, player.run.handle, store=store, cpu=False, compress="none", **options
    )


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
    case, players = started.case, started.players
    begin_s = budget.left_s
    waiting = wait_for_catalogues(min(CATALOGUES_S, budget.left_s / 3))
    results.add(case=case.name, kind="catalogues", not_made=waiting, waited_s=begin_s - budget.left_s)
    for player in players:
        first = checkpoint(player, store)
        results.add(
            case=case.name, kind="first", with_it=player.with_it, **launch_members(first.result), **first.members()
        )
    for player in players:
        player.turn(case.steps)  # loads its catalogues, and is not measured
    launches = [interleaved.launches_of(player) for player in players if player.with_it]
    turns = 2 if arguments.quick else arguments.turns
    time_left = harness.Budget(budget.left_s * TURNS_SHARE)
    played = interleaved.take_turns(results, time_left, case.name, players, turns=turns, steps=case.steps)
    per_step = [
        (interleaved.launches_of(player) - before) / (played * case.steps)
        for player, before in zip([p for p in players if p.with_it], launches, strict=True)
    ]
    results.summary |= interleaved.summary_of(f"throughput_{case.name}", players, per_step)
    values = {player.run.log.values[player.run.log.last_step] for player in players}
    measure_dirty(results, budget, started, store, arguments)
    if len(values) != 1:
        raise target_process.TargetError(f"{case.target}: the processes with and without did not compute the same")


def measure_dirty(
    results: harness.Results, budget: harness.Budget, started: Started, store: Path, arguments: argparse.Namespace
) -> None:
    """Checkpoints of the first process that is followed, with everything compared."""
    from woodfrog.errors import WoodfrogError
    from woodfrog.image.repository import ImageRepository

    case, player = started.case, started.followed
    calls: list[woodfrog_calls.Timed] = []
    round_s = 0.0
    for number in range(arguments.rounds + 1):
        if number > 1 and not budget.allows(2 * round_s):
            break
        before_s = budget.left_s
        if number:
            player.turn(case.steps)
        try:
            call = checkpoint(player, store, check_clean=True)
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
    launches = sum(call.result.launches for call in calls)
    if launches:
        results.summary[f"{name}_covered_share"] = sum(call.result.covered_launches for call in calls) / launches
    later = calls[1:]
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


def main() -> int:
    """Returns the exit status: 0 if every target was measured and no clean range differed."""
    parser = harness.parser(__doc__ or "", budget_s=300)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--each", type=int, default=2, help="processes with and as many without, of each target")
    parser.add_argument("--turns", type=int, default=40, help="at most")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints after the first")
    parser.add_argument("--compare-bytes", type=int, default=1 << 30, help="read at most so much of each image")
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        arguments.each, arguments.rounds = 1, min(arguments.rounds, 2)
    names = arguments.cases or (["sparse"] if arguments.quick else ["compiled", "serve"])
    chosen = [next(case for case in CASES if case.name == name) for name in names]

    results = harness.Results("shadow")
    results.summary["misses"] = 0
    overall = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    stores = Path(os.environ.get("WOODFROG_STORE", arguments.work / "stores")) / f"shadow-{os.getpid()}"
    stores.mkdir(mode=0o700, parents=True)
    shutil.rmtree(arguments.work / "inductor", ignore_errors=True)
    try:
        with contextlib.ExitStack() as stack:
            everyone = [start(stack, case, arguments) for case in chosen]
            # What loads its weights would disturb what is measured.
            ready = harness.Budget(overall.left_s * START_SHARE)
            for started in everyone:
                wait_for(started, ready)
            for number, started in enumerate(everyone):
                weights = [one.weight for one in chosen[number:]]
                budget = harness.Budget(overall.left_s * weights[0] / sum(weights))
                name = started.case.name
                try:
                    measure(results, budget, started, stores / name, arguments)
                except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others)
                    failures.append(f"{name}: {failure}")
                    results.add(case=name, kind="failure", **harness.error_members(failure))
                for player in started.players:
                    player.run.end()  # the next has the machine for itself
                shutil.rmtree(stores / name, ignore_errors=True)
    finally:
        shutil.rmtree(stores, ignore_errors=True)
    goals = {f"throughput_{case.name}": ">= 0.995" for case in chosen}
    harness.finish(results, {**goals, "misses": "0"}, failures)
    return 1 if failures or results.summary["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
