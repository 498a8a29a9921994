"""Memory that comes group by group: what is there is copied while the next of it is still imported or created.

A driver takes about a tenth of a millisecond for each allocation that it imports or creates, so that the bus would wait
70 ms for the 600 of a training run. Nothing here knows what is made; it must never leave a thread behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")

# 2 ms of the driver's on an H200, whose import of 600 took 65 to 100 ms (bench/results/h200/switch.json, 2026-11-30).
GROUP_ALLOCATIONS = 16
GROUP_BYTES = 1 << 30  # 20 ms of copying: large allocations are not waited for either


def groups(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The indices in the order in which they should come: the largest first, because copying one takes longer than
    making the next, and of small ones the bus waits for the driver."""
    found: list[list[int]] = []
    held = GROUP_BYTES
    for index, size in sorted(zip(indices, sizes, strict=True), key=lambda one: -one[1]):
        if held >= GROUP_BYTES or len(found[-1]) == GROUP_ALLOCATIONS:
            found.append([])
            held = 0
        found[-1].append(index)
        held += size
    return found


class Coming(Generic[Item]):
    """`make` is called with each of `groups`, in their order, on a thread of its own; iterating gives what has come
    since, again and again until all has. What `make` raised is raised there, and nothing more is made. Behind the
    `with` block nothing is under way."""

    def __init__(self, make: Callable[[Sequence[int]], list[Item]], groups: Sequence[Sequence[int]]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="woodfrog-coming") if groups else None
        self._futures: deque[Future[list[Item]]] = deque()
        self._failed = False

        def unless_failed(group: Sequence[int]) -> list[Item]:
            if self._failed:
                return []
            try:
                return make(group)
            except BaseException:
                self._failed = True
                raise

        if self._pool is not None:
            self._futures.extend(self._pool.submit(unless_failed, group) for group in groups)

    def __iter__(self) -> Iterator[list[Item]]:
        while self._futures:
            come = self._futures.popleft().result()
            while self._futures and self._futures[0].done():
                come = come + self._futures.popleft().result()
            yield come

    def __enter__(self) -> Coming[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
