"""The test process as a subreaper, for as long as a test needs it.

For longer it must not be one: daemons and targets that other tests orphan would become its children, whom nobody reaps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from woodfrog.target.reaper import become_subreaper

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextmanager
def subreaper() -> Iterator[None]:
    """Orphans below this process become its children while the block runs."""
    become_subreaper()
    try:
        yield
    finally:
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0) == 0
