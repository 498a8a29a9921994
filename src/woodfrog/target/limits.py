"""Limits of this process that decide how large a target can be: open files above all, one for each allocation held."""

from __future__ import annotations

import resource
from pathlib import Path

from woodfrog.errors import RefusedError

# Files that the daemon has open for itself: sockets, logs, the driver's devices, the store.
RESERVED_DESCRIPTORS = 256


def raise_open_file_limit() -> int:
    """Raise this process's soft limit of open files to what it may have; the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = int(Path("/proc/sys/fs/nr_open").read_text())
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(soft, hard)


def require_open_files(count: int) -> None:
    """RefusedError when `count` more descriptors than are open now would not fit."""
    limit = raise_open_file_limit()
    in_use = sum(1 for _ in Path("/proc/self/fd").iterdir())
    if in_use + count + RESERVED_DESCRIPTORS > limit:
        raise RefusedError(
            f"The target has {count} allocations, and the daemon may have only {limit} files open ({in_use} are).",
            advice="Raise the limit of open files (ulimit -Hn, LimitNOFILE=) for the daemon and start it again.",
            details={"limit": limit, "in_use": in_use, "wanted": count},
        )
