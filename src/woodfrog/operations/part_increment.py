"""What is new in a target's memory on one device, on its way: captured where it lies, drained, stored.

Chunks that have to move are taken in the order of the memory. Either a snapshot was made first, a copy of all chunks
within the GPU's memory, whose digests are then the image's. Or the first `staged` of them are copied within the GPU's
memory, the others drain to the arena at once; later the copies drain too. What the arena cannot hold goes on to the
store in batches. Each chunk is compared with its digest: copies of some chunks in the GPU's memory before they drain,
everything on its way into the store. Used by one thread at a time.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from woodfrog.errors import NoSpaceError, WoodfrogError
from woodfrog.image import chunks
from woodfrog.image.chunks import Cut
from woodfrog.image.writer import ImageWriter
from woodfrog.operations import concurrent, room
from woodfrog.operations.background import background_rate
from woodfrog.operations.background import in_background as gently
from woodfrog.operations.concurrent import Allowance, DeviceWay
from woodfrog.operations.context import Arenas, Context
from woodfrog.operations.copy_on_write import RING_BYTES, CopyOnWrite, GuardedPart
from woodfrog.operations.data import DevicePart, GpuData, drain_pieces
from woodfrog.operations.kept import Kept
from woodfrog.operations.phases import CUDA_ERROR_OUT_OF_MEMORY
from woodfrog.operations.precopy import Precopy
from woodfrog.operations.rings import take_rings
from woodfrog.operations.space import Space
from woodfrog.operations.staging import Staging, first_positions

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device, Progress
    from woodfrog.operations.clean import CleanPart

log = logging.getLogger(__name__)

# Of a drain beside a target that stands still: its return waits for none of it, but while one is under way the driver
# takes three times as long to map (5 ms for a whole piece of 256 MiB at the bus' 55 GB/s).
BRIEF_BYTES = 32 << 20

# What arrives at (first, count, first slot of the arena, progress).
Drain = Callable[[int, int, int, "Progress"], None]


class DiffersError(WoodfrogError):
    """A chunk has another digest than it had in the GPU's memory."""


