"""Who copies pages of processes, as far as the user says: woodfrog's threads, or CRIU, which has one.

Without a word it is the threads in a restore, and CRIU in a dump: there its waiting costs what they save.
"""

from __future__ import annotations

import os

VARIABLE = "WOODFROG_CRIU_PAGES"


def by_criu_alone() -> bool:
    """Whether the user wants it so: the daemon's environment says WOODFROG_CRIU_PAGES=criu."""
    return os.environ.get(VARIABLE, "").strip().lower() == "criu"


def dump_by_threads() -> bool:
    """Whether threads are to do it in a dump too: =threads."""
    return os.environ.get(VARIABLE, "").strip().lower() == "threads"
