"""The two ways in which packs are read and written, for tests that hold both to the same promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from woodfrog._native import transfer

WAYS = ("uring", "threads")


@contextmanager
def chosen(way: str) -> Iterator[str]:
    """That way and no other, in this process. Skips, with the reason, what this machine's kernel does not allow."""
    trouble = transfer.uring_trouble()
    if way == "uring" and trouble is not None:
        pytest.skip(trouble)
    transfer.choose_file_io(way)
    try:
        yield way
    finally:
        transfer.choose_file_io("auto")
