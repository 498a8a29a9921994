"""Shadow execution: what following launches costs a target, and how much hashing it saves.

Throughput: targets with and without --track (both with the interposer), in pairs, in alternating order. Each has had a
checkpoint before it is measured: until then everything counts as written anyway, and nothing is evaluated.

Dirty sets: targets with --track work and are checkpointed, --rounds times, with everything hashed all the same and
compared (--check-clean). What the launches may have written stands beside what the hashes say has changed.

* launch, decode     launch_loop, decode_graphs: throughput
* sparse             sparse_writes.py: copies only, also for the simulated GPU
* serve              serve_transformer.py: PyTorch's own kernels come without PTX, so few launches have a template
* train              train_gpt2.py

summary: throughput_<target> (decode: goal at least 0.995; launch is nothing but launches, and shows what one costs;
medians over the pairs) and <target>_covered_share; for the targets with dirty sets
<target>_covered_share (launches that have a template), <target>_clean_share (bytes not hashed), <target>_excess (bytes
that may have been written over bytes in chunks that differ), <target>_dirty_s (handover, in which they are told), and
misses: clean ranges that differed, which must be 0.

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import increments
import target_process
import woodfrog_calls

GOALS = {"throughput_decode": ">= 0.995", "misses": "0"}
TRACK = {"WOODFROG_TRACK": "1"}
CATALOGUES_S = 180.0  # an image's kernels are analysed and compiled once


@dataclass(frozen=True)
class Case:
    """A target whose throughput is measured over `steps` steps; ``quick`` are the options of a short run."""

    name: str
    target: str
    steps: int
    options: tuple[str, ...]
    quick: tuple[str, ...]


CASES = (
    Case("launch", "launch_loop", 30, (), ("--launches", "500")),
    Case("decode", "decode_graphs", 400, (), ("--state-gib", "0.25")),
)


def wait_for_catalogues() -> None:
    """Returns when the daemon has made what targets have asked for."""
    from woodfrog.daemon import runtime_dir

    folder = runtime_dir.path() / "kernels"
    deadline_s = time.monotonic() + CATALOGUES_S
    while any(folder.glob("*.image")) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def rate(
    case: Case, store: Path, arguments: argparse.Namespace, label: str, *, track: bool
) -> tuple[float, woodfrog_calls.Timed]:
    """Steps per second, by the median step after the first checkpoint, and a second checkpoint after them."""
    import woodfrog

    options = ["--steps", "1000000", *(case.quick if arguments.quick else case.options)]
    steps = 5 if arguments.quick else case.steps
    with target_process.interposed(case.target, options, arguments.work, label, TRACK if track else None) as run:
        run.wait_start()
        run.wait_step(2, timeout_s=300)
        wait_for_catalogues()
        woodfrog.checkpoint(run.handle, store=store, cpu=False, compress="none")
        run.log.read()
        begin = run.log.last_step + 2
        run.wait_step(begin + steps, timeout_s=300)
        run.log.read()
        steps_per_s = 1.0 / harness.median(run.log.step_times_s(skip=begin))
        last = woodfrog_calls.timed(woodfrog.checkpoint, run.handle, store=store, cpu=False, compress="none")
        return steps_per_s, last


def measure_throughput(
    results: harness.Results, budget: harness.Budget, case: Case, store: Path, arguments: argparse.Namespace
) -> None:
    ratios: list[float] = []
    pair_s = 0.0
    for pair in range(1 if arguments.quick else arguments.pairs):
        if pair and not budget.allows(pair_s):
            break
        before_s = budget.left_s
        order = (False, True) if pair % 2 == 0 else (True, False)
        measured = {
            track: rate(case, store, arguments, f"shadow-{case.name}-{pair}-{int(track)}", track=track)
            for track in order
        }
        shutil.rmtree(store)
        rates = {track: steps_per_s for track, (steps_per_s, _) in measured.items()}
        last = measured[True][1].result
        results.summary[f"{case.name}_covered_share"] = last.covered_launches / max(last.launches, 1)
        ratios.append(rates[True] / rates[False])
        pair_s = before_s - budget.left_s
        results.add(
            kind="throughput", case=case.name, pair=pair, ratio=ratios[-1], steps_per_s_with=rates[True],
            steps_per_s_without=rates[False],
            launches=last.launches,
            covered_launches=last.covered_launches,
            unclean_reason=last.unclean_reason,
        )  # fmt: skip
    results.summary.update(harness.Spread.of(ratios).members(f"throughput_{case.name}"))


def target_options(name: str, arguments: argparse.Namespace) -> tuple[str, list[str], int, bool]:
    """Program, options, steps between two checkpoints, and whether it waits for SIGUSR1 after them."""
    if name == "serve":
        options = ["--burst", str(arguments.requests), "--layers", str(arguments.layers)]
        return "serve_transformer", [*options, "--width", str(arguments.width)], arguments.requests, True
    if name == "train":
        return "train_gpt2", ["--steps", "1000000", "--state-gib", str(arguments.train_gib)], 2, False
    options = ["--state-gib", str(arguments.sparse_gib), "--burst", str(arguments.requests)]
    return "sparse_writes", options, arguments.requests, True


def measure_dirty(results: harness.Results, name: str, store: Path, arguments: argparse.Namespace) -> int:
    """Checkpoints of one target with everything compared; how many of them found a clean range changed."""
    import woodfrog
    from woodfrog.errors import WoodfrogError
    from woodfrog.image.repository import ImageRepository

    program, options, steps, waits = target_options(name, arguments)
    calls: list[woodfrog_calls.Timed] = []
    misses = 0
    with target_process.interposed(program, options, arguments.work, f"shadow-{name}", TRACK) as target:
        target.wait_start()
        target.wait_step(steps, timeout_s=300)
        wait_for_catalogues()
        for number in range(arguments.rounds + 1):
            if number:
                target.log.read()
                wanted = target.log.last_step + steps
                if waits:
                    os.kill(target.pid, signal.SIGUSR1)
                target.wait_step(wanted, timeout_s=300)
            try:
                call = woodfrog_calls.timed(
                    woodfrog.checkpoint, target.handle, store=store, cpu=False, compress="none", check_clean=True
                )
            except WoodfrogError as failure:
                misses += 1
                results.add(kind="miss", target=name, number=number, **harness.error_members(failure))
                continue
            calls.append(call)
            result = call.result
            results.add(
                kind="checkpoint", target=name, number=number, image=result.image, launches=result.launches,
                covered_launches=result.covered_launches, clean_bytes=result.clean_bytes, gpu_bytes=result.gpu_bytes,
                gpu_new_bytes=result.gpu_new_bytes, unclean_reason=result.unclean_reason, **call.members(),
            )  # fmt: skip
    with ImageRepository(store, create=False) as repository:
        summarise(results, name, calls, repository, arguments)
    shutil.rmtree(store)
    return misses


def summarise(
    results: harness.Results,
    name: str,
    calls: list[woodfrog_calls.Timed],
    repository: Any,
    arguments: argparse.Namespace,
) -> None:
    later = [call.result for call in calls[1:]]
    launches = sum(result.launches for result in later)
    if launches:
        results.summary[f"{name}_covered_share"] = sum(result.covered_launches for result in later) / launches
    results.summary[f"{name}_clean_share"] = harness.median(result.clean_bytes / result.gpu_bytes for result in later)
    results.summary[f"{name}_dirty_s"] = harness.median(call.phase_s("handover") for call in calls[1:])
    excess = []
    for before, call in itertools.pairwise(calls):
        found = increments.changes(
            repository, str(before.result.image), str(call.result.image), most_bytes=arguments.compare_bytes
        )
        dirty_bytes = call.result.gpu_bytes - call.result.clean_bytes
        results.add(
            kind="changes", target=name, image=call.result.image, may_be_written_bytes=dirty_bytes,
            changed_chunk_bytes=found.changed_chunk_bytes, sampled=found.sampled,
        )  # fmt: skip
        if found.changed_chunk_bytes:
            excess.append(dirty_bytes / found.changed_chunk_bytes)
    if excess:
        results.summary[f"{name}_excess"] = harness.median(excess)


def main() -> int:
    """Returns the exit status: 0 if every target was measured and no clean range differed."""
    parser = harness.parser(__doc__ or "", budget_s=400)
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], help="of throughput")
    parser.add_argument("--targets", nargs="*", choices=("sparse", "serve", "train"), help="of dirty sets")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints after the first")
    parser.add_argument("--requests", type=int, default=5, help="requests between two checkpoints")
    parser.add_argument("--layers", type=int, default=32, help="of the transformer")
    parser.add_argument("--width", type=int, default=4096, help="of the transformer")
    parser.add_argument("--train-gib", type=float, default=4.0)
    parser.add_argument("--sparse-gib", type=float, default=0.0625)
    parser.add_argument("--compare-bytes", type=int, default=2 << 30, help="read at most so much of each image")
    arguments = parser.parse_args()
    names = (
        arguments.targets if arguments.targets is not None else ["sparse"] if arguments.quick else ["sparse", "serve"]
    )
    chosen = arguments.cases if arguments.cases is not None else ["launch"] if arguments.quick else ["launch", "decode"]
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 2)

    results = harness.Results("shadow")
    overall = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    results.summary["misses"] = 0
    stores = Path(os.environ.get("WOODFROG_STORE", arguments.work / "stores")) / f"shadow-{os.getpid()}"
    stores.mkdir(mode=0o700, parents=True)
    try:
        for name in names:
            try:
                results.summary["misses"] += measure_dirty(results, name, stores / name, arguments)
            except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others)
                failures.append(f"{name}: {failure}")
                results.add(kind="failure", target=name, **harness.error_members(failure))
        cases = [case for case in CASES if case.name in chosen]
        for number, case in enumerate(cases):
            budget = harness.Budget(overall.left_s / (len(cases) - number))
            try:
                measure_throughput(results, budget, case, stores / case.name, arguments)
            except Exception as failure:  # noqa: BLE001 (as above)
                failures.append(f"{case.name}: {failure}")
                results.add(kind="failure", target=case.name, **harness.error_members(failure))
    finally:
        shutil.rmtree(stores, ignore_errors=True)
    harness.finish(results, GOALS, failures)
    return 1 if failures or results.summary["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
