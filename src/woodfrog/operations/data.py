"""The GPU data of one target in the daemon's hands: imported or created memory, copies, files.

Devices work side by side, each on a thread of its own; the bytes move in woodfrog._native.transfer and none of them
ever passes through a Python object. Memory that is imported or created here must be released here (`release`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from woodfrog.image.manifest import DEFAULT_CHUNK_BYTES, DIGEST_BYTES
from woodfrog.operations.context import Arenas, Devices
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.space import Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device, Memory, Progress

# Bytes of one copy between HBM and the arena: large enough for the bus, small enough to be cancelled at once.
COPY_BYTES = 64 << 20
CHUNK_BYTES = DEFAULT_CHUNK_BYTES  # of digests; divides the granularity of device memory


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
class DeviceFile:
    """The part of a target's handles that lies on one device, in the order in which its data file holds them."""

    file: int  # number of this file among the image's data files
    device: int  # the target's ordinal
    device_index: int  # of the device among the image's devices
    indices: tuple[int, ...]  # into the handles
    offsets: tuple[int, ...]  # in the data file
    size_bytes: int

    @property
    def name(self) -> str:
        return f"gpu-{self.device_index}.data"


def plan_files(handles: Sequence[HandleNote], ordinals: Sequence[int]) -> list[DeviceFile]:
    """One data file for each device that has handles, handles in their given order. `ordinals`: the image's devices."""
    index_of = {ordinal: index for index, ordinal in enumerate(sorted(ordinals))}
    files = []
    for number, device in enumerate(sorted({handle.device for handle in handles})):
        indices = tuple(index for index, handle in enumerate(handles) if handle.device == device)
        offsets, size = [], 0
        for index in indices:
            offsets.append(size)
            size += handles[index].size
        files.append(DeviceFile(number, device, index_of[device], indices, tuple(offsets), size))
    return files


