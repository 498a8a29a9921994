"""Who copies pages of processes: woodfrog's threads, or CRIU alone, whose one thread is slower and asks for less."""

from __future__ import annotations

import os

VARIABLE = "WOODFROG_CRIU_PAGES"


def by_criu_alone() -> bool:
    """Whether the user wants it so: the daemon's environment says WOODFROG_CRIU_PAGES=criu."""
    return os.environ.get(VARIABLE, "").strip().lower() == "criu"


def by_threads_always() -> bool:
    """Whether threads are to do it wherever they can, even where CRIU alone is thought to be as fast: =threads."""
    return os.environ.get(VARIABLE, "").strip().lower() == "threads"
