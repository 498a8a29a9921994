"""Copies of a target's chunks in device memory of the daemon: the target runs on while they drain from there.

The memory is in pieces, and each is given back to the driver as soon as its chunks have left it; nothing else can make
room for a target that runs short meanwhile. The driver clears device memory before anybody gets it, so what a target
had in it reaches nobody. Nothing here decides how much of it may be taken.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device, Memory

# Creating and mapping a piece takes 60 us on an H200 (FACTS §1: 2000 pieces in 120 ms); draining one 5 ms.
PIECE_BYTES = 256 << 20


_counted = array("I")
_counting = threading.Lock()


def first_positions(count: int) -> array[int]:
    """0 … count-1. Counting to a million takes Python tens of milliseconds, in which no target shall wait: what was
    counted once is kept, four bytes a position."""
    with _counting:
        if count > len(_counted):
            _counted.extend(range(len(_counted), count))
        return _counted[:count]


class Staging:
    """`slots` slots of `chunk_bytes` each on one device. Owned until `release`; one thread at a time."""

    def __init__(self, device: Device, slots: int, chunk_bytes: int) -> None:
        """TransferError (CUDA_ERROR_OUT_OF_MEMORY) when there is no room: then nothing is taken."""
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.slots_per_piece = max(PIECE_BYTES, chunk_bytes) // chunk_bytes
        granularity = device.granularity_bytes
        sizes = []
        for first in range(0, slots, self.slots_per_piece):
            size = min(self.slots_per_piece, slots - first) * chunk_bytes
            sizes.append(-(-size // granularity) * granularity)
        self._memories: list[Memory | None] = list(device.create_memories(sizes))

    @property
    def held_bytes(self) -> int:
        """Device memory that is still taken."""
        return sum(memory.size_bytes for memory in self._memories if memory is not None)

    def batches(self) -> list[tuple[int, int]]:
        """First slot and number of slots of each piece."""
        return [
            (first, min(self.slots_per_piece, self.slots - first))
            for first in range(0, self.slots, self.slots_per_piece)
        ]

    def places(self) -> list[tuple[Memory, int, int]]:
        """All slots, as `capture_chunks` takes them."""
        return [(self._held(first), 0, count * self.chunk_bytes) for first, count in self.batches()]

    def places_at(self, slot: int, count: int) -> list[tuple[Memory, int, int]]:
        """`count` slots from `slot` on, as `capture_chunks` takes them."""
        found = []
        end = slot + count
        while slot < end:
            first, held = self._piece_at(slot)
            here = min(end, first + held) - slot
            found.append((self._held(slot), (slot - first) * self.chunk_bytes, here * self.chunk_bytes))
            slot += here
        return found

    def holding(self, slots: Sequence[int]) -> tuple[list[tuple[Memory, int, int]], array[int]]:
        """The pieces that hold these ascending slots, and the slots' numbers counted through these pieces."""
        pieces: list[tuple[Memory, int, int]] = []
        numbers = array("I")
        at = counted = 0
        while at < len(slots):
            first, count = self._piece_at(slots[at])
            end = bisect_left(slots, first + count, at)
            numbers.extend([slot - first + counted for slot in slots[at:end]])
            pieces.append((self._held(first), 0, count * self.chunk_bytes))
            counted += count
            at = end
        return pieces, numbers

    def hashed(
        self, short: Sequence[tuple[int, int]], runs: Sequence[tuple[int, int]] | None = None
    ) -> list[tuple[Memory, int, int]]:
        """Pieces whose chunks are the contents of the slots of `runs` (first, end; without it of all), for a hash:
        `short` has slot and size of each short chunk, ascending; all others are whole."""
        found = []
        for begin, end in runs if runs is not None else [(0, self.slots)]:
            at = bisect_left(short, (begin, 0))
            while begin < end:
                first, count = self._piece_at(begin)
                stop = min(end, first + count)
                rest = 0
                if at < len(short) and short[at][0] < stop:
                    slot, size = short[at]
                    stop, rest = slot + 1, self.chunk_bytes - size
                    at += 1
                offset = (begin - first) * self.chunk_bytes
                found.append((self._held(first), offset, (stop - begin) * self.chunk_bytes - rest))
                begin = stop
        return found

    def keep(self, slots: Sequence[int]) -> None:
        """Give back the pieces that hold none of these ascending slots."""
        for number, (first, count) in enumerate(self.batches()):
            at = bisect_left(slots, first)
            if at == len(slots) or slots[at] >= first + count:
                self._release(number)

    def release_below(self, slot: int) -> None:
        """Give back the pieces whose slots are all below `slot`."""
        for number, (first, count) in enumerate(self.batches()):
            if first + count <= slot:
                self._release(number)

    def release(self) -> None:
        """Give everything back. Nothing happens a second time."""
        for number in range(len(self._memories)):
            self._release(number)

    def _piece_at(self, slot: int) -> tuple[int, int]:
        """First slot and number of slots of the piece that holds `slot`."""
        first = slot - slot % self.slots_per_piece
        return first, min(self.slots_per_piece, self.slots - first)

    def _held(self, slot: int) -> Memory:
        memory = self._memories[slot // self.slots_per_piece]
        if memory is None:
            raise WoodfrogError("a copy in device memory was given back before it had left it")
        return memory

    def _release(self, number: int) -> None:
        memory, self._memories[number] = self._memories[number], None
        if memory is not None:
            memory.release()
