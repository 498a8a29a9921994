"""Copy-on-write: a target runs on while what is new in its memory is captured from that memory itself.

The daemon keeps its mapping of the target's physical memory, and drains chunk by chunk to the arena. Before the target
writes where that has not been done, it asks for it through a page that both share (native/wire/guard.h) and waits; that
is copied to a ring in the GPU's memory, or drained at once where there is no room. Nothing is trusted about who writes
what: a chunk goes to the store only with the digest that it had while the target was at rest, so a write that nobody
saw coming fails the snapshot (UnseenWriteError), never falsifies it. Must never leave a target waiting: whatever
happens here, `close` lets it go on.
"""

from __future__ import annotations

import logging
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from woodfrog.errors import WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.image.chunks import Cut, packed
from woodfrog.operations.context import Arenas
from woodfrog.operations.data import DevicePart, GpuData, drain_pieces
from woodfrog.operations.members import Member, side_by_side
from woodfrog.operations.phases import CancelledOperationError
from woodfrog.operations.space import Space
from woodfrog.operations.staging import Staging
from woodfrog.target.link import AgentLink, Guarded

if TYPE_CHECKING:
    from woodfrog._native.transfer import Guard, Memory, Progress
    from woodfrog.target.tracking import KernelUse
    from woodfrog.target.wire import Message

log = logging.getLogger(__name__)

Run = tuple[int, int, int, int]  # first chunk of those to capture, how many, first unit, how many

# What is drained in one call: long enough for the bus' speed, short enough for a target that waits for a part of it
# (0.6 ms at 55 GB/s).
BATCH_BYTES = 32 << 20
# The most that captured chunks may take of the GPU's memory on their way to the arena.
RING_BYTES = 4 << 30
# Between looks at whether the operation was cancelled, while another thread has the last chunks in hand.
LOOK_S = 0.1
MOST_SUSPECTS = 20  # named in a message; the log has all


class UnseenWriteError(WoodfrogError):
    """The target wrote memory of a snapshot, where no call of it said that it would, before that was captured."""


