"""Taking chunks out of packs and handing them to a writer: for copies between stores, and for what prune and repair
save. Every chunk is compared with its digest on the way; none passes through a Python object."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from woodfrog._native.transfer import Arena, Progress, extract_from_packs
from woodfrog.store import space
from woodfrog.store.records import (
    DIGEST_BYTES,
    LOCATION,
    LOCATION_BYTES,
    batches,
    chunk_table,
    running_offsets,
    select_rows,
)
from woodfrog.store.tiers.protocol import Tier

_RAW = 0  # docs/format.md, "Encodings"
SPOOL_BYTES = 256 << 20  # decoded at a time: bounds the room that this takes on the disk
Write = Callable[[bytes, Sequence[Arena | int]], object]
"""Chunk records and their sources, as WriteSession.write takes them."""


def move(
    digests: bytes,
    locations: bytes,
    packs: Mapping[int, int],
    tier: Tier,
    chunk_bytes: int,
    write: Write,
    progress: Progress | None = None,
) -> None:
    """Hands all of these chunks to `write`, in one call or several. What is stored raw is read by the writer straight
    from its pack; what is encoded is decoded into a temporary file of `tier` before."""
    rows = list(struct.iter_unpack(LOCATION, locations))
    raw = [at for at, row in enumerate(rows) if row[3] == _RAW]
    if raw:
        sources = sorted({rows[at][4] for at in raw})
        places = {number: at for at, number in enumerate(sources)}
        table = chunk_table(
            select_rows(digests, raw, DIGEST_BYTES),
            [rows[at][0] for at in raw],
            [rows[at][2] for at in raw],
            [places[rows[at][4]] for at in raw],
        )
        write(table, [packs[number] for number in sources])
    encoded = [at for at, row in enumerate(rows) if row[3] != _RAW]
    for group in batches(encoded, [row[2] for row in rows], SPOOL_BYTES):
        sizes = [rows[at][2] for at in group]
        offsets = running_offsets(sizes)
        some = select_rows(digests, group, DIGEST_BYTES)
        file = tier.new_file()
        try:
            with space.telling_full(tier.spool):
                extract_from_packs(
                    [(file.fd, offset, size) for offset, size in zip(offsets, sizes, strict=True)],
                    some,
                    select_rows(locations, group, LOCATION_BYTES),
                    packs,
                    chunk_bytes=chunk_bytes,
                    progress=progress,
                )
            write(chunk_table(some, offsets, sizes, [0] * len(group)), [file.fd])
        finally:
            file.close()
