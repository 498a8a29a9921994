"""Accounting of the host arenas: which bytes belong to whom, on which NUMA node, and what is populated.

The bytes lie in native Arenas, one per NUMA node, each on a memfd that the keeper holds (`arena:<node>`), so that
suspended data outlives the daemon. An arena's size is a bound: memory is taken when it is first prepared. A range that
held one user's data is cleared before another user gets it; after a restart nobody knows whose the data was, so then
every range counts as somebody else's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from woodfrog.errors import NoSpaceError, NotFoundError
from woodfrog.operations.context import ExtentLike

if TYPE_CHECKING:
    from woodfrog._native.transfer import Arena

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 2 << 20  # a huge page, and the granularity of device memory
BLOCK_BYTES = 64 << 20  # populated and registered in pieces of this size
UNKNOWN_USER = -1


class Extent(NamedTuple):
    """[offset, offset+size) of the arena of NUMA node `node`."""

    node: int
    offset: int
    size: int


class KeeperLike(Protocol):
    def append(self, key: str, fds: Sequence[int]) -> int: ...
    def fetch(self, key: str) -> list[int]: ...


class Ranges:
    """A set of byte ranges, kept sorted and merged."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []  # (begin, end)
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    @property
    def total(self) -> int:
        return sum(end - begin for begin, end in self._ranges)

    @property
    def largest(self) -> int:
        return max((end - begin for begin, end in self._ranges), default=0)

    def add(self, begin: int, end: int) -> None:
        kept: list[tuple[int, int]] = []
        for low, high in self._ranges:
            if high < begin or low > end:
                kept.append((low, high))
            else:
                begin, end = min(begin, low), max(end, high)
        kept.append((begin, end))
        self._ranges = sorted(kept)

    def remove(self, begin: int, end: int) -> None:
        kept: list[tuple[int, int]] = []
        for low, high in self._ranges:
            if low < begin:
                kept.append((low, min(high, begin)))
            if high > end:
                kept.append((max(low, end), high))
        self._ranges = [(low, high) for low, high in kept if low < high]

    def overlap(self, begin: int, end: int) -> list[tuple[int, int]]:
        return [(max(low, begin), min(high, end)) for low, high in self._ranges if low < end and high > begin]

    def first_fit(self, size: int) -> int | None:
        return next((low for low, high in self._ranges if high - low >= size), None)


class _NodeArena:
    def __init__(self, node: int, arena: Arena, *, fresh: bool) -> None:
        self.node = node
        self.arena = arena
        self.free = Ranges([(0, arena.size_bytes)])
        self.unprepared = Ranges([(0, arena.size_bytes)])
        self.users: dict[int, Ranges] = {} if fresh else {UNKNOWN_USER: Ranges([(0, arena.size_bytes)])}
        self.preparing = threading.Lock()
        self.waiting = 0  # operations that want `preparing`: the grower lets them go first, which a Lock would not


