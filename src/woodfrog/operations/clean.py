"""Which chunks of a target cannot have changed since its last image, by what its interposer followed.

A chunk is clean when its handle is the same as in that image (handles are numbered once and for all) and nothing that
was launched since can have written to it. Its digest is then the image's. Must never call clean what the report does
not vouch for: another baseline, another chunk size, a handle that is new or of another size count as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from woodfrog.errors import WoodfrogError
from woodfrog.image.chunks import Cut, digests_of
from woodfrog.image.manifest import DIGEST_BYTES
from woodfrog.operations.data import DevicePart
from woodfrog.operations.history import Baseline
from woodfrog.operations.notes import HandleNote
from woodfrog.target.tracking import Tracked

NAMED_KERNELS = 8  # in an error


class CleanChangedError(WoodfrogError):
    """Memory that nothing should have written has changed: following the launches has missed a write."""


@dataclass(frozen=True)
class Run:
    """Chunks [first, end) of handle `index` (into all handles); `position` of the first within the part. They are
    the `size_bytes` from `offset_bytes` on."""

    index: int
    first: int
    end: int
    position: int
    offset_bytes: int
    size_bytes: int


@dataclass
class CleanPart:
    """One device's part: what has to be hashed, and the digests of the rest (of what has to be hashed: zeros)."""

    runs: list[Run]
    digests: bytearray
    clean_chunks: int

    def fill(self, hashed: bytes) -> bytes:
        """The digests of all chunks, from those of the runs in their order."""
        begin = 0
        for run in self.runs:
            size = (run.end - run.first) * DIGEST_BYTES
            at = run.position * DIGEST_BYTES
            self.digests[at : at + size] = hashed[begin : begin + size]
            begin += size
        return bytes(self.digests)


class Clean:
    """What need not be hashed (`full`: nothing). `reason`: why that is nothing, empty when it is something."""

    def __init__(
        self,
        handles: Sequence[HandleNote],
        parts: Sequence[DevicePart],
        cuts: Sequence[Cut],
        chunk_bytes: int,
        tracked: Tracked,
        baseline: Baseline | None,
        *,
        full: bool = False,
    ) -> None:
        self.tracked = tracked
        self._size_bytes = sum(cut.size_bytes for cut in cuts)
        self.reason = "all of it was asked for" if full else _refusal(tracked, baseline, chunk_bytes)
        old = {} if self.reason or baseline is None else _digests_by_handle(baseline)
        self.parts = [
            _plan(handles, part, cut, chunk_bytes, old, tracked) for part, cut in zip(parts, cuts, strict=True)
        ]

    @property
    def clean_chunks(self) -> int:
        return sum(part.clean_chunks for part in self.parts)

    @property
    def clean_bytes(self) -> int:
        return self._size_bytes - sum(run.size_bytes for part in self.parts for run in part.runs)

    def check(self, digests: Sequence[bytes]) -> None:
        """CleanChangedError when memory that is called clean has other digests than in the last image."""
        wrong = 0
        for part, now in zip(self.parts, digests, strict=True):
            told = part.fill(
                b"".join(digests_of(now, run.position, run.position + run.end - run.first) for run in part.runs)
            )
            if told != now:
                wrong += sum(
                    told[at : at + DIGEST_BYTES] != now[at : at + DIGEST_BYTES]
                    for at in range(0, len(now), DIGEST_BYTES)
                )
        if wrong:
            names = [one.name for one in self.tracked.kernels[:NAMED_KERNELS]]
            more = len(self.tracked.kernels) - len(names)
            ran = ", ".join(names) + (f" and {more} more" if more > 0 else "")
            raise CleanChangedError(
                f"{wrong} chunks that nothing should have written differ from the last image; launched since: "
                f"{ran or 'nothing'}",
                advice="run the target without --track, and report this with the kernels' PTX",
                details={"chunks": wrong, "kernels": names},
            )


def _refusal(tracked: Tracked, baseline: Baseline | None, chunk_bytes: int) -> str:
    if baseline is None:
        return "no earlier image of this run is known to the daemon"
    if tracked.baseline != baseline.operation:
        return "the target follows its launches since another image"
    if tracked.everything:
        return tracked.why or "everything may have been written"
    if baseline.chunk_bytes != chunk_bytes:
        return "the last image has chunks of another size"
    return ""


def _digests_by_handle(baseline: Baseline) -> dict[HandleNote, bytes]:
    cut = Cut([handle.size for handle in baseline.handles], baseline.chunk_bytes)
    return {
        handle: digests_of(baseline.digests, first, end)
        for handle, first, end in zip(baseline.handles, cut.first, cut.first[1:], strict=False)
    }


def _plan(
    handles: Sequence[HandleNote],
    part: DevicePart,
    cut: Cut,
    chunk_bytes: int,
    old: dict[HandleNote, bytes],
    tracked: Tracked,
) -> CleanPart:
    digests = bytearray(len(cut) * DIGEST_BYTES)
    runs: list[Run] = []
    to_hash = 0
    for number, index in enumerate(part.indices):
        first, end = cut.first[number], cut.first[number + 1]
        handle = handles[index]
        known = old.get(handle)
        if known is None:
            dirty = [(0, end - first)]
        else:
            digests[first * DIGEST_BYTES : end * DIGEST_BYTES] = known
            dirty = _chunk_runs(tracked.ranges.get(handle.handle, ()), handle.size, chunk_bytes)
        for begin, stop in dirty:
            offset_bytes = begin * chunk_bytes
            size_bytes = min(stop * chunk_bytes, handle.size) - offset_bytes
            runs.append(Run(index, begin, stop, first + begin, offset_bytes, size_bytes))
            to_hash += stop - begin
    return CleanPart(runs, digests, len(cut) - to_hash)


def _chunk_runs(ranges: Sequence[tuple[int, int]], size_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges (offset, size) of a handle as runs of chunks, ascending, none touching another."""
    runs: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        first, end = offset // chunk_bytes, -(-min(offset + size, size_bytes) // chunk_bytes)
        if first >= end:
            continue
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((first, end))
    return runs
