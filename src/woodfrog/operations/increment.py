"""What is new in a target's GPU memory, on its way to the store: hash, look up, drain, write.

Only chunks whose digest the store lacks cross the bus (with `everything` all of them do, and each is compared with its
digest in host memory). They lie in the arena one a slot until they are written; where the arena cannot hold them all
they stream through it in batches. The target waits for `hash` and `drain`. This must never write a chunk that does not
have the digest which was taken where the target left it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from woodfrog.errors import NoSpaceError, WoodfrogError
from woodfrog.image import chunks
from woodfrog.image.manifest import Amounts
from woodfrog.image.writer import ImageWriter
from woodfrog.operations import room
from woodfrog.operations.clean import Clean
from woodfrog.operations.context import Context
from woodfrog.operations.data import DevicePart, GpuData, JointProgress, split_positions
from woodfrog.operations.rings import take_rings
from woodfrog.operations.space import Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Arena, Progress

log = logging.getLogger(__name__)


class Increment:
    """One checkpoint's GPU data. Use once, in this order: hash, drain, write.

    `spaces` (by the target's device ordinal) are the caller's to free; this may take more into them."""

    def __init__(
        self,
        context: Context,
        data: GpuData,
        writer: ImageWriter,
        spaces: dict[int, Space],
        user: int,
        *,
        everything: bool,
        clean: Clean | None = None,
        check_clean: bool = False,
    ) -> None:
        self._context = context
        self._data = data
        self._writer = writer
        self._spaces = spaces
        self._user = user
        self._everything = everything
        self._cuts = data.cuts(writer.chunk_bytes)
        self._clean = clean  # what need not be hashed; with `check_clean` it is all the same, and compared
        self._check_clean = check_clean
        self._new: list[array[int]] = []  # by part: chunks that the store lacks
        self._moved: list[array[int]] = []  # by part: chunks that cross the bus, in the order of their slots
        self._digests: list[bytes] = []
        self._streamed: set[int] = set()  # parts that the arena cannot hold
        self.amounts = Amounts()

    @property
    def digests(self) -> bytes:
        """Of every chunk of every part, in an image's order."""
        return b"".join(self._digests)

    @property
    def chunk_count(self) -> int:
        return sum(len(cut) for cut in self._cuts)

    @property
    def new_chunk_count(self) -> int:
        return sum(len(new) for new in self._new)

    @property
    def streamed(self) -> bool:
        """Whether some of it went through a ring to the store while the target waited."""
        return bool(self._streamed)

    def hash(self, progress: JointProgress) -> None:
        """Digests of all memory where it lies, and which of them are new to the store."""
        clean = self._clean
        skips = clean is not None and not self._check_clean
        parts = clean.parts if clean is not None and skips else ()
        self._digests = self._data.hash(self._writer.chunk_bytes, progress, parts)
        if clean is not None and self._check_clean:
            clean.check(self._digests)
        positions, self.amounts = self._writer.survey_gpu(self._digests, self._cuts)
        self._new = split_positions(positions, self._cuts)
        self._moved = [array("I", range(len(cut))) for cut in self._cuts] if self._everything else self._new

    def drain(self) -> JointProgress:
        """Make room for what has to move; the progress to pass to `move`."""
        from woodfrog._native import transfer

        for part, moved in zip(self._data.parts, self._moved, strict=True):
            if moved and not self._fits(part, len(moved)):
                self._streamed.add(part.number)
        parts = [transfer.Progress(self._moved_bytes(part)) for part in self._data.parts]
        # Writing beside the drain is counted (and cancelled) with it.
        parts += [transfer.Progress(self._moved_bytes(part)) for part in self._data.parts if self._is_streamed(part)]
        return JointProgress(parts)

    def move(self, progress: JointProgress) -> None:
        """HBM → arena, and on to the store for what does not fit the arena."""
        streams = iter(progress.parts[len(self._data.parts) :])
        writing = {part.number: next(streams) for part in self._data.parts if self._is_streamed(part)}

        def one_device(part: DevicePart, mine: Progress) -> None:
            moved = self._moved[part.number]
            if not moved:
                return
            if part.number in writing:
                self._stream(part, moved, mine, writing[part.number])
            else:
                self._drain_batch(part, moved, 0, mine)

        self._data.each_device(one_device, progress)

    def write(self) -> JointProgress:
        """The progress to pass to `store`."""
        from woodfrog._native import transfer

        return JointProgress([transfer.Progress()])

    def store(self, progress: JointProgress) -> None:
        """Arena → store: what `move` left in the arena. The target's memory is not looked at any more."""
        (mine,) = progress.parts
        for part in self._data.parts:
            if self._moved[part.number] and not self._is_streamed(part):
                self._store_batch(part, self._moved[part.number], 0, mine)

    # ── room ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fits(self, part: DevicePart, count: int) -> bool:
        """Room for `count` slots: the space that was taken for it, extended if need be; else a ring."""
        chunk_bytes = self._writer.chunk_bytes
        arenas = self._context.arenas
        space = self._spaces.get(part.device)
        have = space.slots(chunk_bytes) if space is not None else 0
        if have >= count:
            return True
        if host_can_take(arenas.prepared_bytes, arenas.size_bytes - arenas.free_bytes, (count - have) * chunk_bytes):
            try:
                if space is None:
                    space = self._spaces[part.device] = Space(arenas, [], self._user)
                space.extend_slots(count, chunk_bytes)
            except NoSpaceError:
                log.info("the arena cannot take %d more chunks: they go to the store in batches", count - have)
            else:
                return True
        if have < 2:
            if space is not None:
                space.free()
            sizes = {part.device: count * chunk_bytes}
            self._spaces[part.device] = take_rings(arenas, sizes, self._user, chunk_bytes)[part.device]
        return self._spaces[part.device].slots(chunk_bytes) >= count

    def _is_streamed(self, part: DevicePart) -> bool:
        return part.number in self._streamed

    def _moved_bytes(self, part: DevicePart) -> int:
        cut, moved = self._cuts[part.number], self._moved[part.number]
        return cut.bytes_at(moved)

    # ── one batch ───────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, part: DevicePart, moved: Sequence[int], draining: Progress, writing: Progress) -> None:
        """In batches of half the ring: one is drained while the one before is written."""
        half = max(1, self._spaces[part.device].slots(self._writer.chunk_bytes) // 2)
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            pending: Future[None] | None = None
            try:
                for number, begin in enumerate(range(0, len(moved), half)):
                    batch = moved[begin : begin + half]
                    first_slot = number % 2 * half
                    self._drain_batch(part, batch, first_slot, draining)
                    if pending is not None:
                        pending.result()
                    pending = pool.submit(self._store_batch, part, batch, first_slot, writing)
                if pending is not None:
                    pending.result()
            except BaseException:
                writing.cancel()
                raise

    def _drain_batch(self, part: DevicePart, batch: Sequence[int], first_slot: int, progress: Progress) -> None:
        space = self._spaces[part.device]
        self._data.drain_chunks(
            part, batch, self._context.arenas, space, first_slot, self._writer.chunk_bytes, progress
        )

    def _store_batch(self, part: DevicePart, batch: Sequence[int], first_slot: int, progress: Progress) -> None:
        """Chunks that lie in the slots from `first_slot` on, to the store as far as it lacks them."""
        chunk_bytes = self._writer.chunk_bytes
        cut, digests = self._cuts[part.number], self._digests[part.number]
        runs = self._spaces[part.device].slot_runs(first_slot, len(batch), chunk_bytes)
        arenas: dict[int, Arena] = {node: self._context.arenas.arena(node) for node, _, _ in runs}
        source_of = {node: number for number, node in enumerate(arenas)}
        offsets, sources = array("Q"), array("I")
        for node, offset, count in runs:
            offsets.extend(range(offset, offset + count * chunk_bytes, chunk_bytes))
            sources.extend(array("I", [source_of[node]]) * count)
        sizes = chunks.select(cut.sizes, batch)
        used = list(arenas.values())
        if self._everything:
            self._check_batch(part, batch, offsets, sizes, [used[source] for source in sources])
            new = set(self._new[part.number])
            kept = [at for at, position in enumerate(batch) if position in new]
            batch = [batch[at] for at in kept]
            offsets, sizes, sources = (chunks.select(column, kept) for column in (offsets, sizes, sources))
        if batch:
            table = chunks.chunk_table(chunks.select_digests(digests, batch), offsets, sizes, sources)
            self._writer.write_gpu(table, used, progress)

    def _check_batch(
        self, part: DevicePart, batch: Sequence[int], offsets: array[int], sizes: array[int], arenas: Sequence[Arena]
    ) -> None:
        """Every byte that crossed the bus is what was hashed on the other side of it."""
        from woodfrog._native import transfer

        chunk_bytes = self._writer.chunk_bytes
        expected = chunks.select_digests(self._digests[part.number], batch)
        found = bytearray()
        at = 0
        while at < len(batch):
            end = at
            # Neighbouring slots of one arena, up to and including a chunk that is short.
            while (
                end < len(batch)
                and arenas[end] is arenas[at]
                and offsets[end] - offsets[at] == (end - at) * chunk_bytes
            ):
                end += 1
                if sizes[end - 1] != chunk_bytes:
                    break
            ranges = [(offsets[at], offsets[end - 1] + sizes[end - 1] - offsets[at])]
            found += transfer.hash_arena(arenas[at], ranges, chunk_bytes=chunk_bytes)
            at = end
        if found != expected:
            raise WoodfrogError(
                "what arrived in host memory is not what was hashed on the GPU",
                advice="this machine's memory or bus is at fault; the image was not written",
            )


def host_can_take(prepared_bytes: int, used_bytes: int, more_bytes: int) -> bool:
    """Whether the host has memory for so much more of the arena: what is prepared and free costs nothing."""
    return room.host_has(more_bytes - max(0, prepared_bytes - used_bytes))
