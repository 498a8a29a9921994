"""GPU data and its copy on other GPUs, while both are in the daemon's hands.

Bytes go through host memory, a ring for each GPU of which one half fills while the other empties, so that both buses
work at once whether or not the GPUs reach each other. What has arrived is compared where it lies: digests on the one
GPU against digests on the other. Must never be asked for memory of the host: that need not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.operations.context import Arenas, Context
from woodfrog.operations.data import DevicePart, GpuData, JointProgress
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.rings import take_rings
from woodfrog.operations.space import ALIGNMENT_BYTES, Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress

CHUNK_BYTES = 1 << 20  # of a comparison: what has changed since it was copied is copied again in pieces of this size

Run = tuple[int, int, int]  # index of a handle, offset in it, size
Extent = tuple[int, int, int, int]  # the same, and where in the ring's half


class Twin:
    """Handles on the GPUs that they are on, and on those that they go to. Owns memory on both until `release`."""

    def __init__(
        self, context: Context, handles: Sequence[HandleNote], old: dict[int, str], new: dict[int, str], user: int
    ) -> None:
        """`old`, `new`: the target's device ordinals → UUIDs."""
        self.source = GpuData(context.devices, handles, old)
        self.copy = GpuData(context.devices, handles, new)
        self._arenas: Arenas = context.arenas
        self._user = user
        self._rings: dict[int, Space] = {}

    def take_rings(self) -> None:
        """Host memory to go through; NoSpaceError."""
        sizes = {part.number: part.size_bytes for part in self.source.parts}
        self._rings = take_rings(self._arenas, sizes, self._user, ALIGNMENT_BYTES)

    def move(self, progress: JointProgress) -> int:
        """All bytes to the copies; how many."""
        handles = self.source.handles
        return self._move([[(at, 0, handles[at].size) for at in part.indices] for part in self.source.parts], progress)

    def move_changed(self, progress: JointProgress) -> int:
        """Again what differs from the copies; how many bytes."""
        cuts = self.source.cuts(CHUNK_BYTES)
        runs: list[list[Run]] = []
        for part, cut, (there, here) in zip(self.source.parts, cuts, self._digests(), strict=True):
            differing = [at for at in range(len(cut)) if _digest(there, at) != _digest(here, at)]
            runs.append(
                [
                    (part.indices[piece], offset, size)
                    for at in differing
                    for piece, offset, size in cut.ranges(at, at + 1)
                ]
            )
        return self._move(runs, progress)

    def require_same(self) -> None:
        """WoodfrogError unless the copies are what they are of."""
        for part, (there, here) in zip(self.source.parts, self._digests(), strict=True):
            if there != here:
                raise WoodfrogError(
                    f"what arrived on GPU {self.copy.device_of(part).ordinal} is not what GPU "
                    f"{self.source.device_of(part).ordinal} has",
                    advice="this machine's memory or buses are at fault: see `dmesg` and `nvidia-smi -q -d ECC`",
                )

    def adopt(self, earlier: Twin) -> None:
        """Copies of `earlier` whose handles are here as well become these ones' copies; the rest is made."""
        self.copy.create_all(earlier.copy)

    def release(self) -> None:
        """Unmap both, give the rings back. Nothing happens a second time."""
        self.source.release()
        self.copy.release()
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.free()

    def _digests(self) -> list[tuple[bytes, bytes]]:
        """Of each part's chunks: of the memory and of its copy."""
        sides = [side.hash(CHUNK_BYTES, side.new_progress()) for side in (self.source, self.copy)]
        return list(zip(*sides, strict=True))

    def _move(self, runs: Sequence[Sequence[Run]], progress: JointProgress) -> int:
        def one_device(part: DevicePart, mine: Progress) -> None:
            if runs[part.number]:
                self._stream(self._rings[part.number], runs[part.number], mine)

        self.source.each_device(one_device, progress)
        return sum(size for of_part in runs for _, _, size in of_part)

    def _stream(self, ring: Space, runs: Sequence[Run], progress: Progress) -> None:
        from woodfrog._native import transfer

        (extent,) = ring.extents
        half = max(ALIGNMENT_BYTES, extent.size // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        halves = 2 if extent.size >= 2 * half else 1
        loads = split(runs, half)
        arena = self._arenas.arena(extent.node)

        def go(copy: Callable[..., None], data: GpuData, number: int) -> None:
            base = extent.offset + number % halves * half
            memories = data.memories
            copy([(memories[index], offset, base + at, size) for index, offset, size, at in loads[number]], arena,
                 progress=progress)  # fmt: skip

        with ThreadPoolExecutor(1, thread_name_prefix="twin") as other:
            coming = other.submit(go, transfer.drain, self.source, 0)
            for number in range(len(loads)):
                coming.result()
                more = number + 1 < len(loads)
                if more and halves == 2:
                    coming = other.submit(go, transfer.drain, self.source, number + 1)
                go(transfer.refill, self.copy, number)
                if more and halves == 1:
                    coming = other.submit(go, transfer.drain, self.source, number + 1)


def split(runs: Sequence[Run], room_bytes: int) -> list[list[Extent]]:
    """Runs in loads of at most `room_bytes`, each extent with its place in the load."""
    loads: list[list[Extent]] = []
    used = room_bytes
    for index, offset, size in runs:
        done = 0
        while done < size:
            if used == room_bytes:
                loads.append([])
                used = 0
            step = min(size - done, room_bytes - used)
            loads[-1].append((index, offset + done, step, used))
            used += step
            done += step
    return loads


def _digest(digests: bytes, at: int) -> bytes:
    return digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
