"""Copies of a target's chunks in device memory of the daemon: the target runs on while they drain from there.

The memory is in pieces, and each is given back to the driver as soon as its chunks have left it; nothing else can make
room for a target that runs short meanwhile. The driver clears device memory before anybody gets it, so what a target
had in it reaches nobody. Nothing here decides how much of it may be taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device, Memory

# Creating and mapping a piece takes 60 us on an H200 (FACTS §1: 2000 pieces in 120 ms); draining one 5 ms.
PIECE_BYTES = 256 << 20


class Staging:
    """`slots` slots of `chunk_bytes` each on one device. Owned until `release`; one thread at a time."""

    def __init__(self, device: Device, slots: int, chunk_bytes: int) -> None:
        """TransferError (CUDA_ERROR_OUT_OF_MEMORY) when there is no room: then nothing is taken."""
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self._per_piece = max(PIECE_BYTES, chunk_bytes) // chunk_bytes
        granularity = device.granularity_bytes
        sizes = []
        for first in range(0, slots, self._per_piece):
            size = min(self._per_piece, slots - first) * chunk_bytes
            sizes.append(-(-size // granularity) * granularity)
        self._memories: list[Memory | None] = list(device.create_memories(sizes))

    @property
    def held_bytes(self) -> int:
        """Device memory that is still taken."""
        return sum(memory.size_bytes for memory in self._memories if memory is not None)

    def batches(self) -> list[tuple[int, int]]:
        """First slot and number of slots of each piece."""
        return [(first, min(self._per_piece, self.slots - first)) for first in range(0, self.slots, self._per_piece)]

    def places(self) -> list[tuple[Memory, int, int]]:
        """All slots, as `capture_chunks` takes them."""
        return [(self._held(first), 0, count * self.chunk_bytes) for first, count in self.batches()]

    def pieces(self, first: int, count: int) -> tuple[list[tuple[Memory, int, int]], int]:
        """Slots first … first+count-1 as the pieces that hold them, and the number of `first` within these pieces."""
        begin = first // self._per_piece
        end = -(-(first + count) // self._per_piece)
        return self.places_of(begin, end), first - begin * self._per_piece

    def places_of(self, begin: int, end: int) -> list[tuple[Memory, int, int]]:
        """The slots of pieces begin … end-1."""
        return [(self._held(first), 0, slots * self.chunk_bytes) for first, slots in self.batches()[begin:end]]

    def hashed(self, short: list[tuple[int, int]]) -> list[tuple[Memory, int, int]]:
        """Pieces whose chunks are the slots' contents, for a hash: `short` has slot and size of each short chunk, in
        order; all others are whole."""
        cut = dict(short)
        found = []
        for first, count in self.batches():
            memory = self._held(first)
            begin = first
            for slot in [*(slot for slot in cut if first <= slot < first + count), first + count - 1]:
                if slot < begin:
                    continue  # the piece's last slot, a short chunk, which has been dealt with
                size = (slot - begin) * self.chunk_bytes + cut.get(slot, self.chunk_bytes)
                found.append((memory, (begin - first) * self.chunk_bytes, size))
                begin = slot + 1
        return found

    def release_below(self, slot: int) -> None:
        """Give back the pieces whose slots are all below `slot`."""
        for number, (first, count) in enumerate(self.batches()):
            if first + count <= slot:
                self._release(number)

    def release(self) -> None:
        """Give everything back. Nothing happens a second time."""
        for number in range(len(self._memories)):
            self._release(number)

    def _held(self, slot: int) -> Memory:
        memory = self._memories[slot // self._per_piece]
        if memory is None:
            raise WoodfrogError("a copy in device memory was given back before it had left it")
        return memory

    def _release(self, number: int) -> None:
        memory, self._memories[number] = self._memories[number], None
        if memory is not None:
            memory.release()
