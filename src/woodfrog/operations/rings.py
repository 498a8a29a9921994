"""Parts of the arena that more data streams through than fits into them at once.

Each is contiguous, and none takes what the others need. Nothing here moves bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from woodfrog.errors import NoSpaceError
from woodfrog.operations.context import Arenas
from woodfrog.operations.space import ALIGNMENT_BYTES, Space

# Enough to keep bus and disk busy at once.
RING_BYTES = 1 << 30
SMALLEST_RING_BYTES = 16 << 20


def take_rings(arenas: Arenas, sizes_bytes: Mapping[int, int], user: int, chunk_bytes: int) -> dict[int, Space]:
    """Rings for data of these sizes, one for each key; each has room for two chunks at least. NoSpaceError takes
    nothing."""
    rings: dict[int, Space] = {}
    try:
        for key, data_bytes in sizes_bytes.items():
            share = arenas.largest_free_bytes() // (len(sizes_bytes) - len(rings))
            wanted = -(-data_bytes // chunk_bytes) * chunk_bytes
            ring = min(max(RING_BYTES, 2 * chunk_bytes), wanted, share - share % ALIGNMENT_BYTES)
            if ring < min(max(SMALLEST_RING_BYTES, 2 * chunk_bytes), wanted):
                raise NoSpaceError(
                    f"the host arena has {arenas.free_bytes >> 20} MiB free; each of {len(sizes_bytes)} rings needs "
                    f"{max(SMALLEST_RING_BYTES, 2 * chunk_bytes) >> 20} MiB in one piece",
                    advice="resume or stop suspended targets, or start the daemon with a larger --arena",
                )
            rings[key] = Space.take(arenas, ring, user, contiguous=True)
    except BaseException:
        for space in rings.values():
            space.free()
        raise
    return rings
