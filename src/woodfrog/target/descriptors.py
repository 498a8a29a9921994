"""File descriptors that came from a target, and who closes them.

A `Descriptors` owns what is in it until it is closed or taken. Must never close a number twice: a closed number may
already belong to somebody else in this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

SCM_MAX_FD = 253  # in one packet: include/net/scm.h


class Descriptors:
    """An owned list of descriptors. Use it in a `with`, or call `close`; `take` hands the ownership on."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._numbers = list(numbers)

    def extend(self, numbers: Sequence[int]) -> None:
        self._numbers.extend(numbers)

    def take(self) -> list[int]:
        """The numbers; the caller owns them from now on, and this object is empty."""
        numbers, self._numbers = self._numbers, []
        return numbers

    def close(self) -> None:
        for number in self.take():
            os.close(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
