"""How many files this process may have open, asked before an image that is spread over many packs is opened."""

from __future__ import annotations

import resource

from woodfrog.errors import RefusedError

OTHERS = 256  # what the rest of the process may have open: sockets, logs, allocations of a target


def allow_open_files(count: int) -> None:
    """Raises the soft limit, as far as the hard one allows, so that `count` more can be open. RefusedError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHERS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RefusedError(
            f"the image is spread over {count} packs, and this process may open only {hard} files",
            advice="raise the limit (ulimit -n), or run `woodfrog prune`, which joins packs",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