class GuardedPart:
    """One device's share: which chunks, where they lie, where they go. Its thread serves what the target waits for; the
    caller's drains the rest. `space` has a slot for each chunk of `moved`, in their order."""

    def __init__(
        self,
        data: GpuData,
        part: DevicePart,
        cut: Cut,
        moved: array[int],
        arenas: Arenas,
        space: Space,
        ring: Staging | None,
        *,
        in_background: Callable[[], bool],
        turn: Callable[[], object],
    ) -> None:
        self.part = part
        self.cut = cut
        self.moved = moved
        self.early_bytes = 0  # captured because the target waited for it
        self.number = 0  # of this part in the guard
        self._data = data
        self._arenas = arenas
        self._space = space
        self._ring = Ring(ring)
        self._in_background = in_background
        self._turn = turn
        self._chunk_bytes = cut.chunk_bytes
        self._batch_chunks = max(1, BATCH_BYTES // cut.chunk_bytes)
        self._pieces: list[tuple[Memory, int, int]] = []
        ends = [bisect_left(moved, first) for first in cut.first]
        self.left_of_piece = [end - begin for begin, end in pairwise(ends)]
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._guard: Guard | None = None
        self._serving: Progress | None = None
        self._thread: threading.Thread | None = None

    def start(self, guard: Guard, number: int) -> None:
        """Serve from now on what the target waits for."""
        from woodfrog._native import transfer

        self.number, self._guard = number, guard
        self._pieces = self._data.pieces(self.part)
        for piece, left in enumerate(self.left_of_piece):
            if not left:
                self._data.release_piece(self.part, piece)
        self._serving = transfer.Progress()
        self._thread = threading.Thread(target=self._serve, name=f"capture-{number}", daemon=True)
        self._thread.start()

    def drain(self, moving: Progress) -> None:
        """Everything that nobody waits for, and what the ring holds, to the arena; returns when all is there."""
        guard = self._guarding
        while True:
            if self._failure is not None:
                raise self._failure
            self._turn()
            entry = self._ring.oldest(only_when_half_full=True)
            runs = guard.take(self.number, self._batch_chunks) if entry is None else []
            entry = entry or (None if runs else self._ring.oldest())
            if entry is not None:
                self._drain_ring(entry, moving)
            elif runs:
                fault_point("checkpoint.cow.batch")
                for first, count in joined(runs):
                    self._drain_memory(first, count, moving)
                self._captured(runs)
            elif guard.left(self.number) == 0 and self._ring.empty:
                return
            else:  # the other thread has the rest in hand
                with self._changed:
                    self._changed.wait(LOOK_S)
                if moving.cancelled:
                    raise CancelledOperationError("drain was cancelled")

    def wait_until_captured(self) -> None:
        """Return when nothing of it is left in the target's memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._guarding.left(self.number) == 0)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """After the guard has finished: the thread is joined and the ring's memory given back. Safe to repeat."""
        if self._serving is not None:
            self._serving.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ring.release()

    # ── capturing ───────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        guard = self._guarding
        try:
            while runs := guard.take_wanted(self.number, self._batch_chunks):
                fault_point("checkpoint.cow.wanted")
                for first, count in joined(runs):
                    self._capture(first, count)
                    self.early_bytes += self.cut.bytes_at(self.moved[first : first + count])
                self._captured(runs)
        except Exception as failure:  # noqa: BLE001 - raised by the thread that drains
            self._failure = failure
            guard.finish()  # the target goes on; this snapshot is lost
            with self._changed:
                self._changed.notify_all()

    def _capture(self, first: int, count: int) -> None:
        """Into the ring as far as it has room, else to the arena at once."""
        assert self._serving is not None
        while count:
            slot, room = self._ring.room(count)
            if not room:
                self._drain_memory(first, count, self._serving)
                return
            self._copy(first, room, slot)
            self._ring.push(first, room, slot)
            first, count = first + room, count - room

    def _copy(self, first: int, count: int, slot: int) -> None:
        from woodfrog._native import transfer

        pieces, numbers = self._lying(first, count)
        places = self._ring.places(slot, count)
        transfer.capture_chunks(pieces, packed(numbers), places, chunk_bytes=self._chunk_bytes, progress=self._serving)

    def _drain_memory(self, first: int, count: int, progress: Progress) -> None:
        self._to_arena(first, *self._lying(first, count), progress)

    def _drain_ring(self, entry: tuple[int, int, int], moving: Progress) -> None:
        first, count, slot = entry
        self._to_arena(first, *self._ring.holding(slot, count), moving)
        self._ring.pop()

    def _to_arena(
        self, first: int, pieces: list[tuple[Memory, int, int]], numbers: array[int], progress: Progress
    ) -> None:
        """These chunks of `pieces`, to where the chunk `first` and those behind it have their place."""
        drain_pieces(
            pieces, numbers, self._arenas, self._space, first, self._chunk_bytes, progress,
            background=self._in_background(),
        )  # fmt: skip

    def _captured(self, runs: Sequence[Run]) -> None:
        self._guarding.captured(self.number, list(runs))
        with self._changed:
            for first, count in joined(runs):
                self._count_off(first, count)
            self._changed.notify_all()

    def _count_off(self, first: int, count: int) -> None:
        """Memory of which everything is captured is given back, should the target have freed it meanwhile."""
        piece = self._piece_at(first)
        while count:
            here = min(count, bisect_left(self.moved, self.cut.first[piece + 1], first) - first)
            self.left_of_piece[piece] -= here
            if here and not self.left_of_piece[piece]:
                self._data.release_piece(self.part, piece)
            first, count, piece = first + here, count - here, piece + 1

    def _lying(self, first: int, count: int) -> tuple[list[tuple[Memory, int, int]], array[int]]:
        """The pieces that these chunks lie in, and the chunks' numbers counted through those. What lies between two of
        them with nothing to capture is not ours any more."""
        pieces: list[tuple[Memory, int, int]] = []
        numbers = array("I")
        counted, end = 0, first + count
        while first < end:
            piece = self._piece_at(first)
            begin, behind = self.cut.first[piece : piece + 2]
            last = bisect_left(self.moved, behind, first, end)
            numbers.extend(position - begin + counted for position in self.moved[first:last])
            pieces.append(self._pieces[piece])
            counted += behind - begin
            first = last
        return pieces, numbers

    def _piece_at(self, index: int) -> int:
        return bisect_right(self.cut.first, self.moved[index]) - 1

    @property
    def _guarding(self) -> Guard:
        assert self._guard is not None
        return self._guard


class CopyOnWrite:
    """All devices of one checkpoint. In this order: `add`, `begin`, then side by side `arm` (once the target has its
    memory back) and `drain` of each part followed by `end`; `close` whatever happened."""

    def __init__(
        self,
        data: GpuData,
        members: Sequence[Member],
        *,
        in_background: Callable[[], bool],
        turn: Callable[[], object],
        let_drain: Callable[[], object],
    ) -> None:
        """`turn` is called before each part of the drain, and may wait until `let_drain` is called."""
        self._data = data
        self._members = members
        self._in_background = in_background
        self._turn = turn
        self._let_drain = let_drain
        self._parts: list[GuardedPart] = []
        self._guard: Guard | None = None
        self._packed: dict[int, list[Message]] = {}  # what arms each member
        self._lock = threading.Lock()  # of the next two
        self._armed: list[Member] = []
        self._ended = False
        self.kernels: list[KernelUse] = []  # launched while it was armed
        self.waits, self.waited_s = 0, 0.0

    @property
    def active(self) -> bool:
        """Whether any device is captured in this way."""
        return bool(self._parts)

    def add(
        self, part: DevicePart, cut: Cut, moved: array[int], arenas: Arenas, space: Space, ring: Staging | None
    ) -> GuardedPart:
        """This device is. `ring` is taken over."""
        guarded = GuardedPart(
            self._data,
            part,
            cut,
            moved,
            arenas,
            space,
            ring,
            in_background=self._in_background,
            turn=self._turn,
        )
        self._parts.append(guarded)
        return guarded

    def begin(self) -> None:
        """From here on the target may ask."""
        from woodfrog._native import transfer

        if not self._parts:
            return
        self._guard = transfer.Guard(
            [(list(part.part.sizes), packed(part.moved)) for part in self._parts],
            chunk_bytes=self._parts[0].cut.chunk_bytes,
        )
        for number, part in enumerate(self._parts):
            part.start(self._guard, number)
        self._packed = {
            member.number: AgentLink.packed_guard(list(self._guarded_of(member)), self._guard.fd)
            for member in self._members
        }

    def arm(self) -> None:
        """The target has its memory, and its gates are closed. A process whose interposer cannot do it waits until all
        is captured instead, and with it the others."""
        if self._guard is None:
            return
        with self._lock:
            if self._ended:
                return
            try:
                side_by_side([member for member in self._members if member.alive], self._arm_one)
                fault_point("checkpoint.cow.armed")
                return
            except WoodfrogError as failure:
                if failure.details.get("status") not in ("bad_message", "unsupported"):
                    raise
                log.warning("%s; the target waits until everything is captured", failure.reason)
        self._let_drain()
        for part in self._parts:
            part.wait_until_captured()

    def _arm_one(self, member: Member) -> None:
        assert self._guard is not None
        link = member.link()
        link.guard_end()  # changes nothing; an older interposer refuses it, where it would answer each batch of `guard`
        link.guard_packed(self._packed[member.number])
        self._armed.append(member)

    def _guarded_of(self, member: Member) -> Iterator[Guarded]:
        assert self._guard is not None
        places: dict[int, tuple[int, int]] = {}  # by the handle that stands for the memory
        for part in self._parts:
            rows = zip(part.part.indices, self._guard.places(part.number), part.left_of_piece, strict=True)
            places.update({index: place for index, place, left in rows if left})
        for index, handle in enumerate(self._data.handles):
            place = places.get(self._data.owners[index])
            if place is not None and member.owns(handle):
                yield Guarded(member.own_handle(handle).handle, *place)

    def end(self) -> None:
        """Everything is captured: the target need not ask any more, and its memory is its own."""
        if self._guard is None:
            return
        self._guard.finish()
        with self._lock:
            self._ended = True
            armed, self._armed = self._armed, []
            self._disarm(armed)
            if armed:
                self.waits, self.waited_s = self._guard.waits, self._guard.waited_s
        for part in self._parts:
            part.close()
        self._data.release()
        if self._guard.given_up:
            raise UnseenWriteError("the target went on without waiting any longer for its memory to be captured")

    def _disarm(self, armed: Sequence[Member]) -> None:
        for member in armed:
            # A process that has ended, or whose connection is gone, has disarmed itself.
            with suppress(WoodfrogError):
                self.kernels += member.link().guard_end()

    def close(self) -> None:
        """The target goes on, whatever is captured. Safe to repeat."""
        if self._guard is None:
            for part in self._parts:
                part.close()
            return
        self._guard.finish()
        for part in self._parts:
            part.close()
        with self._lock:
            self._ended = True
            armed, self._armed = self._armed, []
        self._disarm(armed)

    def missed(self) -> UnseenWriteError:
        """What to raise when something that was captured is not what was hashed."""
        names = [kernel.name for kernel in self.kernels]
        if names:
            more = f" and {len(names) - MOST_SUSPECTS} more" if len(names) > MOST_SUSPECTS else ""
            whom = f"one of the kernels launched meanwhile ({', '.join(names[:MOST_SUSPECTS])}{more})"
        else:
            whom = "something other than a kernel launched by a call of the driver"
        return UnseenWriteError(
            f"{whom} wrote memory that its arguments do not point to, before it was captured",
            advice="checkpoint such a target with --concurrent stop or copy",
            details={"kernels": names},
        )

    def to_dict(self) -> dict[str, Any]:
        """For the result; empty when no device was captured in this way."""
        if not self.active:
            return {}
        return {
            "waits": self.waits,
            "waited_s": self.waited_s,
            "early_bytes": sum(part.early_bytes for part in self._parts),
        }


class Ring:
    """The slots of a Staging as a ring: one thread pushes, one takes the oldest out. Without a Staging it has none."""

    def __init__(self, staging: Staging | None) -> None:
        self._staging = staging
        self._slots = staging.slots if staging is not None else 0
        self._head = self._used = 0
        self._entries: deque[tuple[int, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        with self._lock:
            return not self._entries

    def room(self, count: int) -> tuple[int, int]:
        """(slot, number) of free slots in a row, at most `count`."""
        with self._lock:
            tail = self._head - self._used
            end = self._slots if tail >= 0 else tail + self._slots
            return self._head, min(count, end - self._head)

    def push(self, first: int, count: int, slot: int) -> None:
        """Chunks first … first+count-1 lie in the slots that `room` gave."""
        with self._lock:
            self._head = (self._head + count) % self._slots
            self._used += count
            self._entries.append((first, count, slot))

    def oldest(self, *, only_when_half_full: bool = False) -> tuple[int, int, int] | None:
        """(first, count, slot) of what has been in it for the longest time."""
        with self._lock:
            if not self._entries or (only_when_half_full and 2 * self._used < self._slots):
                return None
            return self._entries[0]

    def pop(self) -> None:
        """The oldest has left it."""
        with self._lock:
            self._used -= self._entries.popleft()[1]

    def places(self, slot: int, count: int) -> list[tuple[Memory, int, int]]:
        """These slots, as `capture_chunks` takes them."""
        assert self._staging is not None
        return self._staging.places_at(slot, count)

    def holding(self, slot: int, count: int) -> tuple[list[tuple[Memory, int, int]], array[int]]:
        """These slots, as `drain_pieces` takes them."""
        assert self._staging is not None
        return self._staging.holding(range(slot, slot + count))

    def release(self) -> None:
        """Give the memory back. Nothing happens a second time."""
        if self._staging is not None:
            self._staging.release()


def joined(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """(first, count) of runs whose chunks follow each other as one."""
    begin = end = 0
    for first, count, _, _ in runs:
        if first != end:
            if end > begin:
                yield begin, end - begin
            begin = first
        end = first + count
    if end > begin:
        yield begin, end - begin
