"""Hashing where the memory is, and draining what has changed, each against its ceiling measured in the same run.

* read       a kernel that only reads one piece of --size-gib: the ceiling of hashing
* hash       BLAKE3 of that piece by every kernel there is (64 KiB chunks), then by the fastest one with other chunk
             sizes, then of as many bytes in --pieces small pieces
* drain      random 64 KiB chunks of the small pieces, by share of all: gathered in GPU memory and then copied, and
             copied one by one, against a pinned copy of --drain-gib

Digests are compared with those of the CPU, and what was drained is hashed on the host; a wrong one ends the benchmark.

summary: hash_gb_per_s, hash_ratio_to_read_ceiling, hash_pieces_ratio (small pieces against one), drain_ratio (gathered,
a quarter of all chunks, against a pinned copy), drain_ratio_min (worst share), wrong
"""

from __future__ import annotations

import mmap
import random
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import driver_baseline
import harness
from woodfrog._native import transfer

KIB, MIB = 2**10, 2**20
CHUNK_BYTES = 64 * KIB
CHUNK_SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB)
SHARES = (0.01, 0.05, 0.25, 0.5, 0.9)
GRANULARITY = 2 * MIB
GOALS = {
    "hash_gb_per_s": ">= 1000", "hash_pieces_ratio": ">= 0.95", "drain_ratio": ">= 0.9", "wrong": "0",
}  # fmt: skip

Piece = tuple[transfer.Memory, int, int]


@dataclass
class Bench:
    """What the parts of this benchmark share."""

    results: harness.Results
    budget: harness.Budget
    repetitions: int
    how: str  # of hash_device: the kernels, also where the simulated GPU has to interpret them

    def rate(self, work: Callable[[], Any], size_bytes: int, **members: Any) -> harness.Spread:
        """GB/s of `work`, and a row of it with `members`. The first call, which loads and allocates, is not counted."""
        begin_s = time.perf_counter()
        work()
        first_s = time.perf_counter() - begin_s
        rates = []
        while len(rates) < self.repetitions and (not rates or self.budget.allows(2 * first_s)):
            begin_s = time.perf_counter()
            work()
            rates.append(size_bytes / (time.perf_counter() - begin_s))
        spread = harness.Spread.of(rates)
        gb = harness.Spread(spread.minimum / 1e9, spread.median / 1e9, spread.maximum / 1e9, spread.count)
        self.results.add(**members, size_bytes=size_bytes, first_s=first_s, **gb.members("gb_per_s"))
        return gb


def fill(memories: list[transfer.Memory], arena: transfer.Arena, seed: int) -> None:
    """Random bytes, no two chunks of which are alike; the arena's first bytes serve for it."""
    with mmap.mmap(arena.fd, arena.size_bytes) as view:
        block_bytes = min(16 * MIB, arena.size_bytes)
        view[:block_bytes] = random.Random(seed).randbytes(block_bytes)
        for number, memory in enumerate(memories):
            for at in range(0, memory.size_bytes, block_bytes):
                here = min(block_bytes, memory.size_bytes - at)
                for chunk in range(0, here, CHUNK_BYTES):
                    struct.pack_into("<QQ", view, chunk, number, at + chunk)
                transfer.refill([(memory, at, 0, here)], arena)


def hash_of(bench: Bench, pieces: list[Piece], chunk_bytes: int, variant: str = "") -> bytes:
    return transfer.hash_device(pieces, chunk_bytes=chunk_bytes, how=bench.how, variant=variant)


def wrong_digests(bench: Bench, pieces: list[Piece], chunk_bytes: int, most_bytes: int, variant: str) -> int:
    """How many digests of the first `most_bytes` differ from those that the CPU computes of copied bytes."""
    some, left = [], most_bytes
    for memory, offset, size in pieces:
        if left <= 0:
            break
        some.append((memory, offset, min(size, left)))
        left -= size
    mine = hash_of(bench, some, chunk_bytes, variant)
    reference = transfer.hash_device(some, chunk_bytes=chunk_bytes, how="copy")
    return sum(mine[at : at + 32] != reference[at : at + 32] for at in range(0, len(reference), 32))


