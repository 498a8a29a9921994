"""`standby`: a process restored from an image up to the point where only its memory is missing, and kept waiting there.

It is a restore that ends as a warm suspended target: CRIU and the driver are done, the context is on the GPU, the gate
is closed. Its data waits in the host arena, or in GPU memory of which the keeper has the descriptors. Taking it
(operations.take) is what `resume` does, or less. Must never count as one of the pool before the keeper has it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from woodfrog.errors import RefusedError, TargetState, WoodfrogError
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.operations import room
from woodfrog.operations.context import Arenas, Context
from woodfrog.operations.data import LOCATION_BYTES, DevicePart, GpuData, JointProgress, copy_threads
from woodfrog.operations.notes import HOLD_HOST, HOLD_MAPPED, WARM, ExtentNote, Record, suspend_key
from woodfrog.operations.phases import Emit, Phase, Step
from woodfrog.operations.promote import MAPPED
from woodfrog.operations.restore import Restore
from woodfrog.operations.restore_plan import RestoreRequest
from woodfrog.operations.space import ALIGNMENT_BYTES, Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress
    from woodfrog.image.manifest import Manifest
    from woodfrog.store.arriving import Arriving


class Standby(Restore):
    """One process for the pool; use once. `hold` says where its data is to wait."""

    _operation = "standby"
    _waits = True

    def __init__(self, context: Context, request: RestoreRequest, hold: str, emit: Emit | None = None) -> None:
        if hold == HOLD_MAPPED:
            request = replace(request, mode=MAPPED)
        super().__init__(context, request, emit)
        self._hold = hold
        self._data_on_gpu = hold != HOLD_HOST
        self._kept: Record | None = None

    def _steps(self) -> list[Step]:
        limits = self._limits
        return [
            *self._coming_steps(limits.long_s),  # it may be host memory that is taken and cleared
            Phase("connect", self._connect, limit_s=limits.short_s),
            Phase("commit", self._commit, self._uncommit, limit_s=limits.short_s, commits=True),
        ]

    def _survey(self) -> None:
        super()._survey()
        assert self._notes is not None
        if not self._notes.managed:
            raise RefusedError(
                f"{self._opened.reference} was written the driver's way: its data is part of what the driver restores, "
                "and nothing can be kept waiting apart",
                advice="checkpoint the program under `woodfrog run`",
            )
        self._notes.operation = self._operation
        self._notes.level, self._notes.hold = WARM, self._hold

    def _require_room(self, manifest: Manifest) -> None:
        super()._require_room(manifest)
        if not self._data_on_gpu and self._data is not None:
            to_populate = max(0, self._data.size_bytes - self._context.arenas.prepared_bytes)
            room.require_host(manifest.cpu_bytes + to_populate, "the standby process", manifest.gpu_pid)

    def _take_spaces(self, data: GpuData, user: int, chunk_bytes: int) -> list[Space]:
        if self._data_on_gpu:
            return super()._take_spaces(data, user, chunk_bytes)
        spaces: list[Space] = []
        try:
            for part in data.parts:
                node = self._context.devices.node_of(data.uuid_of(part))
                # A chunk larger than an extent's alignment could lie across the ends of two.
                one_piece = chunk_bytes > ALIGNMENT_BYTES
                extents = self._context.arenas.allocate(part.size_bytes, node=node, contiguous=one_piece)
                spaces.append(Space(self._context.arenas, extents, user))
        except BaseException:
            for space in spaces:
                space.free()
            raise
        return spaces

    def _allocate(self) -> None:
        if self._data_on_gpu:
            super()._allocate()
            return
        for space in self._rings:
            self._context.arenas.prepare(space.extents, space.user)

    def _fill(self, data: GpuData, arriving: Arriving, progress: JointProgress) -> None:
        if self._data_on_gpu:
            super()._fill(data, arriving, progress)
            return
        manifest = self._opened.manifest
        fill_arena(data, self._context.arenas, self._rings, manifest.digests, arriving, manifest.chunk_bytes, progress)

    def _connect(self) -> None:
        """The agents are there, and stay: whoever takes the process shall not wait for that."""
        for member in self._target.members:
            state = member.link().state
            if state != "released":
                raise WoodfrogError(
                    f"the restored process {member.pid} is {state} where it should wait for its memory",
                    advice="restore the image the ordinary way; see daemon.log in the runtime directory",
                    pid=member.pid,
                )
        if self._on_host:
            self._require_agents()

    def _commit(self) -> None:
        assert self._data is not None
        target, arenas = self._target, self._context.arenas
        notes = target.notes
        notes.created_unix_s = time.time()
        if self._data_on_gpu:
            target.fds = self._data.export_all()
            fds = target.fds
        else:
            notes.extents = [
                ExtentNote(part.device, extent.node, extent.offset, extent.size)
                for part, space in zip(self._data.parts, self._rings, strict=True)
                for extent in space.extents
            ]
            fds = [arenas.arena(node).fd for node in sorted({extent.node for extent in notes.extents})]
        self._kept = Record(self._context.keeper, suspend_key(notes.pid, notes.start_ticks))
        self._kept.keep(notes, fds)
        if not self._data_on_gpu:
            self._rings = []  # they belong to the waiting process now
        self._context.suspended[(notes.pid, notes.start_ticks)] = notes

    def _uncommit(self) -> None:
        """The keeper may have a part of it."""
        if self._kept is not None:
            self._kept.drop()

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        failure = super()._settle(failure)
        if self.runner.committed:
            failure.target_state = TargetState.STANDBY
        return failure

    def _result(self) -> dict[str, Any]:
        return {**super()._result(), "state": TargetState.STANDBY, "hold": self._hold}


def fill_arena(
    data: GpuData,
    arenas: Arenas,
    spaces: list[Space],
    digests: bytes,
    arriving: Arriving,
    chunk_bytes: int,
    progress: JointProgress,
) -> None:
    """Packs → arena: space k receives the memory of part k, handles back to back, each chunk compared with its digest.
    BadImageError, IntegrityError. `digests` and `arriving` are of all parts' chunks, part after part."""
    from woodfrog._native import transfer

    cuts = data.cuts(chunk_bytes)
    ends = list(accumulate(len(cut) for cut in cuts))

    def one_device(part: DevicePart, mine: Progress) -> None:
        first, end = (ends[part.number - 1] if part.number else 0), ends[part.number]
        begins = list(accumulate(part.sizes, initial=0))  # of the handles, in the space
        for batch, (batch_begin, batch_end) in enumerate(arriving.batches):
            low, high = max(batch_begin, first), min(batch_end, end)
            if low >= high:
                continue
            arriving.wait(batch, mine)
            places = [
                place
                for piece, offset, size in cuts[part.number].ranges(low - first, high - first)
                for place in spaces[part.number].pieces(begins[piece] + offset, size)
            ]
            for node, group in groupby(places, key=lambda place: place[0]):
                ranges = [(offset, size) for _, offset, size in group]
                count = sum(-(-size // chunk_bytes) for _, size in ranges)
                transfer.refill_arena_from_packs(
                    arenas.arena(node),
                    ranges,
                    digests[low * DIGEST_BYTES : (low + count) * DIGEST_BYTES],
                    arriving.locations[low * LOCATION_BYTES : (low + count) * LOCATION_BYTES],
                    arriving.packs,
                    chunk_bytes=chunk_bytes,
                    threads=copy_threads(),
                    progress=mine,
                )
                low += count

    data.each_device(one_device, progress)
