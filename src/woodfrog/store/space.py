"""Room on the disk: asked before anything is written, and told in one sentence when it runs out. Never writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from woodfrog._native.transfer import TransferError
from woodfrog.errors import NoSpaceError

# A file system that is filled to the last block fails in ways that nobody tests; leave this much.
RESERVE_BYTES = 64 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that this user can still write below `path` (or its nearest parent that is there)."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def require(path: str | os.PathLike[str], size_bytes: int, what: str) -> None:
    """NoSpaceError unless `size_bytes` more fit below `path`. `what` is the subject of the sentence."""
    free = free_bytes(path)
    if free < size_bytes + RESERVE_BYTES:
        raise NoSpaceError(
            f"{what} needs {size_bytes / 1e9:.2f} GB and {os.fspath(path)} has {free / 1e9:.2f} GB free",
            advice="remove images (`woodfrog rm`), or choose another place with --store or WOODFROG_STORE",
            details={"needed_bytes": size_bytes, "free_bytes": free},
        )


def full(path: str | os.PathLike[str], error: OSError) -> NoSpaceError:
    """The error for a write that met a full disk or quota."""
    return NoSpaceError(
        f"{os.fspath(path)} is full ({error.strerror or 'no space left'}); what was written has been removed",
        advice="remove images (`woodfrog rm`), or choose another place with --store or WOODFROG_STORE",
        details={"free_bytes": free_bytes(path)},
    )


@contextmanager
def telling_full(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a write below `path` that met a full disk into NoSpaceError, be it Python's or the native module's."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(path, error) from error
        raise
    except TransferError as error:
        if -error.code in FULL:
            raise full(path, OSError(-error.code, os.strerror(-error.code))) from error
        raise
