"""Custom storage in an operation: the driver lends a process's GPU memory, and the transfer engine copies it.

Of processes that woodfrog did not start, on drivers that offer it (driver/storage.py). A loan of a checkpoint ends with
the driver letting go of the memory, copied or not, so the order is: room in the arena that is enough for whatever will
be lent, the keeper told where it is, the loan, the copy, the keeper told what was lent, and only then the loan's end. A
daemon that is killed finds the data by its notes. A loan of a restore that is not filled is taken back at once: what is
in the arena counts until the target is unlocked. Must never end a loan before the keeper knows what was copied.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from woodfrog.driver import devices as driver_devices
from woodfrog.driver import storage
from woodfrog.driver.process import ProcessState
from woodfrog.errors import NoSpaceError, RefusedError, TargetState, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.image.manifest import MEMBER_SHIFT, FileRecord, member_of
from woodfrog.image.writer import MappedFile
from woodfrog.operations.context import Context
from woodfrog.operations.members import Member
from woodfrog.operations.notes import ExtentNote, HandleNote, Notes, Record
from woodfrog.operations.space import Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Memory

log = logging.getLogger(__name__)

SWITCH = "WOODFROG_CUSTOM_STORAGE"  # 1: use it; of the daemon's environment
COPY_BYTES = 64 << 20  # of one copy, as operations.data has it
KIND = "allocation"


def wanted() -> bool:
    """Whether processes that woodfrog did not start go this way here."""
    return os.environ.get(SWITCH) == "1" and storage.available()


class LentMemory:
    """What the driver lends, or has lent, of one target's processes; where it lies is in the notes of the target.

    `spaces` (by the notes' device ordinals) are the caller's to free. On each device all data lies back to back, in the
    order of the notes' handles."""

    def __init__(self, context: Context, notes: Notes, spaces: dict[int, Space]) -> None:
        self._context = context
        self._notes = notes
        self.spaces = spaces

    @classmethod
    def prepared(
        cls, context: Context, notes: Notes, spaces: dict[int, Space], pids: Sequence[int]
    ) -> LentMemory | None:
        """With room for what will be lent of processes that run; None where the arena has not so much: the driver is to
        keep it then, as older ones do."""
        loan = cls(context, notes, spaces)
        try:
            loan.reserve(pids)
        except NoSpaceError as failure:
            log.info("the driver keeps the memory of %s: %s", notes.name, failure.reason)
            return None
        return loan

    @classmethod
    def of_image(cls, context: Context, notes: Notes, records: Sequence[FileRecord]) -> LentMemory:
        """With room for what an image has of one process; `places` says where it is to be put."""
        loan = cls(context, notes, {})
        try:
            for number, record in enumerate(records):
                uuids = list(context.devices.all())
                if record.lent_from not in uuids:
                    raise RefusedError(
                        f"the image has memory of GPU {driver_devices.format_uuid(bytes.fromhex(record.lent_from))}, "
                        "which is not here, and its driver lends it there only",
                        advice="restore it on the machine with that GPU",
                    )
                ordinal = uuids.index(record.lent_from)
                notes.devices[ordinal] = record.lent_from
                notes.handles.append(HandleNote(number, record.size_bytes, ordinal, KIND))
                node = context.devices.node_of(record.lent_from)
                loan.spaces[ordinal] = Space.take(
                    context.arenas, record.size_bytes, notes.user, node=node, contiguous=True
                )
        except BaseException:
            loan.free()
            raise
        notes.extents = loan._extents()
        return loan

    def places(self) -> list[tuple[int, int]]:
        """For each handle, in one piece, the descriptor of its arena and where in it the memory lies."""
        found = []
        for begin, handle in zip(self._begins(), self._notes.handles, strict=True):
            ((node, offset, _),) = self.spaces[handle.device].pieces(begin, handle.size)
            found.append((self._context.arenas.arena(node).fd, offset))
        return found

    def for_image(self, pid: int) -> list[MappedFile]:
        """What was taken out of process `pid`, the only one, for ImageWriter.commit."""
        return [
            MappedFile(
                path=f"gpu-{number}.mem",
                descriptor=fd,
                size_bytes=handle.size,
                mapped_as="",
                pid=pid,
                lent_from=self._notes.devices[handle.device],
                offset=offset,
            )
            for number, (handle, (fd, offset)) in enumerate(zip(self._notes.handles, self.places(), strict=True))
        ]

    def free(self) -> None:
        """Give the room back. Safe to repeat."""
        for space in self.spaces.values():
            space.free()
        self.spaces.clear()

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, pids: Sequence[int]) -> None:
        """Room for whatever the processes have on the GPUs now, at least. NoSpaceError takes nothing more. Asked for
        while the target still runs, so that it need not wait for it, and again once it cannot allocate any more."""
        bounds = {uuid: _used_bytes(self._context, uuid, pids) for uuid in self._context.devices.all()}
        for ordinal, (uuid, size_bytes) in enumerate(bounds.items()):
            self._notes.devices[ordinal] = uuid
            if not size_bytes:
                continue
            if ordinal in self.spaces:
                if self.spaces[ordinal].size_bytes >= size_bytes:
                    continue
                self.spaces.pop(ordinal).free()  # there is nothing in it yet, and an image wants it in one piece
            node = self._context.devices.node_of(uuid)
            self.spaces[ordinal] = Space.take(
                self._context.arenas, size_bytes, self._notes.user, node=node, contiguous=True
            )

    def tell(self, record: Record) -> None:
        """The keeper hears where the data is going to be."""
        self._notes.extents = self._extents()
        record.update(self._notes)

    def take_out(self, members: Sequence[Member], record: Record) -> None:
        """Locked → checkpointed, each process's memory in the arena. One after the other: the room is for all."""
        from woodfrog._native import transfer

        for member in members:
            with self._whole_or_lost(member), storage.begin_checkpoint(member.pid) as lent:
                known = len(self._notes.handles)
                handles = [
                    HandleNote(member.number << MEMBER_SHIFT | number, piece.size_bytes, self._ordinal(piece), KIND)
                    for number, piece in enumerate(lent.pieces)
                ]
                self._notes.handles += handles
                try:
                    with self._views(lent) as memories:
                        fault_point("lent.begun")
                        self._copy(transfer.drain, memories, range(known, known + len(handles)))
                except BaseException:
                    del self._notes.handles[known:]
                    raise
                fault_point("lent.copied")
                record.update(self._notes)
            fault_point("lent.completed")

    def trim(self) -> None:
        """Give back what of the room was not needed."""
        for ordinal, space in self.spaces.items():
            space.trim(sum(handle.size for handle in self._notes.handles if handle.device == ordinal))
        self._notes.extents = self._extents()
        used = {handle.device for handle in self._notes.handles}
        self._notes.devices = {ordinal: uuid for ordinal, uuid in self._notes.devices.items() if ordinal in used}

    @property
    def size_bytes(self) -> int:
        return sum(handle.size for handle in self._notes.handles)

    @contextmanager
    def _whole_or_lost(self, member: Member) -> Iterator[None]:
        """A failure before the loan leaves the target locked; one within it has lost what was not copied."""
        try:
            yield
        except Exception as failure:
            if not self.has(member) and member.driver.state() is ProcessState.CHECKPOINTED:
                raise WoodfrogError(
                    f"GPU memory of process {member.pid} could not be copied, and the driver has let go of it",
                    advice="the process cannot go on: end it, and restore an earlier image",
                    pid=member.pid,
                    target_state=TargetState.FROZEN,
                ) from failure
            raise

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def bring_in(self, member: Member) -> None:
        """Checkpointed → locked, its memory filled from the arena. After a failure it is checkpointed still."""
        from woodfrog._native import transfer

        mine = [index for index, one in enumerate(self._notes.handles) if member_of(one.handle) == member.number]
        try:
            with storage.begin_restore(member.pid) as lent:
                handles = [self._notes.handles[index] for index in mine]
                found = [(self._ordinal(piece), piece.size_bytes) for piece in lent.pieces]
                if found != [(one.device, one.size) for one in handles]:
                    raise WoodfrogError(
                        f"the driver wants {found} back of process {member.pid}, and "
                        f"{[(one.device, one.size) for one in handles]} was taken",
                        advice="its data is kept; try again, or end the process",
                        pid=member.pid,
                        target_state=TargetState.FROZEN,
                    )
                with self._views(lent) as memories:
                    self._copy(transfer.refill, memories, mine)
                fault_point("lent.refilled")
        except BaseException:
            self.discard(member)
            raise

    def discard(self, member: Member) -> None:
        """A process that was brought in and has not been unlocked goes back; its memory there is let go, that in the
        arena is the same."""
        if member.driver.state() is ProcessState.LOCKED:
            with storage.begin_checkpoint(member.pid):
                pass

    def has(self, member: Member) -> bool:
        """Whether memory of this process is in the arena."""
        return any(member_of(handle.handle) == member.number for handle in self._notes.handles)

    # ── both ────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _views(self, lent: storage.Lent) -> Iterator[list[Memory]]:
        """The loan as the transfer engine takes it, until no copy uses it."""
        with ExitStack() as open_:
            memories = []
            for piece in lent.pieces:
                device = self._context.devices.by_uuid(self._context.devices.by_ordinal(piece.ordinal))
                memories.append(device.view_memory(piece.address, piece.size_bytes))
                open_.callback(memories[-1].release)
            yield memories

    def _copy(self, copy: Any, memories: Sequence[Memory], indices: Sequence[int]) -> None:
        rows: dict[int, list[tuple[Memory, int, int, int]]] = {}
        begins = self._begins()
        for memory, index in zip(memories, indices, strict=True):
            handle = self._notes.handles[index]
            done = 0
            for node, offset, size in self.spaces[handle.device].pieces(begins[index], handle.size):
                rows.setdefault(node, []).append((memory, done, offset, size))
                done += size
        for node, extents in rows.items():
            copy(extents, self._context.arenas.arena(node), chunk_bytes=COPY_BYTES)

    def _begins(self) -> list[int]:
        """Where the memory of each handle begins in the space of its device."""
        begins = [0] * len(self._notes.handles)
        for device in self.spaces:
            mine = [index for index, handle in enumerate(self._notes.handles) if handle.device == device]
            sizes = (self._notes.handles[index].size for index in mine)
            for index, begin in zip(mine, accumulate(sizes, initial=0), strict=False):
                begins[index] = begin
        return begins

    def _ordinal(self, piece: storage.Piece) -> int:
        """The notes' number of the device that a piece is on."""
        uuid = self._context.devices.by_ordinal(piece.ordinal)
        return next(ordinal for ordinal, one in self._notes.devices.items() if one == uuid)

    def _extents(self) -> list[ExtentNote]:
        return [
            ExtentNote(ordinal, extent.node, extent.offset, extent.size)
            for ordinal, space in sorted(self.spaces.items())
            for extent in space.extents
        ]


def _used_bytes(context: Context, uuid: str, pids: Sequence[int]) -> int:
    """GPU memory that these processes have at most: by NVML, or where it does not tell, all that is used there."""
    told = [use.used_bytes for use in driver_devices.users(bytes.fromhex(uuid)) if use.pid in pids]
    if told and all(used is not None for used in told):
        return sum(used or 0 for used in told)
    device = context.devices.by_uuid(uuid)
    return device.total_bytes - device.free_bytes()
