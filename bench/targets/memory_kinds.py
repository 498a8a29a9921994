"""Target: is memory from the interposer as fast as the driver's? Both kinds within one process, in turns.

The interposer makes device memory with the driver's virtual memory API, where the driver alone would have made it with
cuMemAlloc. One tensor of each kind is there, and each step times the same kernels on both: `stream` reads and writes
all of it, `gather` reads rows in random order, `matmul` multiplies by it. A step's line has the times in seconds, the
value is the sum of what was computed, which must be equal for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import driver_calls
import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WIDTH = 8192


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=200, state_gib=1.0)
    arguments = parser.parse_args()
    protocol.set_environment()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch

    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    rows = int(arguments.state_gib * 2**30) // (2 * WIDTH)
    order = torch.randperm(rows, device=device)
    x = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    scratch = torch.empty(rows // 4, WIDTH, device=device, dtype=torch.bfloat16)

    def made() -> torch.Tensor:
        return torch.ones(rows, WIDTH, device=device, dtype=torch.bfloat16)

    def kernels(memory: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {
            "stream": lambda: memory.mul_(1.0),
            "gather": lambda: torch.index_select(memory, 0, order[: rows // 4], out=scratch),
            "matmul": lambda: torch.matmul(x, memory[:WIDTH]),
        }

    # Everything is called once before addresses are looked for: the libraries look functions up when first used.
    warm = made()
    for kernel in kernels(warm).values():
        kernel()
    del warm
    torch.cuda.empty_cache()
    calls = driver_calls.DriverCalls()
    ours = made()
    calls.use(direct=True)
    theirs = made()
    calls.use(direct=False)
    kinds = {"interposed": kernels(ours), "direct": kernels(theirs)}

    def timed(kernel: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    log.start("memory_kinds", 2 * ours.nbytes, places=calls.places)
    for step in range(arguments.steps):
        order_of = ("interposed", "direct") if step % 2 == 0 else ("direct", "interposed")
        times = {f"{name}_{kind}_s": timed(kinds[kind][name]) for name in kinds["direct"] for kind in order_of}
        log.step(protocol.float_bits(float(ours.sum() - theirs.sum())), **times)
    log.done(protocol.float_bits(float(ours.float().sum())), places=calls.places)


if __name__ == "__main__":
    main()
