"""What is new in a target's GPU memory, on its way to the store: hash, look up, capture, drain, write.

Only chunks whose digest the store lacks cross the bus (with `everything` all of them do, and each is compared with its
digest in host memory). Where the GPU has room, `snapshot` copies all memory within it, and nothing after that looks at
the target's own (`whole`). Else the target waits for `hash` and `capture`; with copy-on-write there is nothing for that
to do, and `drain` captures while the target runs. This must never write a chunk that does not
have the digest which was taken while the target was at rest, or of a copy that was made then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from woodfrog.image.manifest import Amounts
from woodfrog.image.writer import ImageWriter
from woodfrog.operations.background import give_way
from woodfrog.operations.clean import Clean
from woodfrog.operations.concurrent import AUTO, COW, STOP, Allowance, DeviceWay
from woodfrog.operations.context import Context
from woodfrog.operations.copy_on_write import CopyOnWrite
from woodfrog.operations.data import DevicePart, GpuData, JointProgress, split_positions
from woodfrog.operations.part_increment import PartIncrement
from woodfrog.operations.precopy import Precopy
from woodfrog.operations.space import Space

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress


class Increment:
    """One checkpoint's GPU data. Use once, in this order: snapshot (may be left out), hash, capture, drain, write;
    `release` at the end, whatever happened.

    `spaces` (by the target's device ordinal) are the caller's to free; this may take more into them. `in_background`:
    whether the target runs again, so that copies of its own have to be let through. `turn` is called before each part
    of a drain, and may wait; `giving_way` by a thread that stores what was drained, before each batch."""

    def __init__(
        self,
        context: Context,
        data: GpuData,
        writer: ImageWriter,
        spaces: dict[int, Space],
        user: int,
        *,
        everything: bool,
        clean: Clean | None = None,
        check_clean: bool = False,
        way: str = AUTO,
        allowance: Allowance | None = None,
        in_background: Callable[[], bool] = lambda: False,
        turn: Callable[[], object] = lambda: None,
        giving_way: Callable[[], None] = give_way,
        precopy: Precopy | None = None,
        cow: CopyOnWrite | None = None,
    ) -> None:
        self._data = data
        self._writer = writer
        self._clean = clean  # what need not be hashed; with `check_clean` it is all the same, and compared
        self._check_clean = check_clean
        self._way = way
        self._allowance = allowance if way != STOP else None
        self._precopy = precopy
        self._cow = cow if way in (AUTO, COW) else None
        self._parts = [
            PartIncrement(
                context,
                data,
                part,
                cut,
                writer,
                spaces,
                user,
                everything=everything,
                in_background=in_background,
                turn=turn,
                giving_way=giving_way,
                cow=self._cow,
            )
            for part, cut in zip(data.parts, data.cuts(writer.chunk_bytes), strict=True)
        ]
        self.amounts = Amounts()
        self.whole = False  # the snapshot is made: the target's memory is not looked at any more

    @property
    def digests(self) -> bytes:
        """Of every chunk of every part, in an image's order."""
        return b"".join(part.digests for part in self._parts)

    @property
    def chunk_count(self) -> int:
        return sum(len(part.cut) for part in self._parts)

    @property
    def new_chunk_count(self) -> int:
        return sum(len(part.new) for part in self._parts)

    @property
    def streamed(self) -> bool:
        """Whether some of it went through a ring to the store."""
        return any(part.streamed for part in self._parts)

    @property
    def ways(self) -> list[DeviceWay]:
        """What was done on each device."""
        return [part.way for part in self._parts]

    def plan_snapshot(self) -> bool:
        """Take device memory for a copy of all memory; False, and none is taken, unless each device has room for it."""
        allowance = self._allowance
        if allowance is None or self._way == COW or not self._parts:
            return False
        if all(part.plan_snapshot(allowance) for part in self._parts):
            return True
        self.release()
        return False

    def snapshot(self, progress: JointProgress) -> None:
        """All memory to where `plan_snapshot` made room."""
        self._data.each_device(lambda part, mine: self._parts[part.number].snapshot(mine), progress)
        self.whole = True

    def hash(self, progress: JointProgress) -> None:
        """Digests of all memory where it lies, or of the snapshot, and which of them are new to the store."""
        clean = self._clean
        skips = clean is not None and not self._check_clean
        known = clean.parts if clean is not None and skips else ()
        if self.whole:

            def one_device(part: DevicePart, mine: Progress) -> bytes:
                return self._parts[part.number].hash_snapshot(known[part.number] if known else None, mine)

            digests: list[bytes] = self._data.each_device(one_device, progress)
        else:
            digests = self._data.hash(self._writer.chunk_bytes, progress, known)
        if clean is not None and self._check_clean:
            clean.check(digests)
        cuts = [part.cut for part in self._parts]
        positions, self.amounts = self._writer.survey_gpu(digests, cuts)
        for part, found, new in zip(self._parts, digests, split_positions(positions, cuts), strict=True):
            part.found(found, new, self._precopy)

    def plan_capture(self) -> JointProgress:
        """Make room for what has to move; the progress to pass to `capture`."""
        progress = _progress([part.plan_capture(self._way, self._allowance) for part in self._parts])
        if self._cow is not None:
            self._cow.begin()
        return progress

    def capture(self, progress: JointProgress) -> None:
        """Everything new out of the target's memory: to the arena, or to copies in the GPU's own."""
        self._each(PartIncrement.capture, progress)

    def plan_drain(self) -> JointProgress:
        """Make room for what the copies hold; the progress to pass to `drain`."""
        return _progress([part.plan_drain() for part in self._parts])

    def drain(self, progress: JointProgress) -> None:
        """The copies to the arena, and on to the store where it cannot hold them."""
        self._each(PartIncrement.drain, progress)
        if self._cow is not None:
            self._cow.end()

    def plan_write(self) -> JointProgress:
        """The progress to pass to `write`."""
        from woodfrog._native import transfer

        return JointProgress([transfer.Progress()])

    def write(self, progress: JointProgress) -> None:
        """Arena → store."""
        (mine,) = progress.parts
        for part in self._parts:
            part.store(mine)

    def release(self) -> None:
        """Give back the device memory that copies are still in. Nothing happens a second time."""
        if self._cow is not None:
            self._cow.close()
        for part in self._parts:
            part.release()

    def _each(self, work: Callable[[PartIncrement, Progress, Progress], None], progress: JointProgress) -> None:
        writing = progress.parts[len(self._parts) :]

        def one_device(part: DevicePart, mine: Progress) -> None:
            work(self._parts[part.number], mine, writing[part.number])

        self._data.each_device(one_device, progress)


def _progress(amounts: list[tuple[int, int]]) -> JointProgress:
    """For (bytes to move, bytes to store) of each device: first the moving, then the storing beside it."""
    from woodfrog._native import transfer

    return JointProgress(
        [transfer.Progress(moved) for moved, _ in amounts] + [transfer.Progress(stored) for _, stored in amounts]
    )
