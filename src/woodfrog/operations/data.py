"""The GPU data of one target in the daemon's hands: imported or created memory, digests, copies.

Devices work side by side, each on a thread of its own; the bytes move in woodfrog._native.transfer and none of them
ever passes through a Python object. Memory that is imported or created here must be released here (`release`).
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from woodfrog.errors import BadImageError
from woodfrog.image.chunks import Cut, packed
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.operations.context import Arenas, Devices
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.space import Space
from woodfrog.operations.staging import Staging

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device, Memory, Progress
    from woodfrog.operations.clean import CleanPart
    from woodfrog.store.arriving import Arriving

# Bytes of one copy between HBM and the arena: large enough for the bus, small enough to be cancelled at once.
COPY_BYTES = 64 << 20
LOCATION_BYTES = 32  # of one chunk, as the store's reader packs them for the native calls


class JointProgress:
    """Several native Progress objects seen as one."""

    def __init__(self, parts: Sequence[Progress]) -> None:
        self.parts = list(parts)

    @property
    def bytes_done(self) -> int:
        return sum(part.bytes_done for part in self.parts)

    @property
    def bytes_total(self) -> int:
        return sum(part.bytes_total for part in self.parts)

    def cancel(self) -> None:
        for part in self.parts:
            part.cancel()


@dataclass(frozen=True)
class DevicePart:
    """The target's handles on one device, in the order in which an image lists them. Memory that several handles share
    is in it once."""

    number: int  # of this part among the parts
    device: int  # the target's ordinal
    device_index: int  # of the device among the image's devices
    indices: tuple[int, ...]  # into the handles
    sizes: tuple[int, ...]  # of these handles
    size_bytes: int


def plan_owners(handles: Sequence[HandleNote]) -> list[int]:
    """For each handle the index of the one that stands for its memory: itself, or of those that share it the largest
    (an importer may know of less than there is), of several the first."""
    largest: dict[int, int] = {}
    for index, handle in enumerate(handles):
        if handle.memory and handle.size > handles[largest.setdefault(handle.memory, index)].size:
            largest[handle.memory] = index
    return [largest[handle.memory] if handle.memory else index for index, handle in enumerate(handles)]


def plan_parts(handles: Sequence[HandleNote], ordinals: Sequence[int]) -> list[DevicePart]:
    """One part for each device that has handles, handles in their given order. `ordinals`: the image's devices."""
    index_of = {ordinal: index for index, ordinal in enumerate(sorted(ordinals))}
    owners = set(plan_owners(handles))
    parts = []
    for number, device in enumerate(sorted({handles[index].device for index in owners})):
        indices = tuple(index for index, handle in enumerate(handles) if handle.device == device and index in owners)
        sizes = tuple(handles[index].size for index in indices)
        parts.append(DevicePart(number, device, index_of[device], indices, sizes, sum(sizes)))
    return parts