def measure_one_piece(bench: Bench, memory: transfer.Memory, check_bytes: int) -> str:
    """The read ceiling, every kernel, and the fastest one's chunk sizes; the name of that kernel."""
    pieces = [(memory, 0, memory.size_bytes)]
    size_bytes = memory.size_bytes
    summary = bench.results.summary
    ceiling = 0.0
    for blocks in (2, 4, 8):
        spread = bench.rate(
            lambda blocks=blocks: transfer.read_device(pieces, blocks_per_multiprocessor=blocks),
            size_bytes, kind="read", blocks_per_multiprocessor=blocks,
        )  # fmt: skip
        ceiling = max(ceiling, spread.median)
    summary["read_ceiling_gb_per_s"] = ceiling
    rates: dict[str, harness.Spread] = {}
    for variant in transfer.hash_variants():
        summary["wrong"] += wrong_digests(bench, pieces, CHUNK_BYTES, check_bytes, variant)
        rates[variant] = bench.rate(
            lambda variant=variant: hash_of(bench, pieces, CHUNK_BYTES, variant),
            size_bytes, kind="hash", variant=variant, chunk_bytes=CHUNK_BYTES, pieces=1,
        )  # fmt: skip
    best = max(rates, key=lambda name: rates[name].median)
    default = rates[transfer.hash_variants()[0]].median
    summary.update(
        hash_gb_per_s=rates[best].median,
        hash_ratio_to_read_ceiling=rates[best].median / ceiling,
        hash_default_variant_gb_per_s=default,
    )
    for chunk_bytes in CHUNK_SIZES:
        summary["wrong"] += wrong_digests(bench, pieces, chunk_bytes, check_bytes, best)
        bench.rate(
            lambda chunk_bytes=chunk_bytes: hash_of(bench, pieces, chunk_bytes, best),
            size_bytes, kind="hash", variant=best, chunk_bytes=chunk_bytes, pieces=1,
        )  # fmt: skip
    return best


def measure_pieces(bench: Bench, pieces: list[Piece], best: str, check_bytes: int) -> None:
    """As many bytes in many small pieces."""
    summary = bench.results.summary
    size_bytes = sum(size for *_, size in pieces)
    summary["wrong"] += wrong_digests(bench, pieces, CHUNK_BYTES, check_bytes, best)
    spread = bench.rate(
        lambda: hash_of(bench, pieces, CHUNK_BYTES, best),
        size_bytes, kind="hash", variant=best, chunk_bytes=CHUNK_BYTES, pieces=len(pieces),
    )  # fmt: skip
    summary["hash_pieces_gb_per_s"] = spread.median
    summary["hash_pieces_ratio"] = spread.median / summary["hash_gb_per_s"]


