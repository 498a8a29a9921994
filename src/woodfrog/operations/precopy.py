"""Rounds of hash and copy while the target runs, so that less is left to move once it is at rest.

A short pause brings descriptors of the target's memory, of all its processes at once, so that none waits for another
with its gate open; the daemon maps it and reads it, on all GPUs side by side, while the target goes on writing. What
arrives may be torn, so it counts only for what it is: its digest is taken where it lies in the arena, and once the
target is at rest a chunk with that digest need not move again. Nothing is trusted beyond that: whatever the target
writes meanwhile, it cannot make an image wrong. Copies that turn out useless were only host memory. Where the target is
to end, chunks that two rounds have seen the same are stored as well, so that it does not wait for the disk; what
changes after all is left for a prune.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Any

from woodfrog._native.transfer import ChunkIndex, Progress
from woodfrog.errors import NoSpaceError
from woodfrog.faults import fault_point
from woodfrog.image import chunks
from woodfrog.image.writer import ImageWriter
from woodfrog.operations import sharing
from woodfrog.operations.context import Context
from woodfrog.operations.data import DevicePart, GpuData, JointProgress, close_all, drain_pieces, split_positions
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.kept import Kept
from woodfrog.operations.phases import Runner
from woodfrog.operations.rings import RING_BYTES
from woodfrog.operations.room import arena_can_take
from woodfrog.operations.space import Space
from woodfrog.store import records

log = logging.getLogger(__name__)

PHASE = "precopy"
MOST_ROUNDS = 5
SMALL_BYTES = 64 << 20  # a millisecond of the bus: not worth another round
SHRINKING = 0.75  # a round that copies more than that of the one before is the last


@dataclass
class PrecopyStats:
    """What the rounds did, in bytes and seconds."""

    rounds: list[int] = field(default_factory=list)  # bytes copied in each
    pause_s: float = 0.0  # of the target, for the descriptors
    used_bytes: int = 0  # of the image: new, and not copied while the target waited
    stored_bytes: int = 0  # of the memory: stored before the target came to rest

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": list(self.rounds),
            "pause_s": self.pause_s,
            "used_bytes": self.used_bytes,
            "stored_bytes": self.stored_bytes,
        }


class ArenaIndex:
    """Where in the arenas a chunk with this digest lies. Wraps the store's index: nodes are its packs."""

    def __init__(self, chunk_bytes: int) -> None:
        self._index = ChunkIndex(chunk_bytes)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, digests: bytes, kept: Kept) -> None:
        """These chunks have these digests."""
        for node in set(kept.nodes):
            at = [number for number, here in enumerate(kept.nodes) if here == node]
            of_node = kept.select(at)
            rows = records.raw_records(chunks.select_digests(digests, at), of_node.offsets, of_node.sizes)
            self._index.add(node + 1, rows)  # a node of -1 is no node

    def missing(self, digests: bytes) -> array[int]:
        """The positions, ascending, of the first of each digest that no chunk here has."""
        return chunks.positions_of(self._index.missing(digests))

    def find(self, digests: bytes) -> tuple[list[bool], array[int], array[int]]:
        """Of which of these digests there is a chunk here, and where those lie: offsets, and nodes."""
        locations = self._index.find(digests)
        packs = records.pack_column(locations)
        here = [pack not in (records.ABSENT, records.ZERO) for pack in packs]
        offsets = array("Q", compress(records.location_offsets(locations), here))
        return here, offsets, array("i", [pack - 1 for pack in compress(packs, here)])


