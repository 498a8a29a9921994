"""Target: buffers in GPU memory of which every step overwrites a few small ranges, for benchmarks of increments.

Runs on the driver API alone (cuda-bindings), so also on the simulated GPU. The state is ``--state-gib`` of random
bytes in ``--buffers`` allocations; a step (a "request") writes ``--writes`` ranges of ``--write-bytes`` random bytes at
random places, which are multiples of 64 bytes. The value of a step is the checksum of what it wrote and where.
"""

from __future__ import annotations

import random
import zlib

import driver_calls
import protocol
from driver_memory import checked

PLACE_BYTES = 64


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=1_000_000, state_gib=0.0625)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--writes", type=int, default=8, help="ranges that a step writes")
    parser.add_argument("--write-bytes", type=int, default=4096)
    parser.add_argument("--burst", type=int, default=5, help="steps before it waits for SIGUSR1")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.hold_signals()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    from cuda.bindings import driver

    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    size = int(arguments.state_gib * 2**30 / arguments.buffers) // PLACE_BYTES * PLACE_BYTES
    chosen = random.Random(arguments.seed)
    buffers = [checked(driver.cuMemAlloc(size)) for _ in range(arguments.buffers)]
    for buffer in buffers:
        checked(driver.cuMemcpyHtoD(buffer, chosen.randbytes(size), size))
    alternating = driver_calls.Alternating(arguments.alternate)
    log.start(
        "sparse_writes",
        size * arguments.buffers,
        written_bytes_per_step=arguments.writes * arguments.write_bytes,
        places=alternating.places,
    )
    for _ in protocol.in_bursts(arguments.steps, arguments.burst):
        checksum = 0
        alternating.begin()
        for _ in range(arguments.writes):
            number = chosen.randrange(len(buffers))
            offset = chosen.randrange((size - arguments.write_bytes) // PLACE_BYTES + 1) * PLACE_BYTES
            data = chosen.randbytes(arguments.write_bytes)
            checked(driver.cuMemcpyHtoD(int(buffers[number]) + offset, data, len(data)))
            checksum = zlib.crc32(data, zlib.crc32(f"{number} {offset}".encode(), checksum))
        log.step(f"{checksum:08x}", **alternating.end())
    log.done("end")


if __name__ == "__main__":
    main()
