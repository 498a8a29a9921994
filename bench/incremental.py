"""Increments: what the second checkpoint of a target costs against the first, and how near that is to what changed.

For each target: the host arena is warmed by a checkpoint into another store, then one is made into an empty store, then
the target works, and so on for --rounds more.

* serve    serve_transformer.py: an 8B-class transformer, 5 requests of 1155 tokens in and 211 out between checkpoints
* train    train_gpt2.py with --train-gib of state, --train-steps steps between checkpoints: nearly all of it changes
* sparse   sparse_writes.py: small, also for the simulated GPU

What really changed is read from the store, 64 bytes at a time (increments.py); a row a chunk size says what that size
would have cost. The hash kernel is measured alone, against a kernel that only reads, in the same run.

summary, of the first target: size_ratio, latency_ratio (whole calls), data_latency_ratio (phases hash, capture, drain
and write alone), amplification (bytes stored, uncompressed, over bytes that changed); hash_gbps,
hash_ratio_to_read_ceiling. The same with the target's name before it for the others. Ratios are medians over the
rounds, each against the first.

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import harness
import increments
import target_process
import woodfrog_calls

GOALS = {
    "hash_gbps": ">= 1000",
    "size_ratio": "<= 0.10 (GCR 0.134)",
    "amplification": "<= 1.10",
    "data_latency_ratio": "<= 0.15",
    "latency_ratio": "(GCR 0.562)",
}
DATA_PHASES = ("hash", "capture", "drain", "write")


def target_options(name: str, arguments: argparse.Namespace) -> tuple[str, list[str], int, bool]:
    """Program, options, steps between two checkpoints, and whether it waits for SIGUSR1 after them."""
    if name == "serve":
        options = ["--burst", str(arguments.requests)]
        options += ["--layers", str(arguments.layers), "--width", str(arguments.width)]
        return "serve_transformer", options, arguments.requests, True
    if name == "train":
        return (
            "train_gpt2",
            ["--steps", "1000000", "--state-gib", str(arguments.train_gib)],
            arguments.train_steps,
            False,
        )
    options = ["--state-gib", str(arguments.sparse_gib), "--burst", str(arguments.requests)]
    return "sparse_writes", options, arguments.requests, True


def measure_hash(results: harness.Results, size_bytes: int, chunk_bytes: int, repetitions: int) -> None:
    """The hash of all chunks of `size_bytes` of GPU memory where they lie, and the ceiling: reading them."""
    from woodfrog._native import transfer

    device = transfer.Device(0)
    memories = device.create_memories([size_bytes // 8] * 8)
    pieces = [(memory, 0, memory.size_bytes) for memory in memories]
    total = sum(memory.size_bytes for memory in memories)

    def rate(call: Any) -> harness.Spread:
        call()
        seconds = []
        for _ in range(repetitions):
            begin_s = time.monotonic()
            call()
            seconds.append(time.monotonic() - begin_s)
        return harness.Spread.of(total / one for one in seconds)

    try:
        hashed = rate(lambda: transfer.hash_device(pieces, chunk_bytes=chunk_bytes))
        results.summary["hash_gbps"] = hashed.median / 1e9
        members: dict[str, Any] = {**hashed.members("hash_bytes_per_s"), "hashes": device.hashes}
        try:
            read = rate(lambda: transfer.read_device(pieces))
        except transfer.TransferError as failure:
            members["read_ceiling_not_measured"] = str(failure)
        else:
            results.summary["hash_ratio_to_read_ceiling"] = hashed.median / read.median
            members |= read.members("read_bytes_per_s")
        results.add(kind="hash", size_bytes=total, chunk_bytes=chunk_bytes, **members)
    finally:
        for memory in memories:
            memory.release()


def work(target: target_process.TargetRun, steps: int, waits: bool, first: bool) -> None:
    """Lets the target make that many steps."""
    target.log.read()
    wanted = target.log.last_step + steps if not first else steps
    if waits and not first:
        os.kill(target.pid, signal.SIGUSR1)
    target.wait_step(wanted, timeout_s=300)


def measure_target(
    results: harness.Results, budget: harness.Budget, name: str, prefix: str, arguments: argparse.Namespace
) -> None:
    """One target's checkpoints; its summary."""
    import woodfrog
    from woodfrog.image.repository import ImageRepository

    program, options, steps, waits = target_options(name, arguments)
    stores = Path(os.environ.get("WOODFROG_STORE", arguments.work / "stores")) / f"incremental-{os.getpid()}-{name}"
    warm, store = stores / "warm", stores / "measured"
    stores.mkdir(mode=0o700, parents=True)
    ImageRepository(store, chunk_bytes=arguments.chunk_bytes).close()
    try:
        with target_process.interposed(program, options, arguments.work, f"incremental-{name}") as target:
            target.wait_start()
            work(target, steps, waits, first=True)
            call_options: dict[str, Any] = {"cpu": arguments.cpu, "compress": arguments.compress}
            woodfrog.checkpoint(target.handle, store=warm, **call_options)
            shutil.rmtree(warm)
            calls: list[woodfrog_calls.Timed] = []
            for number in range((1 if name == "train" else arguments.rounds) + 1):  # each of it is a full one again
                expected_s = max((call.call_s for call in calls), default=0.0)
                if number > 1 and not budget.allows(2 * expected_s):
                    break
                if number:
                    work(target, steps, waits, first=False)
                calls.append(woodfrog_calls.timed(woodfrog.checkpoint, target.handle, store=store, **call_options))
                add_checkpoint(results, name, number, calls[-1])
        with ImageRepository(store, create=False) as repository:
            summarise(results, name, prefix, calls, repository, arguments)
    finally:
        shutil.rmtree(stores, ignore_errors=True)