class Precopy:
    """The rounds of one checkpoint. Owns arena space until `release`."""

    def __init__(self, context: Context, target: FrozenTarget, writer: ImageWriter, *, store_ahead: bool) -> None:
        """`store_ahead`: the target is to end, and what seems settled is stored while it runs."""
        self._context = context
        self._target = target
        self._writer = writer
        self._store_ahead = store_ahead
        self._spaces: list[Space] = []
        self._index = ArenaIndex(writer.chunk_bytes)
        self._arrived: list[tuple[bytes, Kept]] = []  # digests and places, of what is not stored yet
        self.stats = PrecopyStats()

    def run(self, runner: Runner, timeout_s: float) -> None:
        """All rounds. The target waits at the beginning only, for `timeout_s` at most."""
        handles, fds, self.stats.pause_s = self._target.peek(timeout_s)
        try:
            handles = sharing.numbered(self._target, handles, fds)
            data = GpuData(self._context.devices, handles, self._target.notes.devices)
            data.import_all(fds)
        finally:
            close_all(fds)
        try:
            while not self._is_settled():
                self._target.check_alive()
                digests = self._hash(data, runner)
                fault_point("precopy.round.hashed")
                self._store_what_lasted(digests, runner)
                self.stats.rounds.append(self._copy(data, digests, runner))
                log.info("precopy of %s: bytes in each round: %s", self._target.notes.name, self.stats.rounds)
        finally:
            data.release()  # what the target frees from now on is free at once

    def take(self, cut: chunks.Cut, digests: bytes, new: array[int]) -> tuple[Kept | None, array[int]]:
        """Of the chunks of a device that the store lacks: those of which a copy is here, and the positions of the
        others, which have to move."""
        if not len(self._index) or not new:
            return None, new
        here, offsets, nodes = self._index.find(chunks.select_digests(digests, new))
        positions = array("I", compress(new, here))
        kept = Kept(positions, cut.sizes_at(positions), offsets, nodes)
        self.stats.used_bytes += kept.size_bytes
        return kept, array("I", compress(new, map(not_, here)))

    @property
    def last_bytes(self) -> int:
        """What the last round copied: about as much will be left."""
        return self.stats.rounds[-1] if self.stats.rounds else 0

    def release(self) -> None:
        """Give the arena space back. Nothing happens a second time."""
        spaces, self._spaces = self._spaces, []
        for space in spaces:
            space.free()

    # ── one round ───────────────────────────────────────────────────────────────────────────────────────────────

    def _is_settled(self) -> bool:
        rounds = self.stats.rounds
        if len(rounds) < (2 if self._store_ahead else 1):
            return False
        grows = len(rounds) > 1 and rounds[-1] > SHRINKING * rounds[-2]
        return len(rounds) == MOST_ROUNDS or rounds[-1] <= SMALL_BYTES or grows

    def _hash(self, data: GpuData, runner: Runner) -> list[bytes]:
        progress = data.new_progress()
        with runner.counting(PHASE, progress):
            return data.hash(self._writer.chunk_bytes, progress)

    def _copy(self, data: GpuData, digests: Sequence[bytes], runner: Runner) -> int:
        """What neither the store nor the arena has, of each chunk one, as far as there is room; how many bytes that
        were."""
        chunk_bytes, arenas = self._writer.chunk_bytes, self._context.arenas
        cuts = data.cuts(chunk_bytes)
        lacking = split_positions(self._writer.lacking_gpu(digests, cuts), cuts)
        going: list[tuple[Space, array[int]] | None] = []
        for found, missing in zip(digests, lacking, strict=True):
            again = self._index.missing(chunks.select_digests(found, missing))
            space = self._take_space(len(again), len(data.parts))
            positions = array("I", [missing[at] for at in again[: space.slots(chunk_bytes)]]) if space else array("I")
            going.append((space, positions) if space else None)
        sizes = [cut.bytes_at(one[1]) if one else 0 for cut, one in zip(cuts, going, strict=True)]
        progress = JointProgress([Progress(size_bytes) for size_bytes in sizes])

        def one_device(part: DevicePart, mine: Progress) -> tuple[bytes, Kept] | None:
            one = going[part.number]
            if one is None:
                return None
            space, positions = one
            drain_pieces(data.pieces(part), positions, arenas, space, 0, chunk_bytes, mine, background=True)
            kept = Kept.in_slots(positions, cuts[part.number], space, 0)
            return kept.hash(arenas, chunk_bytes), kept

        with runner.counting(PHASE, progress):
            made = [one for one in data.each_device(one_device, progress) if one is not None]
        for arrived, kept in made:
            self._index.add(arrived, kept)
        self._arrived += made
        return sum(kept.size_bytes for _, kept in made)

    def _take_space(self, slots: int, devices: int) -> Space | None:
        """Room for at most so many slots; None without any. Some is left, so that what remains can stream through."""
        arenas, chunk_bytes = self._context.arenas, self._writer.chunk_bytes
        left = min(RING_BYTES * devices, arenas.free_bytes // 2)
        slots = min(slots, (arenas.free_bytes - left) // chunk_bytes)
        if slots <= 0 or not arena_can_take(arenas, slots * chunk_bytes):
            return None
        space = Space(arenas, [], self._target.notes.user)
        self._spaces.append(space)
        try:
            space.extend_slots(slots, chunk_bytes)
        except NoSpaceError as failure:
            log.info("no room for a round of precopy: %s", failure.reason)
            return None
        return space

    def _store_what_lasted(self, digests: Sequence[bytes], runner: Runner) -> None:
        """Copies that are still what the memory holds, to the store: most probably the image will name them."""
        if not self._store_ahead or not self._arrived:
            return
        now = ChunkIndex(self._writer.chunk_bytes)
        now.add(0, records.made_up_records(b"".join(digests)))
        waiting, self._arrived = self._arrived, []
        progress = JointProgress([Progress()])
        with runner.counting(PHASE, progress):
            for arrived, kept in waiting:
                packs = records.pack_column(now.find(arrived))
                lasted = [number for number, pack in enumerate(packs) if pack == 0]
                # Two chunks that were torn may have become the same, or what the store has got since.
                whole = chunks.select_digests(arrived, lasted)
                lacking = chunks.positions_of(self._writer.lacking(whole))
                stored = kept.select([lasted[at] for at in lacking])
                whole = chunks.select_digests(whole, lacking)
                stored.store(whole, self._writer, self._context.arenas, progress.parts[0])
                self._writer.count_ahead(whole, stored.sizes)
                self.stats.stored_bytes += stored.size_bytes