class GpuData:
    """The memories behind a target's handles. `uuids` are the daemon's devices by the target's ordinals."""

    def __init__(self, devices: Devices, handles: Sequence[HandleNote], uuids: dict[int, str]) -> None:
        self.handles = list(handles)
        self.owners = plan_owners(handles)
        self.parts = plan_parts(handles, list(uuids))
        self._devices = devices
        self._uuids = uuids
        self._memories: dict[int, Memory] = {}  # by the indices of the parts

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def cuts(self, chunk_bytes: int) -> list[Cut]:
        """Each part's handles cut into chunks."""
        return [Cut(part.sizes, chunk_bytes) for part in self.parts]

    def import_all(self, fds: Sequence[int]) -> None:
        """Map what the target exported; the caller keeps the descriptors."""
        self._fill(
            lambda device, indices: device.import_memories(
                [fds[index] for index in indices], [self.handles[index].size for index in indices]
            )
        )

    def create_all(self, earlier: GpuData | None = None, on_host: Mapping[int, int] | None = None) -> None:
        """Take new memory of the same shape on the devices. Of `earlier`, on the same devices, the memories of the same
        handles are taken over instead; they are this one's then. `on_host`: the NUMA nodes (-1: any) of the handles, by
        index, that get host memory in the place of the device's."""
        nodes = [_node_here(handle.host_node) for handle in self.handles]
        for index, node in (on_host or {}).items():
            nodes[index] = _node_here(max(0, node))
        taken = self._take_over(earlier) if earlier is not None else {}
        self._memories = taken  # released with the rest if what is missing cannot be made
        self._fill(
            lambda device, indices: device.create_memories(
                [self.handles[index].size for index in indices], [nodes[index] for index in indices]
            ),
            taken,
        )

    def _take_over(self, earlier: GpuData) -> dict[int, Memory]:
        there = {(earlier.handles[index].handle, earlier.handles[index].size): index for index in earlier._memories}
        taken = {}
        for part in self.parts:
            for index in part.indices:
                at = there.get((self.handles[index].handle, self.handles[index].size))
                if at is not None:
                    taken[index] = earlier._memories.pop(at)
        return taken

    def _fill(
        self, make: Callable[[Device, Sequence[int]], list[Memory]], known: Mapping[int, Memory] | None = None
    ) -> None:
        """All memories of a device that are not `known` in one call, which is much cheaper than one each; or none."""
        made, known = dict[int, "Memory"](), known or {}
        try:
            for part in self.parts:
                missing = [index for index in part.indices if index not in known]
                device = self._devices.by_uuid(self._uuids[part.device])
                made.update(zip(missing, make(device, missing) if missing else [], strict=True))
        except BaseException:
            for memory in made.values():
                memory.release()
            raise
        self._memories = {**known, **made}

    @property
    def memories(self) -> Mapping[int, Memory]:
        """By the indices of the handles that own them."""
        return self._memories

    def export_all(self) -> list[int]:
        """A descriptor for each handle, of the memory created for it, owned by the caller; on failure none is left
        open. Handles of the same memory get copies of one descriptor, by which they will be known again."""
        fds: dict[int, int] = {}
        try:
            for index, memory in self._memories.items():
                fds[index] = memory.export_fd()
            for index, owner in enumerate(self.owners):
                if index != owner:
                    fds[index] = os.dup(fds[owner])
        except BaseException:
            close_all(list(fds.values()))
            raise
        return [fds[index] for index in range(len(self.handles))]

    def release_piece(self, part: DevicePart, piece: int) -> None:
        """Unmap the memory of one handle of a part, which nothing here looks at any more."""
        memory = self._memories.pop(part.indices[piece], None)
        if memory is not None:
            memory.release()

    def release(self) -> None:
        """Unmap everything; the memory itself lives on while somebody holds a descriptor of it."""
        memories, self._memories = self._memories, {}
        for memory in memories.values():
            memory.release()

    # ── whole memory: suspend and resume ────────────────────────────────────────────────────────────────────────

    def drain(self, arenas: Arenas, spaces: Sequence[Space], progress: JointProgress) -> None:
        """HBM → arena; space k receives the memory of part k, handles back to back."""
        from woodfrog._native import transfer

        self._copy(transfer.drain, arenas, spaces, progress)

    def refill(self, arenas: Arenas, spaces: Sequence[Space], progress: JointProgress) -> None:
        """Arena → HBM."""
        from woodfrog._native import transfer

        self._copy(transfer.refill, arenas, spaces, progress)

    def _copy(
        self, copy: Callable[..., None], arenas: Arenas, spaces: Sequence[Space], progress: JointProgress
    ) -> None:
        def one_device(part: DevicePart, mine: Progress) -> None:
            rows: dict[int, list[tuple[Memory, int, int, int]]] = {}
            offsets = accumulate(part.sizes, initial=0)
            for index, offset, size_bytes in zip(part.indices, offsets, part.sizes, strict=False):
                done = 0
                for node, arena_offset, size in spaces[part.number].pieces(offset, size_bytes):
                    rows.setdefault(node, []).append((self._memories[index], done, arena_offset, size))
                    done += size
            for node, extents in rows.items():
                copy(extents, arenas.arena(node), chunk_bytes=COPY_BYTES, progress=mine)

        self.each_device(one_device, progress)

    # ── chunks: checkpoint and restore ──────────────────────────────────────────────────────────────────────────

    def hash(self, chunk_bytes: int, progress: JointProgress, clean: Sequence[CleanPart] = ()) -> list[bytes]:
        """What lies in HBM now: the digests of each part's chunks, computed where the memory is. Of `clean` parts only
        what their runs name is read."""
        from woodfrog._native import transfer

        def one_device(part: DevicePart, mine: Progress) -> bytes:
            if not clean:
                return transfer.hash_device(self.pieces(part), chunk_bytes=chunk_bytes, progress=mine)
            known = clean[part.number]
            pieces = [(self._memories[run.index], run.offset_bytes, run.size_bytes) for run in known.runs]
            return known.fill(transfer.hash_device(pieces, chunk_bytes=chunk_bytes, progress=mine) if pieces else b"")

        digests: list[bytes] = self.each_device(one_device, progress)
        return digests

    def uuid_of(self, part: DevicePart) -> str:
        """Of the daemon's device of a part."""
        return self._uuids[part.device]

    def device_of(self, part: DevicePart) -> Device:
        """The daemon's device of a part."""
        return self._devices.by_uuid(self._uuids[part.device])

    def capture_chunks(
        self, part: DevicePart, positions: Sequence[int], staging: Staging, progress: Progress | None = None
    ) -> None:
        """HBM → HBM: these chunks of one part (ascending) into the slots of `staging`."""
        from woodfrog._native import transfer

        transfer.capture_chunks(
            self.pieces(part),
            packed(positions),
            staging.places(),
            chunk_bytes=staging.chunk_bytes,
            progress=progress,
        )

    def drain_chunks(
        self,
        part: DevicePart,
        positions: Sequence[int],
        arenas: Arenas,
        space: Space,
        first_slot: int,
        chunk_bytes: int,
        progress: Progress,
    ) -> None:
        """HBM → arena: these chunks of one part (ascending) into the slots of `space` from `first_slot` on."""
        drain_pieces(self.pieces(part), positions, arenas, space, first_slot, chunk_bytes, progress)

    def refill_from_packs(
        self,
        arenas: Arenas,
        rings: Sequence[Space],
        digests: bytes,
        arriving: Arriving,
        chunk_bytes: int,
        progress: JointProgress,
    ) -> None:
        """Packs → HBM through ring k for part k, each chunk checked against its digest: on the way, or where the GPU
        hashes (some twenty times faster than a bus) all of them once they are in HBM. BadImageError, IntegrityError.
        `digests` and `arriving` are of all parts' chunks, part after part; each batch is placed when it is there."""
        from woodfrog._native import transfer

        cuts = self.cuts(chunk_bytes)
        ends = list(accumulate(len(cut) for cut in cuts))

        def one_device(part: DevicePart, mine: Progress) -> None:
            (ring,) = rings[part.number].extents
            first, end = (ends[part.number - 1] if part.number else 0), ends[part.number]
            expected = digests[first * DIGEST_BYTES : end * DIGEST_BYTES]
            in_place = self._devices.by_uuid(self._uuids[part.device]).hashes == "gpu"
            for batch, (begins, stops) in enumerate(arriving.batches):
                low, high = max(begins, first), min(stops, end)
                if low >= high:
                    continue
                arriving.wait(batch, mine)
                ranges = cuts[part.number].ranges(low - first, high - first)
                transfer.refill_from_packs(
                    [(self._memories[part.indices[piece]], offset, size) for piece, offset, size in ranges],
                    digests[low * DIGEST_BYTES : high * DIGEST_BYTES],
                    arriving.locations[low * LOCATION_BYTES : high * LOCATION_BYTES],
                    arriving.packs,
                    arenas.arena(ring.node),
                    ring.offset,
                    ring.size,
                    chunk_bytes=chunk_bytes,
                    check=not in_place,
                    threads=copy_threads(),
                    progress=mine,
                )
            if in_place:
                require_digests(expected, transfer.hash_device(self.pieces(part), chunk_bytes=chunk_bytes))

        self.each_device(one_device, progress)

    # ── shared ──────────────────────────────────────────────────────────────────────────────────────────────────

    def new_progress(self, *, whole: bool = False) -> JointProgress:
        """One Progress for each device, for the next copy, or (`whole`) for several that make up all of its data."""
        from woodfrog._native import transfer

        return JointProgress([transfer.Progress(part.size_bytes if whole else 0) for part in self.parts])

    def pieces(self, part: DevicePart) -> list[tuple[Memory, int, int]]:
        """All memory of a part, as the native calls take it."""
        return [(self._memories[index], 0, self.handles[index].size) for index in part.indices]

    def each_device(self, work: Callable[[DevicePart, Progress], Any], progress: JointProgress) -> list[Any]:
        """`work` for each device at once; when one fails the others are cancelled, joined, and its failure raised."""
        if len(self.parts) == 1:
            return [work(self.parts[0], progress.parts[0])]
        results: list[Any] = [None] * len(self.parts)
        failures: list[Exception] = []

        def run(number: int) -> None:
            try:
                results[number] = work(self.parts[number], progress.parts[number])
            except Exception as failure:  # noqa: BLE001 - handed to the caller below
                failures.append(failure)
                progress.cancel()

        threads = [
            threading.Thread(target=run, args=(number,), name=f"device-{number}", daemon=True)
            for number in range(len(self.parts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results


def drain_pieces(
    pieces: Sequence[tuple[Memory, int, int]],
    positions: Sequence[int],
    arenas: Arenas,
    space: Space,
    first_slot: int,
    chunk_bytes: int,
    progress: Progress,
    *,
    background: bool = False,
    most_bytes_per_s: int = 0,
) -> None:
    """HBM → arena: these chunks (ascending, counted through the pieces) into the slots of `space` from `first_slot` on.
    `background`: so that the copies of others go on beside it; `most_bytes_per_s` of the GPU, 0: no bound."""
    from woodfrog._native import transfer

    done = 0
    runs = space.slot_runs(first_slot, len(positions), chunk_bytes)
    for node, group in groupby(runs, key=lambda run: run[0]):
        ranges = [(offset, count * chunk_bytes) for _, offset, count in group]
        count = sum(size for _, size in ranges) // chunk_bytes
        transfer.drain_chunks(
            pieces,
            packed(positions[done : done + count]),
            arenas.arena(node),
            ranges,
            chunk_bytes=chunk_bytes,
            background=background,
            most_bytes_per_s=most_bytes_per_s,
            progress=progress,
        )
        done += count


def require_digests(expected: bytes, found: bytes) -> None:
    """BadImageError unless the chunks in GPU memory are the image's."""
    if expected == found:
        return
    starts = range(0, len(expected), DIGEST_BYTES)
    wrong = [at for at in starts if expected[at : at + DIGEST_BYTES] != found[at : at + DIGEST_BYTES]]
    raise BadImageError(
        f"{len(wrong)} of {len(starts)} chunks in GPU memory are not what the image holds, "
        f"the first is chunk {wrong[0] // DIGEST_BYTES}",
        advice="`woodfrog verify` the image; if it is whole, this machine's memory or bus is at fault",
    )


def split_positions(positions: array[int], cuts: Sequence[Cut]) -> list[array[int]]:
    """Ascending positions through all parts as ascending positions within each part."""
    split = []
    begin = at = 0
    for cut in cuts:
        end = bisect_left(positions, begin + len(cut), at)
        mine = positions[at:end]
        split.append(mine if begin == 0 else array("I", [position - begin for position in mine]))
        at = end
        begin += len(cut)
    return split


def _node_here(node: int) -> int:
    """The NUMA node for host memory that was on `node` of perhaps another machine; -1 stays."""
    return node if node < 0 or Path(f"/sys/devices/system/node/node{node}").exists() else 0


def copy_threads() -> int:
    """Threads that read for one device: the target waits for them, and CRIU and the driver have work beside."""
    return max(1, min(16, (os.cpu_count() or 2) - 2))


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor of the list."""
    for fd in fds:
        os.close(fd)
