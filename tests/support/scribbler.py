"""The scribbler target (tests/sim/targets/scribbler.cpp), and what its GPU memory must hold.

Every order is answered before the next one is given, so `memory` is what the GPU holds whenever nothing is under way.
"""

from __future__ import annotations

from pathlib import Path

from orders import Ordered
from product import Stepper

# As in the target.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
_PERIOD = 8191


def bytes_of(seed: int, size_bytes: int) -> bytes:
    """What the target's `write` of that seed writes."""
    state, made = seed, bytearray(_PERIOD)
    for at in range(_PERIOD):
        state = (state * _MULTIPLIER + _INCREMENT) & 0xFFFFFFFFFFFFFFFF
        made[at] = state >> 56
    return (bytes(made) * (size_bytes // _PERIOD + 1))[:size_bytes]


def pattern_of(seed: int, words: int) -> bytes:
    """What the kernel `fill` of stepper_kernels.cu writes."""
    made = bytearray()
    for index in range(words):
        value = (index * 2654435761 + seed * 40503) & 0xFFFFFFFF
        value ^= value >> 15
        made += ((value * 2246822519) & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(made)


class Scribbler(Ordered):
    """One running scribbler. `memory`: the contents of its allocations by their address."""

    def __init__(self, process: Stepper, orders: Path) -> None:
        super().__init__(process, orders)
        self.memory: dict[int, bytearray] = {}
        self._recorded: tuple[int, int, int] | None = None  # address, words, seed of the graph

    def alloc(self, size_bytes: int) -> int:
        """New memory, filled with zeros (cuMemAlloc promises nothing of its contents); its address."""
        address = int(self.order("alloc", size_bytes), 16)
        self.memory[address] = bytearray(size_bytes)
        self.fill(address, 0, size_bytes, 0)
        return address

    def free(self, address: int) -> None:
        self.order("free", f"{address:x}")
        del self.memory[address]

    def write(self, address: int, offset: int, size_bytes: int, seed: int) -> None:
        self.order("write", f"{address + offset:x}", size_bytes, seed)
        self.memory[address][offset : offset + size_bytes] = bytes_of(seed, size_bytes)

    def fill(self, address: int, offset: int, size_bytes: int, value: int) -> None:
        self.order("fill", f"{address + offset:x}", size_bytes, value)
        self.memory[address][offset : offset + size_bytes] = bytes([value]) * size_bytes

    def copy(self, to: int, to_offset: int, address: int, offset: int, size_bytes: int) -> None:
        """Between different allocations."""
        self.order("copy", f"{to + to_offset:x}", f"{address + offset:x}", size_bytes)
        self.memory[to][to_offset : to_offset + size_bytes] = self.memory[address][offset : offset + size_bytes]

    def launch(self, address: int, words: int, seed: int) -> None:
        """A kernel writes the first words."""
        self.order("launch", f"{address:x}", words, seed)
        self.memory[address][: 4 * words] = pattern_of(seed, words)

    def record(self, address: int, words: int, seed: int) -> None:
        """A graph with that launch; launches it once."""
        self.order("record", f"{address:x}", words, seed)
        self._recorded = (address, words, seed)
        self.memory[address][: 4 * words] = pattern_of(seed, words)

    def replay(self) -> None:
        """The graph, once more, if there is one whose memory is still there."""
        if self._recorded is not None and self._recorded[0] in self.memory:
            address, words, seed = self._recorded
            if 4 * words <= len(self.memory[address]):
                self.order("replay")
                self.memory[address][: 4 * words] = pattern_of(seed, words)

    def shown(self, directory: Path) -> dict[int, bytes]:
        """What the GPU holds now, by the target's own word."""
        found = {}
        for address, content in self.memory.items():
            path = directory / f"{self._count}-{address:x}"
            self.order("show", f"{address:x}", len(content), path)
            found[address] = path.read_bytes()
            path.unlink()
        return found