class PartIncrement:
    """One device's share of an Increment. `spaces` are the caller's to free; this may take more into its own."""

    def __init__(
        self,
        context: Context,
        data: GpuData,
        part: DevicePart,
        cut: Cut,
        writer: ImageWriter,
        spaces: dict[int, Space],
        user: int,
        *,
        everything: bool,
        in_background: Callable[[], bool],
        turn: Callable[[], object],
        giving_way: Callable[[], None],
        cow: CopyOnWrite | None,
    ) -> None:
        self.part = part
        self.cut = cut
        self.digests = b""
        self.new: array[int] = array("I")  # positions of chunks that the store lacks
        self.moved: array[int] = array("I")  # of chunks that cross the bus
        self.streamed = False
        self._context = context
        self._data = data
        self._writer = writer
        self._spaces = spaces
        self._user = user
        self._everything = everything
        self._in_background = in_background
        self._turn = turn
        self._giving_way = giving_way
        self._cow = cow  # where this way may be taken
        self._guarded: GuardedPart | None = None  # and it was
        self._staging: Staging | None = None
        self._staged = 0
        self._slots: Sequence[int] = range(0)  # of the staging: where the first `staged` of `moved` are
        self._snapshot_bytes = self._free_bytes = self._allowed_bytes = 0
        self._way = DeviceWay(part.device, 0, 0, 0, 0)
        self._streams = False  # of what is drained next: it goes to the store in batches
        self._kept: list[Kept] = []
        self._precopied: Kept | None = None  # in the arena too, in memory that is not of `spaces`

    @property
    def way(self) -> DeviceWay:
        """What was done."""
        if self._guarded is not None:
            return replace(self._way, early_bytes=self._guarded.early_bytes)
        return self._way

    def found(self, digests: bytes, new: array[int], precopy: Precopy | None) -> None:
        """What the hash found; what rounds before have copied already does not move again."""
        self.digests, self.new = digests, new
        self.moved = array("I", range(len(self.cut))) if self._everything else new
        if precopy is not None:
            self._precopied, self.moved = precopy.take(self.cut, digests, new)
        if self._snapshot_bytes and self._staging is not None:
            self._staged, self._slots = len(self.moved), self.moved
            self._staging.keep(self._slots)

    # ── a snapshot of everything ────────────────────────────────────────────────────────────────────────────────

    def plan_snapshot(self, allowance: Allowance) -> bool:
        """Take device memory for a copy of every chunk; False when there is no room."""
        device = self._data.device_of(self.part)
        self._free_bytes, self._allowed_bytes = allowance.of(self.part.device, device)
        if len(self.cut) * self._chunk_bytes > self._allowed_bytes:
            return False
        try:
            self._staging = Staging(device, len(self.cut), self._chunk_bytes)
        except RuntimeError as failure:
            if getattr(failure, "code", None) != CUDA_ERROR_OUT_OF_MEMORY:
                raise
            log.info("no device memory for a snapshot after all: %s; what is new is looked for first", failure)
            return False
        return True

    def snapshot(self, moving: Progress) -> None:
        """Every chunk to the slot of its position."""
        assert self._staging is not None
        self._data.capture_chunks(self.part, first_positions(len(self.cut)), self._staging, moving)
        self._snapshot_bytes = self.cut.size_bytes

    def hash_snapshot(self, clean: CleanPart | None, moving: Progress) -> bytes:
        """The digests of all chunks; of `clean` parts only what their runs name is read."""
        from woodfrog._native import transfer

        assert self._staging is not None
        short = self._short(range(len(self.cut)))
        if clean is None:
            return transfer.hash_device(self._staging.hashed(short), chunk_bytes=self._chunk_bytes, progress=moving)
        runs = [(run.position, run.position + run.end - run.first) for run in clean.runs]
        pieces = self._staging.hashed(short, runs)
        return clean.fill(
            transfer.hash_device(pieces, chunk_bytes=self._chunk_bytes, progress=moving) if pieces else b""
        )

    def _short(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Index and size of those of these ascending positions whose chunks are short."""
        return [(at, self.cut.sizes[positions[at]]) for at in self.cut.short_among(positions)]

    # ── while the target waits ──────────────────────────────────────────────────────────────────────────────────

    def plan_capture(self, way: str, allowance: Allowance | None) -> tuple[int, int]:
        """Take device memory for copies and room in the arena for the rest. (bytes to move, bytes to store) by
        `capture`."""
        moved_bytes = self.cut.bytes_at(self.moved)
        if self._snapshot_bytes:
            self._way = DeviceWay(
                self.part.device, moved_bytes, 0, self._free_bytes, self._allowed_bytes, self._snapshot_bytes
            )
            return 0, 0
        free = allowed = 0
        if allowance is not None and self.moved:
            device = self._data.device_of(self.part)
            free, allowed = allowance.of(self.part.device, device)
            if self._plan_guard(way, allowed, device):
                self._way = DeviceWay(self.part.device, 0, 0, free, allowed, cow_bytes=moved_bytes)
                return 0, 0
            self._take_staging(way, allowed, device)
        copied_bytes = self.cut.bytes_at(self.moved[: self._staged])
        self._way = DeviceWay(self.part.device, copied_bytes, moved_bytes - copied_bytes, free, allowed)
        direct = len(self.moved) - self._staged
        self._streams = direct > 0 and not self._fits(direct)
        self.streamed |= self._streams
        return moved_bytes, moved_bytes - copied_bytes if self._streams else 0

    def capture(self, moving: Progress, writing: Progress) -> None:
        """What is new out of the target's memory: from now on that may change."""
        if self._snapshot_bytes or self._guarded is not None:
            return
        if self._staging is not None:
            self._data.capture_chunks(self.part, self.moved[: self._staged], self._staging, moving)

        def drain(first: int, count: int, slot: int, progress: Progress) -> None:
            positions = self.moved[first : first + count]
            self._data.drain_chunks(self.part, positions, self._arenas, self._space, slot, self._chunk_bytes, progress)

        direct = len(self.moved) - self._staged
        if self._streams:
            self._stream(drain, self._staged, direct, moving, writing)
        elif direct:
            drain(self._staged, direct, 0, moving)
            self._keep(self._staged, direct, 0)

    def _plan_guard(self, way: str, allowed_bytes: int, device: Device) -> bool:
        """Whether all of it is captured while the target runs; then memory for that is taken."""
        wanted = len(self.moved)
        chunk_bytes = self._chunk_bytes
        if self._cow is None or (way == concurrent.AUTO and wanted <= allowed_bytes // chunk_bytes):
            return False
        if not self._fits(wanted):
            if way == concurrent.COW:
                raise concurrent.no_arena_room(wanted * chunk_bytes, device.ordinal)
            return False
        slots = min(wanted, min(allowed_bytes, RING_BYTES) // chunk_bytes)
        ring = None
        try:
            ring = Staging(device, slots, chunk_bytes) if slots else None
        except RuntimeError as failure:
            if getattr(failure, "code", None) != CUDA_ERROR_OUT_OF_MEMORY:
                raise
            log.info("no device memory for a ring of copies after all: %s", failure)
        self._guarded = self._cow.add(self.part, self.cut, self.moved, self._arenas, self._space, ring)
        return True

    def _take_staging(self, way: str, allowed_bytes: int, device: Device) -> None:
        chunk_bytes = self._chunk_bytes
        staged = concurrent.staged_chunks(way, len(self.moved), chunk_bytes, allowed_bytes, device)
        if not staged:
            return
        try:
            self._staging = Staging(device, staged, chunk_bytes)
        except RuntimeError as failure:
            if getattr(failure, "code", None) != CUDA_ERROR_OUT_OF_MEMORY:
                raise
            if way == concurrent.COPY:
                raise concurrent.no_room(staged * chunk_bytes, 0, device) from failure
            log.info("no device memory for copies after all: %s; the target waits for the drain", failure)
            return
        self._staged, self._slots = staged, range(staged)

    def _check_copies(self, staging: Staging) -> None:
        from woodfrog._native import transfer

        staged = self.moved[: self._staged]
        found = transfer.hash_device(staging.hashed(self._short(staged)), chunk_bytes=self._chunk_bytes)
        if found != chunks.select_digests(self.digests, staged):
            raise WoodfrogError(
                "a copy in the GPU's memory is not what was hashed there",
                advice="this GPU's memory is at fault; the image was not written",
                device=self.part.device,
            )

    # ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────

    def plan_drain(self) -> tuple[int, int]:
        """Room for the copies. (bytes to move, bytes to store) by `drain`."""
        if self._guarded is not None:
            return self._way.cow_bytes, 0
        if not self._staged:
            return 0, 0
        self._streams = not self._fits(len(self.moved))
        self.streamed |= self._streams
        copied_bytes = self._way.copied_bytes
        kept_bytes = sum(kept.size_bytes for kept in self._kept)
        return copied_bytes, copied_bytes + kept_bytes if self._streams else 0

    def drain(self, moving: Progress, writing: Progress) -> None:
        """The copies to the arena, or through it to the store; their memory is given back as they leave it."""
        if self._guarded is not None:
            self._guarded.drain(moving)
            self._keep(0, len(self.moved), 0)
            return
        staging = self._staging
        if staging is None or not self._staged:
            self.release()
            return
        if not self._snapshot_bytes:  # what is hashed of that is the image's
            self._check_copies(staging)

        def drain(first: int, count: int, slot: int, progress: Progress) -> None:
            self._turn()
            end = first + count
            running = self._in_background()
            pieces, numbers = staging.holding(self._slots[first:end])
            drain_pieces(
                pieces,
                numbers,
                self._arenas,
                self._space,
                slot,
                self._chunk_bytes,
                progress,
                background=running,
                most_bytes_per_s=background_rate() if running else 0,
            )
            staging.release_below(self._slots[end] if end < self._staged else staging.slots)

        if self._streams:
            gently(lambda: self.store(writing), self._giving_way)  # the arena is one ring from now on
            self._stream(drain, 0, self._staged, moving, writing, self._giving_way)
        else:
            behind = len(self.moved) - self._staged  # what is in the arena already
            first = 0
            while first < self._staged:
                count = staging.slots_per_piece
                if not self._in_background():
                    count = min(count, max(1, BRIEF_BYTES // self._chunk_bytes))
                drain(first, min(count, self._staged - first), behind + first, moving)
                first += count
            self._keep(0, self._staged, behind)
        self.release()

    def store(self, writing: Progress) -> None:
        """Arena → store: what `capture` and `drain` left in the arena."""
        kept, self._kept = self._kept, []
        if self._precopied is not None:
            kept.append(self._precopied)
            self._precopied = None
        for one in kept:
            try:
                self._store_batch(one, writing)
            except DiffersError as failure:
                if self._guarded is None or self._cow is None:
                    raise
                raise self._cow.missed() from failure

    def release(self) -> None:
        """Give the copies' memory back. Nothing happens a second time."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    # ── room ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fits(self, count: int) -> bool:
        """Room for `count` slots: the space that was taken for it, extended if need be; else a ring."""
        chunk_bytes = self._chunk_bytes
        arenas = self._arenas
        space = self._spaces.get(self.part.device)
        have = space.slots(chunk_bytes) if space is not None else 0
        if have >= count:
            return True
        if room.arena_can_take(arenas, (count - have) * chunk_bytes):
            try:
                if space is None:
                    space = self._spaces[self.part.device] = Space(arenas, [], self._user)
                space.extend_slots(count, chunk_bytes)
            except NoSpaceError:
                log.info("the arena cannot take %d more chunks: they go to the store in batches", count - have)
            else:
                return True
        if have < 2 and not self._kept:
            if space is not None:
                space.free()
            sizes = {self.part.device: count * chunk_bytes}
            self._spaces.update(take_rings(arenas, sizes, self._user, chunk_bytes))
        return self._space.slots(chunk_bytes) >= count

    @property
    def _arenas(self) -> Arenas:
        return self._context.arenas

    @property
    def _space(self) -> Space:
        return self._spaces[self.part.device]

    @property
    def _chunk_bytes(self) -> int:
        return self._writer.chunk_bytes

    # ── one batch ───────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(
        self,
        drain: Drain,
        first: int,
        count: int,
        draining: Progress,
        writing: Progress,
        giving_way: Callable[[], None] = lambda: None,
    ) -> None:
        """In batches of half the ring: one is drained while the one before is written, by a thread that calls
        `giving_way` before each."""

        def store(kept: Kept) -> None:
            giving_way()
            self._store_batch(kept, writing)

        half = max(1, self._space.slots(self._chunk_bytes) // 2)
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            pending: Future[None] | None = None
            try:
                for number, begin in enumerate(range(first, first + count, half)):
                    here = min(half, first + count - begin)
                    first_slot = number % 2 * half
                    drain(begin, here, first_slot, draining)
                    if pending is not None:
                        pending.result()
                    pending = pool.submit(store, self._lying(begin, here, first_slot))
                if pending is not None:
                    pending.result()
            except BaseException:
                writing.cancel()
                raise

    def _keep(self, first: int, count: int, first_slot: int) -> None:
        self._kept.append(self._lying(first, count, first_slot))

    def _lying(self, first: int, count: int, first_slot: int) -> Kept:
        """Chunks first … first+count-1 of `moved`, in the slots from `first_slot` on."""
        return Kept.in_slots(self.moved[first : first + count], self.cut, self._space, first_slot)

    def _store_batch(self, kept: Kept, progress: Progress) -> None:
        """To the store as far as it lacks them. DiffersError if any is not what was hashed."""
        from woodfrog._native import transfer

        if self._everything:
            # Every byte that crossed the bus is what was hashed on the other side of it: here what is not stored (which
            # is compared when it is).
            first = bisect_left(self.new, min(kept.positions, default=0))
            end = bisect_right(self.new, max(kept.positions, default=0))
            new = set(self.new[first:end])
            self._compare(kept.select([at for at, position in enumerate(kept.positions) if position not in new]))
            kept = kept.select([at for at, position in enumerate(kept.positions) if position in new])
        digests = chunks.select_digests(self.digests, kept.positions)
        try:
            kept.store(digests, self._writer, self._arenas, progress)
        except transfer.IntegrityError as failure:
            raise DiffersError(
                f"what is in host memory is not what was hashed on the GPU: {failure}",
                advice="this machine's memory or bus is at fault; the image was not written",
            ) from failure

    def _compare(self, kept: Kept) -> None:
        """DiffersError if any is not what was hashed."""
        found = kept.hash(self._arenas, self._chunk_bytes, self._writer.threads)
        if found != chunks.select_digests(self.digests, kept.positions):
            raise DiffersError(
                "what arrived in host memory is not what was hashed on the GPU",
                advice="this machine's memory or bus is at fault; the image was not written",
            )
