"""What is in the saved state, from samples: zeros, one value over and over, machine code, what is known, other data.

Blocks of 4 KiB are read at even distances from the whole mapping, by /proc/PID/mem. `known`: files whose contents may
be in it (weights, checkpoints); they are compared at multiples of 512 bytes. Code is recognised by its form alone, so
that share is an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

BLOCK_BYTES = 4096
SAMPLES = 8192  # of 16 GiB a block every 2 MiB; read in well under a second
PIECE_BYTES = 512
MOST_KNOWN_BYTES = 4 << 30  # of files that are compared; beyond that they are left out
ZERO, FILL, CODE, KNOWN, OTHER = "zero", "one value", "code", "known", "other data"
KINDS = (ZERO, FILL, CODE, KNOWN, OTHER)

# Of an instruction of 16 bytes of compute capability 7.0 and newer: bits 12-14 are its predicate, 7 in most (always);
# its last byte is 0. Read off cubins; code has many of such words and several kinds of instruction.
_WORD = 16
_ALWAYS = 0x70


class Known:
    """Pieces of files, by their hash. Costs about 100 bytes of memory for each 512 of a file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """OSError when a file cannot be read."""
        self._pieces: set[int] = set()
        read = 0
        for path in paths:
            with path.open("rb") as file:
                while read < MOST_KNOWN_BYTES and (data := file.read(1 << 20)):
                    read += len(data)
                    self._pieces.update(
                        hash(data[at : at + PIECE_BYTES])
                        for at in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES)
                        if any(data[at : at + PIECE_BYTES])
                    )

    def has(self, block: bytes) -> bool:
        """Whether most pieces of the block are in the files."""
        pieces = range(0, len(block), PIECE_BYTES)
        return 2 * sum(hash(block[at : at + PIECE_BYTES]) in self._pieces for at in pieces) > len(pieces)


def kind_of(block: bytes, known: Known | None = None) -> str:
    """One of KINDS."""
    if not any(block):
        return ZERO
    if known is not None and known.has(block):
        return KNOWN
    if block == block[:8] * (len(block) // 8):
        return FILL
    return CODE if looks_like_code(block) else OTHER


def looks_like_code(block: bytes) -> bool:
    """Whether a block has the form of machine code of compute capability 7.0 or newer."""
    words = len(block) // _WORD
    lows, predicates, ends = block[0::_WORD], block[1::_WORD], block[_WORD - 1 :: _WORD]
    always = sum(one & _ALWAYS == _ALWAYS for one in predicates)
    return ends.count(0) >= 0.95 * words and always >= 0.6 * words and 4 <= len(set(lows)) <= 120


def offsets(size_bytes: int, samples: int = SAMPLES) -> Sequence[int]:
    """Where the blocks are read that stand for a mapping of that size: at even distances, whole blocks."""
    blocks = size_bytes // BLOCK_BYTES
    if blocks <= samples:
        return range(0, blocks * BLOCK_BYTES, BLOCK_BYTES)
    return [index * blocks // samples * BLOCK_BYTES for index in range(samples)]


def survey(pid: int, begin: int, end: int, known: Known | None = None) -> tuple[int, dict[str, float]]:
    """How many blocks were read, and the share of each kind. OSError when the memory cannot be read."""
    counts: Counter[str] = Counter()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for offset in offsets(end - begin):
            memory.seek(begin + offset)
            counts[kind_of(memory.read(BLOCK_BYTES), known)] += 1
    total = counts.total()
    return total, {kind: counts[kind] / total for kind in KINDS if total}
