"""The data path: how fast GPU memory is drained and refilled, against pinned copies of as many bytes in the same run.

* engine     drain and refill by the transfer engine itself, nothing else on the bus: d2h_ratio, h2d_ratio
* suspend    a target with --size-gib of state is suspended and resumed; seconds of the phases `drain` and `refill`.
             The driver saves and restores its control state (about 0.53 GB) over the same bus at the same time, so
             these rates, d2h_ratio_in_suspend and h2d_ratio_in_resume, are of a shared bus.

After each resume the target checks every byte on the GPU, and a wrong one ends the benchmark as a failure.

summary: d2h_ratio, h2d_ratio (goal: at least 0.97 each), and the same within suspend and resume
"""

from __future__ import annotations

import sys
import time

import driver_baseline
import harness
import target_process
import woodfrog_calls

GOALS = {"d2h_ratio": ">= 0.97", "h2d_ratio": ">= 0.97", "wrong_words": "0"}


def measure_engine(
    results: harness.Results, size_bytes: int, buffers: int, repetitions: int
) -> tuple[list[float], list[float]]:
    """Bytes/s of drains and refills by the engine alone, between `buffers` pieces of GPU memory and an arena."""
    from woodfrog._native import transfer
    from woodfrog.operations.data import COPY_BYTES

    piece_bytes = size_bytes // buffers
    arena = transfer.Arena(piece_bytes * buffers)
    arena.register()
    arena.populate(0, piece_bytes * buffers)
    memories = transfer.Device(0).create_memories([piece_bytes] * buffers)
    extents = [(memory, 0, index * piece_bytes, piece_bytes) for index, memory in enumerate(memories)]
    drained: list[float] = []
    refilled: list[float] = []
    for repetition in range(repetitions + 1):
        begin_s = time.monotonic()
        transfer.drain(extents, arena, chunk_bytes=COPY_BYTES)
        middle_s = time.monotonic()
        transfer.refill(extents, arena, chunk_bytes=COPY_BYTES)
        rates = piece_bytes * buffers / (middle_s - begin_s), piece_bytes * buffers / (time.monotonic() - middle_s)
        results.add(
            kind="engine", repetition=repetition, size_bytes=piece_bytes * buffers,
            drain_gb_per_s=rates[0] / 1e9, refill_gb_per_s=rates[1] / 1e9,
        )  # fmt: skip
        if repetition:
            drained.append(rates[0])
            refilled.append(rates[1])
    for memory in memories:
        memory.release()
    arena.unregister()
    arena.close()
    return drained, refilled


def main() -> int:
    """Returns the exit status: 0 if everything was measured and every byte was right."""
    parser = harness.parser(__doc__ or "", budget_s=90)
    parser.add_argument("--size-gib", type=float, default=16.0, help="GPU state of the target")
    parser.add_argument("--buffers", type=int, default=8, help="allocations that the state lies in")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    size_gib = min(arguments.size_gib, 2.0) if arguments.quick else arguments.size_gib
    repetitions = min(arguments.repetitions, 2) if arguments.quick else arguments.repetitions
    size_bytes = int(size_gib * harness.GIB)

    import woodfrog

    results = harness.Results("data_path")
    budget = harness.Budget(arguments.budget_s)
    warm_s = driver_baseline.warm_host_memory(size_bytes)
    ceiling = driver_baseline.copy_ceiling(size_bytes)
    results.add(kind="ceiling", size_bytes=size_bytes, streams=ceiling.streams, warm_s=warm_s, **ceiling.members())
    results.summary.update(ceiling.members())

    engine = measure_engine(results, size_bytes, arguments.buffers, repetitions)
    engine_drain, engine_refill = (harness.Spread.of(rates) for rates in engine)

    wrong_words = 0
    drained: list[float] = []
    refilled: list[float] = []
    options = ["--state-gib", str(size_gib), "--buffers", str(arguments.buffers), "--pace-ms", "1"]
    with target_process.interposed("fill_state", options, arguments.work, "data_path") as target:
        target.wait_start()
        target.wait_more_steps(20)
        # The first repetition fills the arena with memory that the kernel has yet to hand out: it is reported apart.
        for repetition in range(repetitions + 1):
            if repetition > 1 and not budget.allows(5.0):
                break
            suspend = woodfrog_calls.timed(woodfrog.suspend, target.handle)
            resume = woodfrog_calls.timed(woodfrog.resume, target.handle)
            target.wait_more_steps(5)
            wrong = target.verify()
            wrong_words += wrong
            drain_s, refill_s = suspend.phase_s("drain"), resume.phase_s("refill")
            if repetition:
                drained.append(size_bytes / drain_s)
                refilled.append(size_bytes / refill_s)
            results.add(
                kind="woodfrog", repetition=repetition, size_bytes=size_bytes, wrong_words=wrong,
                drain_gb_per_s=size_bytes / drain_s / 1e9, refill_gb_per_s=size_bytes / refill_s / 1e9,
                suspend=suspend.members(), resume=resume.members(),
            )  # fmt: skip

    drain, refill = harness.Spread.of(drained), harness.Spread.of(refilled)
    results.summary.update(
        d2h_ratio=engine_drain.median / ceiling.d2h_bytes_per_s,
        d2h_ratio_min=engine_drain.minimum / ceiling.d2h_bytes_per_s,
        h2d_ratio=engine_refill.median / ceiling.h2d_bytes_per_s,
        h2d_ratio_min=engine_refill.minimum / ceiling.h2d_bytes_per_s,
        d2h_ratio_in_suspend=drain.median / ceiling.d2h_bytes_per_s,
        h2d_ratio_in_resume=refill.median / ceiling.h2d_bytes_per_s,
        drain_gb_per_s=drain.median / 1e9,
        drain_gb_per_s_min=drain.minimum / 1e9,
        drain_gb_per_s_max=drain.maximum / 1e9,
        refill_gb_per_s=refill.median / 1e9,
        refill_gb_per_s_min=refill.minimum / 1e9,
        refill_gb_per_s_max=refill.maximum / 1e9,
        repetitions=drain.count,
        wrong_words=wrong_words,
    )
    harness.finish(results, GOALS)
    return 0 if wrong_words == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