class GpuData:
    """The memories behind a target's handles. `uuids` are the daemon's devices by the target's ordinals."""

    def __init__(self, devices: Devices, handles: Sequence[HandleNote], uuids: dict[int, str]) -> None:
        self.handles = list(handles)
        self.files = plan_files(handles, list(uuids))
        self._devices = devices
        self._uuids = uuids
        self._memories: list[Memory] = []

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def import_all(self, fds: Sequence[int]) -> None:
        """Map what the target exported; the caller keeps the descriptors."""
        self._fill(
            lambda device, indices: device.import_memories(
                [fds[index] for index in indices], [self.handles[index].size for index in indices]
            )
        )

    def create_all(self) -> None:
        """Take new memory of the same shape on the devices."""
        self._fill(lambda device, indices: device.create_memories([self.handles[index].size for index in indices]))

    def _fill(self, make: Callable[[Device, Sequence[int]], list[Memory]]) -> None:
        """All memories of a device in one call, which is much cheaper than one each. All or none."""
        made: dict[int, Memory] = {}
        try:
            for file in self.files:
                device = self._devices.by_uuid(self._uuids[file.device])
                made.update(zip(file.indices, make(device, file.indices), strict=True))
        except BaseException:
            for memory in made.values():
                memory.release()
            raise
        self._memories = [made[index] for index in range(len(self.handles))]

    def export_all(self) -> list[int]:
        """A descriptor for each created memory, owned by the caller; on failure none is left open."""
        fds: list[int] = []
        try:
            fds.extend(memory.export_fd() for memory in self._memories)
        except BaseException:
            close_all(fds)
            raise
        return fds

    def release(self) -> None:
        """Unmap everything; the memory itself lives on while somebody holds a descriptor of it."""
        memories, self._memories = self._memories, []
        for memory in memories:
            memory.release()

    def drain(self, arenas: Arenas, spaces: Sequence[Space], progress: JointProgress) -> None:
        """HBM → arena; space k receives what data file k would hold, in the same order."""
        from woodfrog._native import transfer

        self._copy(transfer.drain, arenas, spaces, progress)

    def refill(self, arenas: Arenas, spaces: Sequence[Space], progress: JointProgress) -> None:
        """Arena → HBM."""
        from woodfrog._native import transfer

        self._copy(transfer.refill, arenas, spaces, progress)

    def _copy(
        self, copy: Callable[..., None], arenas: Arenas, spaces: Sequence[Space], progress: JointProgress
    ) -> None:
        def one_device(file: DeviceFile, mine: Progress) -> None:
            rows: dict[int, list[tuple[Memory, int, int, int]]] = {}
            for index, offset in zip(file.indices, file.offsets, strict=True):
                done = 0
                for node, arena_offset, size in spaces[file.file].pieces(offset, self.handles[index].size):
                    rows.setdefault(node, []).append((self._memories[index], done, arena_offset, size))
                    done += size
            for node, extents in rows.items():
                copy(extents, arenas.arena(node), chunk_bytes=COPY_BYTES, progress=mine)

        self._each_device(one_device, progress)

    def write(
        self, arenas: Arenas, spaces: Sequence[Space], fds: Sequence[int], progress: JointProgress
    ) -> list[bytes]:
        """Arena → data files; the digests of each file's chunks."""
        from woodfrog._native import transfer

        def one_device(file: DeviceFile, mine: Progress) -> bytes:
            digests = []
            position = 0
            # Extents are whole huge pages, so no chunk lies across two of them.
            pieces = spaces[file.file].pieces(0, file.size_bytes)
            for node, group in groupby(pieces, key=lambda piece: piece[0]):
                ranges = [(offset, size) for _, offset, size in group]
                digests.append(
                    transfer.write_arena(
                        arenas.arena(node),
                        ranges,
                        fds[file.file],
                        position,
                        chunk_bytes=CHUNK_BYTES,
                        threads=copy_threads(),
                        progress=mine,
                    )
                )
                position += sum(size for _, size in ranges)
            return b"".join(digests)

        return self._each_device(one_device, progress)

    def read(
        self,
        arenas: Arenas,
        rings: Sequence[Space],
        fds: Sequence[int],
        digests: Sequence[bytes],
        progress: JointProgress,
    ) -> None:
        """Data files → HBM through ring k for file k, each chunk checked against its digest on the way."""
        from woodfrog._native import transfer

        def one_device(file: DeviceFile, mine: Progress) -> None:
            (part,) = rings[file.file].extents
            transfer.refill_from_file(
                self._pieces(file),
                fds[file.file],
                0,
                arenas.arena(part.node),
                part.offset,
                part.size,
                chunk_bytes=CHUNK_BYTES,
                digests=digests[file.file],
                threads=copy_threads(),
                progress=mine,
            )

        self._each_device(one_device, progress)

    def stream(
        self, arenas: Arenas, rings: Sequence[Space], fds: Sequence[int], progress: JointProgress
    ) -> list[bytes]:
        """HBM → data files through ring k for file k; the digests of each file's chunks."""
        from woodfrog._native import transfer

        def one_device(file: DeviceFile, mine: Progress) -> bytes:
            (part,) = rings[file.file].extents
            return transfer.drain_to_file(
                self._pieces(file),
                fds[file.file],
                0,
                arenas.arena(part.node),
                part.offset,
                part.size,
                chunk_bytes=CHUNK_BYTES,
                threads=copy_threads(),
                progress=mine,
            )

        return self._each_device(one_device, progress)

    def digests(self, arenas: Arenas, rings: Sequence[Space], progress: JointProgress) -> list[bytes]:
        """What lies in HBM now, hashed: the digests of each file's chunks."""
        from woodfrog._native import transfer

        def one_device(file: DeviceFile, mine: Progress) -> bytes:
            (part,) = rings[file.file].extents
            return transfer.hash_memory(
                self._pieces(file),
                arenas.arena(part.node),
                part.offset,
                part.size,
                chunk_bytes=CHUNK_BYTES,
                threads=copy_threads(),
                progress=mine,
            )

        return self._each_device(one_device, progress)

    def new_progress(self) -> JointProgress:
        """One Progress for each device, for the next copy."""
        from woodfrog._native import transfer

        return JointProgress([transfer.Progress() for _ in self.files])

    def _pieces(self, file: DeviceFile) -> list[tuple[Memory, int, int]]:
        return [(self._memories[index], 0, self.handles[index].size) for index in file.indices]

    def _each_device(self, work: Callable[[DeviceFile, Progress], Any], progress: JointProgress) -> list[Any]:
        """`work` for each device at once; when one fails the others are cancelled, joined, and its failure raised."""
        if len(self.files) == 1:
            return [work(self.files[0], progress.parts[0])]
        results: list[Any] = [None] * len(self.files)
        failures: list[Exception] = []

        def run(number: int) -> None:
            try:
                results[number] = work(self.files[number], progress.parts[number])
            except Exception as failure:  # noqa: BLE001 - handed to the caller below
                failures.append(failure)
                progress.cancel()

        threads = [
            threading.Thread(target=run, args=(number,), name=f"device-{number}", daemon=True)
            for number in range(len(self.files))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results


def copy_threads() -> int:
    """Threads that hash and write for one device: half of the processors, the target's own work goes on beside."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def chunk_digests(digests: bytes) -> int:
    """The number of chunks that these digests are of."""
    return len(digests) // DIGEST_BYTES


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor of the list."""
    for fd in fds:
        os.close(fd)
