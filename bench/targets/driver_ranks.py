"""Target: one rank of a job on the driver API alone (cuda-bindings), so also on the simulated GPU.

At each step a rank reads its GPU memory, the ranks add up their checksums over TCP (rank 0 is the hub, as PyTorch's
store is), and each writes bytes that follow from the sum, its number and the step, and copies them on the GPU. The
value of a step is the sum: a byte that got lost in any rank shows in all. Rank k is on GPU k, as far as there are so
many. Each rank has a log of its own ($RANK_LOG.RANK).
"""

from __future__ import annotations

import os
import random
import socket
import struct
import time
import zlib
from typing import Any

import driver_memory
import protocol

CONNECT_S = 60.0


def exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; SystemExit when the other side ends before."""
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise SystemExit("driver_ranks: another rank has ended")
        found += more
    return found


class Sum:
    """What all ranks add up to, for each of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        place = ("127.0.0.1", int(os.environ["RANKS_PORT"]))  # torchrun's store has $MASTER_PORT
        self._hub = rank == 0
        if self._hub:
            self._listener = socket.create_server(place)  # open for good, as a store's is
            self._others = [self._listener.accept()[0] for _ in range(ranks - 1)]
            return
        end_s = time.monotonic() + CONNECT_S
        while True:
            try:
                self._others = [socket.create_connection(place)]
                return
            except ConnectionRefusedError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)  # the hub may be starting still

    def __call__(self, value: int) -> int:
        if not self._hub:
            self._others[0].sendall(struct.pack("<Q", value))
            return int(struct.unpack("<Q", exactly(self._others[0], 8))[0])
        total = (value + sum(struct.unpack("<Q", exactly(one, 8))[0] for one in self._others)) % 2**64
        for one in self._others:
            one.sendall(struct.pack("<Q", total))
        return int(total)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=100)
    parser.add_argument("--kib", type=int, default=4096, help="of each of two allocations")
    arguments = parser.parse_args()
    rank, local, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))

    device = driver_memory.Gpu(local)
    size = arguments.kib << 10
    first, second = device.alloc(size), device.alloc(size)
    device.write(second, random.Random(arguments.seed + rank).randbytes(size))
    together = Sum(rank, ranks)
    path = os.environ.get("RANK_LOG", "")
    log = protocol.Log(f"{path}.{rank}" if path else "", arguments.pace_ms, arguments.hold)
    log.start("driver_ranks", 2 * size, rank=rank, busbw_gb_s=None)
    total: Any = 0
    for step in range(1, arguments.steps + 1):
        total = together(zlib.crc32(device.read(second, size)))
        device.write(first, random.Random(f"{total} {step} {rank}").randbytes(size))
        device.copy(second, first, size)
        log.step(f"{total:016x}")
    log.done(f"{total:016x}")


if __name__ == "__main__":
    main()
