"""What makes launches: memory with arrays in it, parameter blocks, and the shapes that many kernels have in common.

Arrays are exactly as long as the kernel may reach, with gaps between them: a template that names too little misses an
access, one that names another array is seen too.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

Dimensions = tuple[int, int, int]


@dataclass
class Made:
    """A launch and the memory it runs on."""

    grid: Dimensions
    block: Dimensions
    shared_bytes: int
    parameters: bytes
    memory: list[tuple[int, bytes]] = field(default_factory=list)

    def contents(self, address: int, size_bytes: int) -> bytes | None:
        """Memory as it is before the kernel runs: a Launch.contents."""
        for start, data in self.memory:
            if start <= address and address + size_bytes <= start + len(data):
                return data[address - start : address - start + size_bytes]
        return None

    @property
    def allocations(self) -> list[tuple[int, int]]:
        return [(address, len(content)) for address, content in self.memory]


class Maker:
    """Places arrays and packs parameters for one launch."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memory: list[tuple[int, bytes]] = []
        self._next = 0x7F0000000000 + rng.randrange(1 << 20) * 512

    def array(self, size_bytes: int) -> int:
        """An array of zeros."""
        return self.content(bytes(max(size_bytes, 1)))

    def content(self, data: bytes) -> int:
        address = self._next
        self.memory.append((address, data))
        self._next += (len(data) + 1023) // 512 * 512
        return address

    def ints(self, values: list[int], form: str = "i") -> int:
        return self.content(struct.pack(f"<{max(len(values), 1)}{form}", *(values or [0])))

    def made(
        self, grid: Dimensions | int, block: Dimensions | int, *parameters: tuple[str, object], shared_bytes: int = 0
    ) -> Made:
        packed = b""
        for form, value in parameters:
            data = value if isinstance(value, bytes) else struct.pack(f"<{form}", value)
            alignment = 8 if isinstance(value, bytes) else len(data)
            packed += bytes(-len(packed) % alignment) + data
        three = [d if isinstance(d, tuple) else (d, 1, 1) for d in (grid, block)]
        return Made(three[0], three[1], shared_bytes, packed, self.memory)


Generator = Callable[[Maker, random.Random], Made]
GENERATORS: dict[str, Generator] = {}


def launch_of(kernel: str) -> Callable[[Generator], Generator]:
    def keep(generator: Generator) -> Generator:
        GENERATORS[kernel] = generator
        return generator

    return keep


def pointer(address: int) -> tuple[str, object]:
    return "Q", address


def number(value: int) -> tuple[str, object]:
    return "i", value


def line(r: random.Random, n: int, *, each: int = 1) -> tuple[int, int]:
    """A grid and block that cover n elements, or somewhat more."""
    block = r.choice((1, 7, 32, 64, 96, 128, 256))
    return max(1, -(-n // (block * each))) + r.randrange(2), block


def any_line(r: random.Random) -> tuple[int, int]:
    return r.randrange(1, 6), r.choice((1, 5, 32, 64, 128))


def one_a_thread(
    kernel: str, build: Callable[[Maker, random.Random, int], tuple[tuple[str, object], ...]], each: int = 1
) -> None:
    """A kernel with one thread for each of n elements."""

    def generator(m: Maker, r: random.Random) -> Made:
        n = r.choice((1, r.randrange(1, 40), r.randrange(1, 900)))
        parameters = build(m, r, n)
        return m.made(*line(r, n, each=each), *parameters)

    GENERATORS[kernel] = generator


def strided_loop(kernel: str, build: Callable[[Maker, random.Random, int], tuple[tuple[str, object], ...]]) -> None:
    """A kernel whose threads stride over n elements, whatever the grid."""

    def generator(m: Maker, r: random.Random) -> Made:
        n = r.choice((1, r.randrange(1, 40), r.randrange(1, 900)))
        parameters = build(m, r, n)
        return m.made(*any_line(r), *parameters)

    GENERATORS[kernel] = generator


def plane(r: random.Random) -> tuple[int, int, Dimensions, Dimensions]:
    width, height = r.randrange(1, 70), r.randrange(1, 40)
    bx, by = r.choice(((8, 8), (16, 4), (32, 2), (5, 3)))
    return width, height, (-(-width // bx) + r.randrange(2), -(-height // by) + r.randrange(2), 1), (bx, by, 1)
