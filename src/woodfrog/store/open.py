"""Opening a store by what a person writes: a path, `ram:NAME` or `s3://BUCKET/PREFIX`. Makes it if there is none."""

from __future__ import annotations

import os
import re
from pathlib import Path

from woodfrog.errors import NotFoundError, UsageError
from woodfrog.store import config
from woodfrog.store.store import Store
from woodfrog.store.tiers.disk import DiskTier
from woodfrog.store.tiers.protocol import Tier
from woodfrog.store.tiers.ram import ram_tier

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):")


def default_place() -> str:
    """$WOODFROG_STORE, else the user's own data directory."""
    return os.environ.get("WOODFROG_STORE") or str(Path.home() / ".local" / "share" / "woodfrog" / "store")


def open_store(
    place: str | os.PathLike[str] | None = None, *, create: bool = True, chunk_bytes: int | None = None
) -> Store:
    """The store at that place, made there (chunks of `chunk_bytes`, a power of two from 16 KiB to 64 MiB; 64 KiB unless
    said) if there is none.

    NotFoundError without one when `create` is false; UsageError for a place that cannot be understood, or another chunk
    size than the store has; RefusedError when it belongs to someone else; BadImageError for what is no store."""
    tier = _tier(os.fspath(place) if place is not None else default_place(), create)
    try:
        settings = config.load(tier)
        if settings is None:
            if not create:
                raise NotFoundError(f"there is no store at {tier.url}", advice="give the place of one with --store")
            settings = config.create(tier, chunk_bytes)
        if chunk_bytes is not None and settings.chunk_bytes != chunk_bytes:
            raise UsageError(
                f"the store {tier.url} has chunks of {settings.chunk_bytes} bytes, not {chunk_bytes}",
                advice="a store's chunk size is fixed when it is made: leave it out, or make another store",
            )
        return Store(tier, settings)
    except BaseException:
        tier.close()
        raise


def _tier(place: str, create: bool) -> Tier:
    if place.startswith("ram:"):
        return ram_tier(place.removeprefix("ram:"), create=create)
    if place.startswith("s3://"):
        from woodfrog.store.tiers.s3 import S3Tier  # obstore takes its time to load, and few need it

        return S3Tier(place)
    if place.startswith("file://"):
        place = place.removeprefix("file://")
    elif (match := _SCHEME.match(place)) and not Path(place).exists():
        raise UsageError(
            f"{match[1]}: is no kind of store that woodfrog knows",
            advice="give a directory, ram:NAME or s3://BUCKET/PREFIX",
        )
    return DiskTier(Path(place), create=create)
