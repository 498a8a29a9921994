"""Random launches of the corpus: shapes, arguments and memory with which each kernel stays inside its arrays."""

from __future__ import annotations

import random

import launches_blocks
import launches_elementwise
import launches_irregular
from making import GENERATORS, Made, Maker

FILES = (launches_elementwise, launches_blocks, launches_irregular)


def make(kernel: str, seed: int) -> Made:
    """The launch number `seed` of a kernel: the same every time."""
    rng = random.Random(f"{kernel} {seed}")
    return GENERATORS[kernel](Maker(rng), rng)


__all__ = ["FILES", "GENERATORS", "Made", "Maker", "make"]