def data_s(call: woodfrog_calls.Timed) -> float:
    """Seconds that went into data, not into control state."""
    return sum(call.phases.get(phase, 0.0) for phase in DATA_PHASES)


def add_checkpoint(results: harness.Results, name: str, number: int, call: woodfrog_calls.Timed) -> None:
    result = call.result
    results.add(
        kind="checkpoint", target=name, number=number, image=result.image, stall_s=result.stall_s, data_s=data_s(call),
        gpu_bytes=result.gpu_bytes, gpu_new_bytes=result.gpu_new_bytes, gpu_zero_bytes=result.gpu_zero_bytes,
        cpu_bytes=result.cpu_bytes, cpu_new_bytes=result.cpu_new_bytes, stored_bytes=result.stored_bytes,
        chunks=result.chunks, new_chunks=result.new_chunks, ring=result.ring, **call.members(),
    )  # fmt: skip


def summarise(
    results: harness.Results,
    name: str,
    prefix: str,
    calls: list[woodfrog_calls.Timed],
    repository: Any,
    arguments: argparse.Namespace,
) -> None:
    first, later = calls[0], calls[1:]
    results.summary |= {
        f"{prefix}size_ratio": harness.median(call.result.stored_bytes / first.result.stored_bytes for call in later),
        f"{prefix}latency_ratio": harness.median(call.call_s / first.call_s for call in later),
        f"{prefix}data_latency_ratio": harness.median(data_s(call) / data_s(first) for call in later),
        f"{prefix}stall_s": harness.median(call.result.stall_s for call in later),
    }
    amplifications = []
    for before, call in zip(calls, later, strict=False):
        found = increments.changes(
            repository, str(before.result.image), str(call.result.image), most_bytes=arguments.compare_bytes
        )
        if found.changed_line_bytes:
            amplifications.append(call.result.gpu_new_bytes / found.changed_line_bytes)
        results.add(
            kind="changes", target=name, image=call.result.image, gpu_new_bytes=call.result.gpu_new_bytes,
            changed_chunk_bytes=found.changed_chunk_bytes, changed_line_bytes=found.changed_line_bytes,
            new_handle_bytes=found.new_handle_bytes, sampled=found.sampled,
        )  # fmt: skip
        for row in found.sweep_rows():
            results.add(kind="chunk size", target=name, image=call.result.image, **row)
    if amplifications:
        results.summary[f"{prefix}amplification"] = harness.median(amplifications)


def main() -> int:
    """Returns the exit status: 0 if every target was measured."""
    parser = harness.parser(__doc__ or "", budget_s=400)
    parser.add_argument("--targets", nargs="+", choices=("serve", "train", "sparse"), help="in order of importance")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints after the first")
    parser.add_argument("--requests", type=int, default=5, help="requests between two checkpoints")
    parser.add_argument("--layers", type=int, default=32, help="of the transformer")
    parser.add_argument("--width", type=int, default=4096, help="of the transformer")
    parser.add_argument("--train-gib", type=float, default=16.0)
    parser.add_argument("--train-steps", type=int, default=2)
    parser.add_argument("--sparse-gib", type=float, default=0.0625)
    parser.add_argument("--hash-gib", type=float, default=16.0)
    parser.add_argument("--chunk-bytes", type=int, default=64 << 10, help="of the store")
    parser.add_argument("--compare-bytes", type=int, default=2 << 30, help="read at most so much of each image")
    parser.add_argument("--compress", default="none", help="none: sizes are then of the data alone")
    parser.add_argument("--cpu", action="store_true", help="with the CPU side, as for a restore")
    arguments = parser.parse_args()
    targets: list[str] = arguments.targets or (["sparse"] if arguments.quick else ["serve", "train"])
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 2)
        arguments.hash_gib = min(arguments.hash_gib, 0.0625)

    results = harness.Results("incremental")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []
    measure_hash(results, int(arguments.hash_gib * harness.GIB), arguments.chunk_bytes, 3 if arguments.quick else 7)
    for number, name in enumerate(targets):
        try:
            measure_target(results, budget, name, f"{name}_" if number else "", arguments)
        except Exception as failure:  # noqa: BLE001 (one target that fails must not cost the others their measurement)
            failures.append(f"{name}: {failure}")
            results.add(kind="failure", target=name, **harness.error_members(failure))
    harness.finish(results, GOALS, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