class ArenaPool:
    """All arenas of this machine. Thread-safe. `allocate` and `free` cost microseconds, `prepare` populates memory."""

    def __init__(self, arenas: dict[int, tuple[Arena, bool]]) -> None:
        self._nodes = {node: _NodeArena(node, arena, fresh=fresh) for node, (arena, fresh) in arenas.items()}
        self._lock = threading.Lock()
        self._calm = threading.Condition(self._lock)  # no operation waits for its memory
        self._grower: threading.Thread | None = None
        self._stopping = threading.Event()

    @classmethod
    def open(cls, keeper: KeeperLike, sizes_bytes: dict[int, int]) -> ArenaPool:
        """Arenas of these sizes by NUMA node (-1: no binding), each adopted from the keeper where it has one."""
        from woodfrog._native.transfer import Arena

        arenas: dict[int, tuple[Arena, bool]] = {}
        for node, size_bytes in sizes_bytes.items():
            key = f"arena:{max(node, 0)}"
            try:
                fds = keeper.fetch(key)
            except NotFoundError:
                arena = Arena(align(size_bytes), numa_node=node)
                keeper.append(key, [arena.fd])
                arenas[node] = (arena, True)
                continue
            try:
                # The size of an arena that holds somebody's data cannot change under them.
                arenas[node] = (Arena(os.fstat(fds[0]).st_size, numa_node=node, fd=fds[0]), False)
            finally:
                for fd in fds:
                    os.close(fd)
        return cls(arenas)

    @property
    def size_bytes(self) -> int:
        return sum(one.arena.size_bytes for one in self._nodes.values())

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(one.free.total for one in self._nodes.values())

    @property
    def prepared_bytes(self) -> int:
        with self._lock:
            return sum(one.arena.size_bytes - one.unprepared.total for one in self._nodes.values())

    def arena(self, node: int) -> Arena:
        """The native arena of `node`; it belongs to the pool."""
        return self._nodes[node].arena

    def largest_free_bytes(self) -> int:
        """The largest extent that `allocate(…, contiguous=True)` could give now."""
        with self._lock:
            return max((one.free.largest for one in self._nodes.values()), default=0)

    def allocate(self, size_bytes: int, *, node: int = -1, contiguous: bool = False) -> list[Extent]:
        """Extents of `size_bytes` in all: one if that can be had, preferably on `node`. NoSpaceError takes nothing."""
        if size_bytes == 0:
            return []
        whole = align(size_bytes)
        order = sorted(self._nodes.values(), key=lambda one: one.node != node)
        with self._lock:
            for one in order:
                if (start := one.free.first_fit(whole)) is not None:
                    one.free.remove(start, start + whole)
                    return [Extent(one.node, start, whole)]
            free_bytes = sum(one.free.total for one in order)
            if contiguous or free_bytes < whole:
                raise NoSpaceError(
                    f"the host arena has {free_bytes >> 20} MiB free, {whole >> 20} MiB are needed",
                    advice="resume or stop suspended targets, or start the daemon with a larger --arena",
                    details={"needed_bytes": whole, "free_bytes": free_bytes},
                )
            return self._gather(order, whole)

    def _gather(self, order: Sequence[_NodeArena], whole: int) -> list[Extent]:
        """Several extents, largest first: the fewer, the fewer copies."""
        extents: list[Extent] = []
        for one in order:
            for low, high in sorted(one.free, key=lambda part: part[0] - part[1]):
                if whole == 0:
                    break
                take = min(whole, high - low)
                extents.append(Extent(one.node, low, take))
                whole -= take
        for extent in extents:
            self._nodes[extent.node].free.remove(extent.offset, extent.offset + extent.size)
        return extents

    def reserve(self, extents: Sequence[ExtentLike]) -> None:
        """Take exactly these: what a predecessor's notes say is in use."""
        with self._lock:
            for extent in extents:
                one = self._nodes[extent.node]
                one.free.remove(extent.offset, extent.offset + extent.size)

    def free(self, extents: Sequence[ExtentLike], user: int) -> None:
        """Give back what `allocate` gave; `user` is the one whose data lies there."""
        with self._lock:
            for extent in extents:
                one = self._nodes[extent.node]
                begin, end = extent.offset, extent.offset + extent.size
                one.users.setdefault(user, Ranges()).add(begin, end)
                one.free.add(begin, end)

    def prepare(self, extents: Sequence[ExtentLike], user: int) -> None:
        """Make these ready for data of `user`: populated, registered with the driver, and clear of others' data."""
        for extent in extents:
            one = self._nodes[extent.node]
            begin, end = extent.offset, extent.offset + extent.size
            if self._is_ready(one, begin, end, user):
                continue
            with self._ahead_of_growing(one):
                self._prepare_range(one, begin, end)
                self._clear_others(one, begin, end, user)

    def _is_ready(self, one: _NodeArena, begin: int, end: int, user: int) -> bool:
        with self._lock:
            return not one.unprepared.overlap(begin, end) and not any(
                owner != user and ranges.overlap(begin, end) for owner, ranges in one.users.items()
            )

    @contextlib.contextmanager
    def _ahead_of_growing(self, one: _NodeArena) -> Iterator[None]:
        with self._lock:
            one.waiting += 1
        try:
            with one.preparing:
                yield
        finally:
            with self._calm:
                one.waiting -= 1
                self._calm.notify_all()

    def _clear_others(self, one: _NodeArena, begin: int, end: int, user: int) -> None:
        with self._lock:
            dirty = [
                part for owner, ranges in one.users.items() if owner != user for part in ranges.overlap(begin, end)
            ]
        for low, high in dirty:
            one.arena.clear(low, high - low)
        with self._lock:
            for owner, ranges in one.users.items():
                if owner != user:
                    ranges.remove(begin, end)

    def _prepare_range(self, one: _NodeArena, begin: int, end: int) -> None:
        with self._lock:
            missing = one.unprepared.overlap(begin, end)
        for low, high in missing:
            low -= low % BLOCK_BYTES
            high = min(-(-high // BLOCK_BYTES) * BLOCK_BYTES, one.arena.size_bytes)
            one.arena.populate(low, high - low)
            one.arena.register()
            with self._lock:
                one.unprepared.remove(low, high)

    def grow_in_background(self, wanted_bytes: int) -> None:
        """Have `wanted_bytes` of free memory prepared soon, so that the next operation need not wait for it."""
        with self._lock:
            if self._grower is not None and self._grower.is_alive():
                return
            self._grower = threading.Thread(target=self._grow, args=(wanted_bytes,), name="arena-grower", daemon=True)
            self._grower.start()

    def _grow(self, wanted_bytes: int) -> None:
        for one in self._nodes.values():
            left = min(wanted_bytes, one.arena.size_bytes)
            position = 0
            while left > 0 and not self._stopping.is_set():
                with self._calm:
                    self._calm.wait_for(lambda one=one: one.waiting == 0 or self._stopping.is_set())  # type: ignore[misc]
                    # In the order in which `allocate` will take them.
                    parts = [(low, high) for low, high in one.free if high > position]
                if not parts:
                    break
                low = max(parts[0][0], position)
                high = min(parts[0][1], low + BLOCK_BYTES)
                with one.preparing:
                    try:
                        self._prepare_range(one, low, high)
                    except RuntimeError:
                        log.exception("growing the arena of node %d stopped", one.node)
                        return
                left -= high - low
                position = high

    def close(self) -> None:
        """Stop growing and let go of the memory; the keeper still holds it. No operation may be running."""
        self._stopping.set()
        with self._calm:
            self._calm.notify_all()
        if self._grower is not None:
            self._grower.join()
        for one in self._nodes.values():
            with contextlib.suppress(RuntimeError):  # registrations go with the process in any case
                one.arena.unregister()
            one.arena.close()


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole huge pages."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def default_size_bytes(host_bytes: int, gpus_bytes: int) -> int:
    """Half of the host's memory, or what the GPUs have if that is less."""
    return align(min(host_bytes // 2, gpus_bytes or host_bytes // 2))
