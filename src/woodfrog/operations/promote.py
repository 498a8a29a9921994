"""Promotion: what of a running target's device memory lies on host memory moves to the GPU, in the gaps of its work.

A target restored with `--mode mapped` runs before its data is on the GPU: its addresses are mapped to host memory. One
batch after the other: device memory is made for it, the target comes to rest, the batch is copied, the agent maps the
device memory in the place of the host memory, the target runs on. Each batch stands for itself: whatever fails, the
target is right with what it has, and what is left can be promoted later. What lies on host memory is asked of the
agent, so that a daemon that starts goes on where its predecessor was.

Must never let the target run while a batch is copied: what it wrote then would be lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from woodfrog.errors import NoSpaceError, TargetLostError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.image.profile import read_profile, write_profile
from woodfrog.operations.context import Context
from woodfrog.operations.data import close_all
from woodfrog.operations.frozen import FrozenTarget, OnOneTarget
from woodfrog.operations.limits import PhaseLimits
from woodfrog.operations.members import Member, side_by_side
from woodfrog.operations.notes import HandleNote, Notes, Record, promote_key
from woodfrog.operations.phases import CancelledOperationError, Emit, Phase, Runner, as_woodfrog_error
from woodfrog.target.memory import Handle

if TYPE_CHECKING:
    from woodfrog._native.transfer import Memory
    from woodfrog.store.store import Store

log = logging.getLogger(__name__)

# Copied while the target waits: 5 ms of a bus of 55 GB/s. A mapping is replaced as a whole, so no handle that is larger
# may lie on host memory; WOODFROG_PAUSE_BYTES sets another bound, for tests.
PAUSE_BYTES = 256 << 20
# Handles in a batch: replacing one takes some 60 us (FACTS §1: 2000 pieces in 120 ms).
BATCH_HANDLES = 64
# The target runs at least as long between two batches as it waited for the last one.
GAP = 1.0
QUIESCE_TIMEOUT_S = 10.0
# So often in a row it may fail to come to rest, until its promotion is given up for now.
MOST_TIMEOUTS = 3
KINDS = ("allocation", "slab")
# Modes of a restore: the target runs once its data is on the GPU, or before that. Ordered differs from mapped in what
# moves first: what launches have named, then what the image's profile names, in its order.
EAGER, MAPPED, ORDERED = "eager", "mapped", "ordered"
MODES = (EAGER, MAPPED, ORDERED)


def pause_bytes() -> int:
    """How much may be copied while a target waits."""
    return int(os.environ.get("WOODFROG_PAUSE_BYTES", PAUSE_BYTES))


def movable(handles: Sequence[HandleNote]) -> list[int]:
    """The indices of those that may lie on host memory for a while: nobody else's, and no larger than a pause allows.
    Memory of the application's own cuMemCreate is what it says it is."""
    limit = pause_bytes()
    return [
        index
        for index, handle in enumerate(handles)
        if handle.kind in KINDS and not handle.memory and handle.host_node < 0 and handle.size <= limit
    ]


@dataclass(frozen=True)
class PromoteRequest:
    """The target; its notes name the image and the mode."""

    notes: Notes


@dataclass
class PromoteStats:
    """Bytes and seconds. `left_bytes` stay on host memory; `reason`: why, if there is a reason."""

    total_bytes: int = 0
    moved_bytes: int = 0
    left_bytes: int = 0
    batches: int = 0
    pause_s: float = 0.0
    longest_pause_s: float = 0.0
    seconds: float = 0.0
    ended_unix_s: float = 0.0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Piece:
    """One handle that lies on host memory. Owns `fd` until `close`."""

    member: Member
    handle: Handle  # as its agent knows it
    fd: int

    @property
    def number(self) -> int:
        """As the image numbers it."""
        return self.member.number_of(self.handle.handle)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass
