"""A store's configuration: written once, when the store is made, and never changed (docs/format.md).

JSON, because a person should be able to read what a store is. What it says is checked against caps before it is used.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

from woodfrog.errors import BadImageError, UsageError
from woodfrog.store import keys
from woodfrog.store.tiers.protocol import Tier

FORMAT = 1
DEFAULT_CHUNK_BYTES = 64 << 10  # bench/results: amplification against metadata
MIN_CHUNK_BYTES = 16 << 10
MAX_CHUNK_BYTES = 64 << 20  # docs/format.md, "Packs": what one record may hold


@dataclass(frozen=True)
class Config:
    id: str  # 32 hex digits
    chunk_bytes: int


def load(tier: Tier) -> Config | None:
    """The configuration, or None where there is no store yet. BadImageError for one that cannot be used."""
    data = tier.get(keys.CONFIG, keys.CONFIG_MAX_BYTES)
    if data is None:
        return None
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise _bad(tier, f"is no JSON ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else None
        raise _bad(tier, f"has format {found!r}, and this woodfrog knows {FORMAT}")
    identity, chunk_bytes = fields.get("id"), fields.get("chunk_bytes")
    if not isinstance(identity, str) or not re.fullmatch("[0-9a-f]{32}", identity):
        raise _bad(tier, "has no proper id")
    if not isinstance(chunk_bytes, int) or not _is_chunk_size(chunk_bytes):
        raise _bad(tier, f"has a chunk size of {chunk_bytes!r}")
    if fields.get("features"):
        raise _bad(tier, f"needs features that this woodfrog does not know: {fields['features']!r}")
    return Config(identity, chunk_bytes)


def create(tier: Tier, chunk_bytes: int | None) -> Config:
    """Makes the store, or finds that someone else just did. `chunk_bytes` None: the default size."""
    if chunk_bytes is None and next(tier.list(keys.PACKS), None) is not None:
        raise BadImageError(
            f"the store {tier.url} has lost its file `config`",
            advice="put it back from a copy; it must have the chunk size that the store was made with",
        )
    size = DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    if not _is_chunk_size(size):
        raise UsageError(
            f"{size} bytes is no chunk size", advice="use a power of two from 16384 (16 KiB) to 67108864 (64 MiB)"
        )
    config = Config(secrets.token_hex(16), size)
    fields = {"format": FORMAT, "id": config.id, "chunk_bytes": size, "features": []}
    if tier.put_if_absent(keys.CONFIG, json.dumps(fields).encode() + b"\n"):
        return config
    found = load(tier)
    if found is None:
        raise BadImageError(f"the store {tier.url} was removed while it was being made", advice="try again")
    return found


def _is_chunk_size(size: int) -> bool:
    return MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES and size & (size - 1) == 0


def _bad(tier: Tier, what: str) -> BadImageError:
    return BadImageError(
        f"the file `config` of the store {tier.url} {what}",
        advice="use the woodfrog that made this store, or put the file back from a copy",
    )
