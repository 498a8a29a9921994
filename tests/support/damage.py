"""Damage to a store, for tests that want it found."""

from __future__ import annotations

import struct
from pathlib import Path

from woodfrog.image.repository import ImageRepository


def damage_chunk(store: ImageRepository, digest: bytes) -> Path:
    """Change a byte of that chunk in the pack that holds it; the pack."""
    with store.store.reader() as reader:
        located = reader.locate(digest)
        offset, stored, _, _, number, _ = struct.unpack("<QIIIIQ", located.locations)
        path = Path(f"/proc/self/fd/{located.packs[number]}").readlink()
    with path.open("r+b") as pack:
        pack.seek(offset + stored // 2)
        byte = pack.read(1)[0]
        pack.seek(offset + stored // 2)
        pack.write(bytes([byte ^ 1]))
    return path
