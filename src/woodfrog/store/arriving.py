"""Chunks that are read while they arrive: what is fetched first is placed while the rest is still on its way.

Chunks are taken in batches, in their order. On a local tier there is one batch, and it is there. Nothing of a batch may
be read before `wait` has returned for it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from woodfrog._native.transfer import CancelledError, Progress
from woodfrog.store.tiers.protocol import OpenPack

BATCH_BYTES = 128 << 20  # of raw chunks: some requests' worth, and large enough for a device's pipeline to be filled
_FETCHES_AT_ONCE = 4  # the tier has its own limit of requests in flight
_LOOK_S = 0.1  # how often a waiting caller looks whether it was cancelled

Fetch = tuple[OpenPack, list[tuple[int, int]]]
"""Ranges (offset, size) of one pack."""


class Arriving:
    """Made by `Reader.locate_ahead`, which closes it. `locations` and `packs` as in Located; `batches` are (first, end)
    positions of chunks. From several threads."""

    def __init__(
        self,
        locations: bytes,
        packs: dict[int, int],
        batches: Sequence[tuple[int, int]],
        fetches: Sequence[Sequence[Fetch]] | None,
    ) -> None:
        """`fetches`: for each batch what it needs; None: all is there."""
        self.locations = locations
        self.packs = packs
        self.batches = list(batches)
        self._progress = Progress()
        self._pool: ThreadPoolExecutor | None = None
        self._coming: list[list[Future[None]]] = []
        if fetches is not None:
            pool = self._pool = ThreadPoolExecutor(_FETCHES_AT_ONCE, thread_name_prefix="woodfrog-fetch")
            self._coming = [
                [pool.submit(pack.fetch, ranges, self._progress) for pack, ranges in batch] for batch in fetches
            ]

    def wait(self, batch: int, progress: Progress | None = None) -> None:
        """Returns when the chunks of that batch can be read; raises what kept one from coming, or CancelledError."""
        if self._pool is None:
            return
        coming = set(self._coming[batch])
        while coming:
            done, coming = wait_for(coming, _LOOK_S, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            if progress is not None and progress.cancelled:
                error = CancelledError("cancelled")
                error.code, error.call = -errno.ECANCELED, "fetch"
                raise error

    def close(self) -> None:
        """Nothing is under way afterwards. Calling it again does nothing."""
        self._progress.cancel()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