def measure_drain(bench: Bench, pieces: list[Piece], arena: transfer.Arena, ceiling_gb_per_s: float) -> None:
    """Random chunks to the arena, by their share of all; the digests of what arrived are compared."""
    summary = bench.results.summary
    digests = hash_of(bench, pieces, CHUNK_BYTES)
    sizes = [min(CHUNK_BYTES, size - at) for *_, size in pieces for at in range(0, size, CHUNK_BYTES)]
    slots = arena.size_bytes // CHUNK_BYTES
    worst = float("inf")
    for share in SHARES:
        wanted = min(max(1, int(share * len(sizes))), slots)
        # Where the arena is too small for the share, the chunks are taken from a part of the memory that fits.
        reach = min(len(sizes), int(wanted / share))
        positions = sorted(random.Random(share).sample(range(reach), min(wanted, reach)))
        numbers = struct.pack(f"<{len(positions)}I", *positions)
        size_bytes = sum(sizes[number] for number in positions)
        for gather in ("kernel", "none"):
            spread = bench.rate(
                lambda numbers=numbers, gather=gather: transfer.drain_chunks(
                    pieces, numbers, arena, [(0, arena.size_bytes)], chunk_bytes=CHUNK_BYTES, gather=gather
                ),
                size_bytes, kind="drain", share=share, gather=gather, chunk_bytes=CHUNK_BYTES, chunks=len(positions),
                ceiling_gb_per_s=ceiling_gb_per_s,
            )  # fmt: skip
            ranges = [(slot * CHUNK_BYTES, sizes[number]) for slot, number in enumerate(positions)]
            arrived = transfer.hash_arena(arena, ranges, chunk_bytes=CHUNK_BYTES)
            summary["wrong"] += sum(
                arrived[32 * slot : 32 * slot + 32] != digests[32 * number : 32 * number + 32]
                for slot, number in enumerate(positions)
            )
            ratio = spread.median / ceiling_gb_per_s
            if gather == "kernel":
                worst = min(worst, ratio)
                if share == 0.25:
                    summary.update(drain_ratio=ratio, drain_gb_per_s=spread.median)
            elif share == 0.25:
                summary["drain_ratio_without_gathering"] = ratio
    summary["drain_ratio_min"] = worst


def main() -> int:
    """Returns the exit status: 0 if everything was measured and every digest was right."""
    parser = harness.parser(__doc__ or "", budget_s=120)
    parser.add_argument("--size-gib", type=float, default=16.0, help="GPU memory that is hashed")
    parser.add_argument("--pieces", type=int, default=2000, help="small pieces that it is divided into then")
    parser.add_argument("--drain-gib", type=float, default=4.0, help="host memory that chunks are drained to")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    gpu = transfer.Device(0)
    if not transfer.hash_variants():
        print("hash.py: this build of woodfrog has no GPU kernels (there was no nvcc); nothing to measure")
        return 1
    size_bytes, drain_bytes = int(arguments.size_gib * harness.GIB), int(arguments.drain_gib * harness.GIB)
    repetitions, count = arguments.repetitions, arguments.pieces
    if arguments.quick:
        limit = 8 * MIB if gpu.hashes == "cpu" else harness.GIB  # "cpu": the simulated GPU, which interprets kernels
        size_bytes, drain_bytes, repetitions = min(size_bytes, limit), min(drain_bytes, limit), min(repetitions, 2)
    size_bytes -= size_bytes % GRANULARITY
    drain_bytes -= drain_bytes % GRANULARITY
    # Each a little smaller than its memory: pieces end within a chunk, as they do in life.
    piece_bytes = max(GRANULARITY, size_bytes // count // GRANULARITY * GRANULARITY)
    count = min(count, size_bytes // piece_bytes)

    results = harness.Results("hash")
    bench = Bench(results, harness.Budget(arguments.budget_s), repetitions, "gpu")
    results.summary["wrong"] = 0
    ceiling = driver_baseline.copy_ceiling(drain_bytes)
    results.add(kind="copies", size_bytes=drain_bytes, streams=ceiling.streams, **ceiling.members())
    results.summary.update(ceiling.members())
    arena = transfer.Arena(drain_bytes)
    arena.register()
    arena.populate(0, drain_bytes)

    (memory,) = gpu.create_memories([size_bytes])
    fill([memory], arena, 1)
    best = measure_one_piece(bench, memory, min(size_bytes, 256 * MIB))
    results.add(kind="fastest", variant=best, built_in_default=transfer.hash_variants()[0])
    memory.release()

    memories = gpu.create_memories([piece_bytes] * count)
    fill(memories, arena, 2)
    pieces = [(one, 0, piece_bytes - 4 * KIB) for one in memories]
    measure_pieces(bench, pieces, best, min(size_bytes, 256 * MIB))
    measure_drain(bench, pieces, arena, ceiling.d2h_bytes_per_s / 1e9)
    for one in memories:
        one.release()
    arena.unregister()
    arena.close()
    harness.finish(results, GOALS)
    return 0 if results.summary["wrong"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