class Moving:
    """Bytes, as a progress bar wants them."""

    bytes_total: int = 0
    bytes_done: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class Promote(OnOneTarget):
    """One promotion; use once."""

    def __init__(self, context: Context, request: PromoteRequest, emit: Emit | None = None) -> None:
        self._context = context
        self._request = request
        self.runner = Runner("promote", emit)
        self._frozen = FrozenTarget(context, request.notes)
        self._record = Record(context.keeper, promote_key(request.notes.pid, request.notes.start_ticks), exists=True)
        self._pieces: list[Piece] = []
        self._moving = Moving()
        self._replaced: set[int] = set()  # as the image numbers them
        self._left = False  # launches are looked at no more
        self._used: list[int] = []  # what they have named, in that order
        self.stats = PromoteStats()

    def run(self) -> dict[str, Any]:
        """Do it; a result as `daemon.sock` carries it. A WoodfrogError leaves the target running, unless that says
        otherwise, with what has not moved on host memory."""
        limits = PhaseLimits()
        begun = time.monotonic()
        try:
            self.runner.run(
                [
                    Phase("survey", self._survey, limit_s=limits.short_s),
                    Phase("move", self._move, limit_s=limits.long_s),
                    Phase("commit", self._commit, limit_s=limits.short_s, commits=True),
                ]
            )
        except WoodfrogError as failure:
            raise self._settle(failure) from failure
        finally:
            self.stats.seconds, self.stats.ended_unix_s = time.monotonic() - begun, time.time()
            self._close()
        log.info("promotion of %s: %s", self._target.notes.name, self.stats)
        return self._result()

    # ── phases ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _survey(self) -> None:
        """What lies on host memory now, with descriptors of it."""
        with self._unless_it_dies():
            self._target.check_alive()
        for member in list(self._target.members):
            with self._unless_it_dies(), member.link().hosted() as hosted:
                fds = hosted.fds.take()
                self._pieces += [Piece(member, one, fd) for one, fd in zip(hosted.handles, fds, strict=True)]
        if self._request.notes.mode == ORDERED:
            self._put_first(self._profile())
        self.stats.total_bytes = self._moving.bytes_total = sum(piece.handle.size_bytes for piece in self._pieces)

    def _move(self) -> None:
        timeouts = 0
        with self.runner.counting("move", self._moving):
            while self._pieces and not self.stats.reason:
                pause_s = 0.0
                try:
                    with self._unless_it_dies():
                        if self._request.notes.mode == ORDERED:
                            self._put_first(self._accessed())
                        pause_s = self._move_batch(self._next_batch())
                        timeouts = 0
                except TimeoutExceededError as failure:
                    timeouts += 1
                    log.info("%s did not come to rest for its promotion: %s", self._target.notes.name, failure.reason)
                    if timeouts == MOST_TIMEOUTS or failure.details.get("status") != "timeout":
                        raise
                    pause_s = QUIESCE_TIMEOUT_S
                if self._moving.cancelled.wait(GAP * pause_s if self._pieces else 0):
                    raise CancelledOperationError("the promotion was cancelled")

    def _commit(self) -> None:
        """What other processes share by now stays on host memory for good, and is nobody's business any more."""
        self._leave_out_dead()
        self._leave_access()
        self._keep_profile()
        for member in list(self._target.members):
            with self._unless_it_dies(), member.link().hosted() as hosted:
                self.stats.left_bytes += hosted.size_bytes
        if not self.stats.reason:
            self._record.drop()
            if self.stats.left_bytes:
                self.stats.reason = "the application shares it with other processes"

    @contextmanager
    def _unless_it_dies(self) -> Iterator[None]:
        """What is asked of a process that ends meanwhile is not asked, as long as others live."""
        try:
            yield
        except TargetLostError as lost:
            if not self._leave_out_dead():
                raise
            log.info("the promotion of %s goes on without a process of it: %s", self._target.notes.name, lost)

    def _leave_out_dead(self) -> bool:
        """Processes that have ended are none of the target's any more; whether there are such, and others that live."""
        target = self._target
        living = [member for member in target.members if member.alive]
        if not living or len(living) == len(target.members):
            return False
        for piece in self._pieces:
            if piece.member not in living:
                piece.close()
        self._pieces = [piece for piece in self._pieces if piece.member in living]
        target.members = living
        return True

    # ── the order ───────────────────────────────────────────────────────────────────────────────────────────────

    def _put_first(self, numbers: Sequence[int]) -> None:
        """These pieces, in that order, before the others."""
        rank = {number: place for place, number in enumerate(numbers)}
        self._pieces.sort(key=lambda piece: rank.get(piece.number, len(rank)))

    def _accessed(self) -> list[int]:
        """What launches have named so far."""
        return [number for member in self._target.members for number in self._accessed_by(member)]

    @staticmethod
    def _accessed_by(member: Member) -> list[int]:
        return [member.number_of(one) for one in member.link().accessed()]

    def _profile(self) -> list[int]:
        notes = self._request.notes
        store = self._store()
        return read_profile(store, notes.image, notes.operation_id) if store else []

    def _keep_profile(self) -> None:
        """The order of first use, for the next restore of the image."""
        notes = self._request.notes
        if self._used and (store := self._store()):
            write_profile(store, notes.image, notes.operation_id, self._used)

    def _store(self) -> Store | None:
        """The image's; None when it is not known or not there: its profile is a hint."""
        notes = self._request.notes
        if not notes.image:
            return None
        try:
            return self._context.store(notes.store).store
        except (WoodfrogError, OSError) as failure:
            log.warning("the profile of %s cannot be had: %s", notes.image, failure)
            return None

    def _leave_access(self) -> None:
        """Launches are looked at no more; what they have named so far is kept. At rest that costs nothing from then
        on, else a branch a launch until the target is at rest again."""
        if self._left:
            return
        self._left = True
        for member in list(self._target.members):
            with self._unless_it_dies():
                self._used += self._accessed_by(member)
                member.link().follow_access(False)

    # ── one batch ───────────────────────────────────────────────────────────────────────────────────────────────

    def _next_batch(self) -> list[Piece]:
        """The first piece, and those behind it on the same device as far as a pause allows."""
        limit = pause_bytes()
        batch: list[Piece] = []
        size = 0
        for piece in self._pieces:
            if len(batch) == BATCH_HANDLES:
                break
            if not batch or (size + piece.handle.size_bytes <= limit and self._uuid(piece) == self._uuid(batch[0])):
                batch.append(piece)
                size += piece.handle.size_bytes
        return batch

    def _move_batch(self, batch: list[Piece]) -> float:
        """How long the target waited. A batch that finds no room on the GPU is tried by half."""
        device = self._context.devices.by_uuid(self._uuid(batch[0]))
        sizes = [piece.handle.size_bytes for piece in batch]
        made: list[Memory] = []
        fds: list[int] = []
        try:
            try:
                made += device.create_memories(sizes)
            except RuntimeError as failure:
                full = as_woodfrog_error(failure, "move")
                if not isinstance(full, NoSpaceError):
                    raise
                if len(batch) == 1:
                    self.stats.reason = full.reason
                    log.warning("the promotion of %s stops: %s", self._target.notes.name, full.reason)
                    return 0.0
                return self._move_batch(batch[: len(batch) // 2])
            fds += [memory.export_fd() for memory in made]
            host = device.import_memories([piece.fd for piece in batch], sizes)
            fault_point("promote.batch.made")
            try:
                pause_s = self._at_rest(lambda: self._exchange(batch, host, made, fds, device.granularity_bytes))
            finally:
                for memory in host:
                    memory.release()
        finally:
            close_all(fds)
            for memory in made:
                memory.release()
        self._done(batch, pause_s)
        return pause_s

    def _at_rest(self, work: Callable[[], None]) -> float:
        """`work` while the target waits; for how long that was."""
        target = self._target
        begun = time.monotonic()
        try:
            target.quiesce(QUIESCE_TIMEOUT_S)
            work()
            target.return_and_resume()
        except BaseException:
            self._let_go()
            raise
        return time.monotonic() - begun

    def _exchange(
        self, batch: Sequence[Piece], host: Sequence[Memory], made: Sequence[Memory], fds: Sequence[int], unit: int
    ) -> None:
        """Copy, then the new memory takes the old one's place."""
        from woodfrog._native import transfer

        fault_point("promote.batch.at_rest")
        pieces = [(memory, 0, memory.size_bytes) for memory in host]
        slots = [(memory, 0, memory.size_bytes) for memory in made]
        positions = array("I", range(sum(memory.size_bytes for memory in host) // unit))
        transfer.capture_chunks(pieces, positions.tobytes(), slots, chunk_bytes=unit)
        fault_point("promote.batch.copied")
        owners = sorted(zip(batch, fds, strict=True), key=lambda one: one[0].member.number)
        mine = {number: list(group) for number, group in groupby(owners, key=lambda one: one[0].member.number)}

        def replace(number: int) -> list[int]:
            pairs = mine[number]
            member = pairs[0][0].member
            found = member.link().replace_memory([one.handle for one, _ in pairs], [fd for _, fd in pairs])
            return [member.number_of(handle) for handle in found]

        for numbers in side_by_side(list(mine), replace):
            self._replaced.update(numbers)
        if len(batch) == len(self._pieces):
            self._leave_access()
        fault_point("promote.batch.replaced")

    def _let_go(self) -> None:
        """Gates open, whatever has happened: a target that owns its memory runs on once the link is closed."""
        for member in self._target.members:
            link = self._context.agents.link(member.pid)
            if link is not None and link.state != "running":
                try:
                    link.resume()
                except WoodfrogError as failure:
                    log.warning("process %d does not answer: %s", member.pid, failure.reason)
                    link.close()

    def _done(self, batch: Sequence[Piece], pause_s: float) -> None:
        stats, size = self.stats, sum(piece.handle.size_bytes for piece in batch)
        moved_bytes = sum(piece.handle.size_bytes for piece in batch if piece.number in self._replaced)
        moved = {id(piece) for piece in batch}
        self._pieces = [piece for piece in self._pieces if id(piece) not in moved]
        for piece in batch:
            piece.close()
        stats.batches += 1
        log.debug("batch %d of %s: %s", stats.batches, self._target.notes.name, [piece.number for piece in batch])
        stats.moved_bytes += moved_bytes
        stats.pause_s += pause_s
        stats.longest_pause_s = max(stats.longest_pause_s, pause_s)
        self._moving.bytes_done += size

    # ── the rest ────────────────────────────────────────────────────────────────────────────────────────────────

    def _uuid(self, piece: Piece) -> str:
        return self._target.notes.devices[piece.member.note.job_ordinal(piece.handle.device)]

    def _settle(self, failure: WoodfrogError) -> WoodfrogError:
        notes = self._target.notes
        failure.pid = failure.pid or notes.pid
        self.stats.reason = failure.reason
        self.stats.left_bytes = sum(piece.handle.size_bytes for piece in self._pieces)
        if not self._target.alive:
            self._record.drop()
            if isinstance(failure, TargetLostError):
                return failure
            return TargetLostError(
                f"process {notes.pid} ended while it was promoted", pid=notes.pid, target_state=TargetState.GONE
            )
        if failure.target_state == TargetState.FROZEN:
            failure.advice = "memory of it could not be mapped again: end the process and restore the image once more"
        else:
            failure.target_state = TargetState.RUNNING
            failure.advice = failure.advice or (
                "it runs on with the rest of its memory on the host, slower and right; "
                "`woodfrog resume` goes on with the promotion"
            )
        return failure

    def _close(self) -> None:
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.close()

    def _result(self) -> dict[str, Any]:
        notes = self._target.notes
        return {
            "name": notes.name,
            "pid": notes.pid,
            "state": TargetState.RUNNING,
            "phases": dict(self.runner.times),
            "bytes": self.stats.moved_bytes,
            "promotion": self.stats.to_dict(),
        }
