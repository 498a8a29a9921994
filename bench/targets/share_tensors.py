"""Target: CUDA tensors passed between processes by torch.multiprocessing, a parent and its workers.

The parent, on GPU 0, owns tensors that every worker has open, each worker some that the parent has open (worker k on
GPU k + 1, as far as there are so many). At each step the parent changes its own, each worker mixes that into its own,
and the step's value is a checksum of all of them as the parent sees them: a mapping that is no longer the same memory
shows at once. Integers only, so nothing depends on an order of sums.
"""

from __future__ import annotations

import argparse
from typing import Any

import protocol
import workers

FACTOR = 6364136223846793005  # Knuth's, of a linear congruential generator
SEEN = 4096  # of each tensor: so many bytes at its beginning are a small allocation of their own


def device_of(number: int, arguments: argparse.Namespace) -> Any:
    """Of the parent (-1), or of worker `number`."""
    import torch

    if arguments.device != "cuda":
        return torch.device(arguments.device)
    return torch.device("cuda", (number + 1) % torch.cuda.device_count())


def filled(words: int, first: int, device: Any) -> Any:
    """A tensor of 64-bit words that count from `first`."""
    import torch

    return torch.arange(first, first + words, dtype=torch.int64, device=device)


def finish(device: Any) -> None:
    """Until the GPU has done what it was given: nobody else knows of our streams."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work(number: int, connection: Any, arguments: argparse.Namespace) -> None:
    """One worker: what it is sent it answers, once that is done; None ends it."""
    import torch

    device = device_of(number, arguments)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    large, small = connection.recv()
    mine = [filled(arguments.words, number, device), filled(SEEN // 8, number, device)]
    finish(device)
    connection.send(mine)
    while (step := connection.recv()) is not None:
        for own, theirs in zip(mine, (large, small), strict=True):
            own.mul_(FACTOR).add_(theirs.to(device))
        finish(device)
        connection.send(step)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--words", type=int, default=8 << 20, help="64-bit words of each large tensor")
    arguments = parser.parse_args()
    protocol.set_environment()

    import torch
    from torch import multiprocessing

    started = workers.Workers(multiprocessing, arguments.workers, work, arguments)
    device = device_of(-1, arguments)
    mine = [filled(arguments.words, arguments.seed, device), filled(SEEN // 8, arguments.seed, device)]
    finish(device)
    results = started.ask(mine)

    def checksum() -> str:
        total = 0
        for tensors in (mine, *results):
            for tensor in tensors:
                total = (total * 31 + int(tensor.sum())) % 2**64
        return f"{total:016x}"

    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)
    log.start("share_tensors", (arguments.workers + 1) * (8 * arguments.words + SEEN), torch=torch.__version__)
    for step in range(1, arguments.steps + 1):
        for tensor in mine:
            tensor.mul_(FACTOR).add_(step)
        finish(device)
        started.ask(step)
        log.step(checksum())
    log.done(checksum())
    started.end()


if __name__ == "__main__":
    main()
