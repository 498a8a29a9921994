"""A store in memory: a disk tier on tmpfs. It is there for every process of its user until the machine stops."""

from __future__ import annotations

import os
from pathlib import Path

from woodfrog.errors import RefusedError
from woodfrog.store import files, names
from woodfrog.store.tiers.disk import DiskTier

SHARED_MEMORY = Path("/dev/shm")  # shm_overview(7): where every Linux has a tmpfs


def ram_tier(name: str, *, create: bool = True) -> DiskTier:
    """The store of that name among this user's. RefusedError if someone else has taken the place."""
    names.check_name(name)
    base = SHARED_MEMORY / f"woodfrog-{os.geteuid()}"
    try:
        # Everybody may make names in /dev/shm: what is there is ours only if it says so.
        base.mkdir(0o700, exist_ok=True)
        descriptor = files.open_directory(base, what="the place for stores in memory")
        try:
            files.make_private(base, descriptor, "the place for stores in memory,")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RefusedError(
            f"{base} cannot be used: {error.strerror}", advice="choose another place with --store or WOODFROG_STORE"
        ) from error
    return DiskTier(base / name, create=create, url=f"ram:{name}")
