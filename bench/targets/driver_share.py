"""Target: share_tensors.py on the driver API alone (cuda-bindings, legacy IPC), so also on the simulated GPU.

The parent, on GPU 0, owns memory that every worker has open; worker k owns some on GPU k + 1 (as far as there are so
many) that the parent has open. At each step the parent writes bytes that follow from all checksums of the last one,
each worker reads them where the parent's memory is and mixes them into its own, and the step's value is a checksum of
all memory as the parent sees it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import zlib
from typing import Any

import driver_memory
import protocol
import workers


def work(number: int, connection: Any, arguments: argparse.Namespace) -> None:
    """One worker: what it is sent it answers, once that is done; None ends it."""
    size = arguments.kib << 10
    parents, own = driver_memory.Gpu(0), driver_memory.Gpu(number + 1)
    theirs = parents.take(connection.recv())
    mine = own.alloc(size)
    own.write(mine, random.Random(number).randbytes(size))
    connection.send(own.give(mine))
    while (step := connection.recv()) is not None:
        seen = zlib.crc32(own.read(mine, size), zlib.crc32(parents.read(theirs, size)))
        own.write(mine, random.Random(f"{seen} {number}").randbytes(size))
        connection.send(step)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kib", type=int, default=4096, help="of each allocation")
    arguments = parser.parse_args()
    started = workers.Workers(multiprocessing, arguments.workers, work, arguments)
    size = arguments.kib << 10
    own = driver_memory.Gpu(0)
    mine = own.alloc(size)
    given = started.ask(own.give(mine))
    gpus = [driver_memory.Gpu(number + 1) for number in range(arguments.workers)]
    theirs = [gpu.take(one) for gpu, one in zip(gpus, given, strict=True)]

    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)
    log.start("driver_share", (arguments.workers + 1) * size)
    total = arguments.seed
    for step in range(1, arguments.steps + 1):
        own.write(mine, random.Random(f"{total} {step}").randbytes(size))
        started.ask(step)
        total = zlib.crc32(own.read(mine, size))
        for gpu, address in zip(gpus, theirs, strict=True):
            total = zlib.crc32(gpu.read(address, size), total)
        log.step(f"{total:08x}")
    log.done(f"{total:08x}")
    started.end()


if __name__ == "__main__":
    main()
