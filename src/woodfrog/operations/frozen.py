"""One target on its way into the frozen state and back.

Each step in has its way back, and `bring_back` is the one way home from anywhere: it asks the process, the driver and
the agent what state they are in rather than remembering it, so that undo, return and the recovery after a killed daemon
are the same code. The order is ARCHITECTURE's ("Order within a checkpoint"), and must never be changed for speed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

from woodfrog.driver.entering import Visit, entered, restore_entered
from woodfrog.driver.process import ProcessState
from woodfrog.errors import TargetLostError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.operations.context import Context
from woodfrog.operations.control_files import ControlFiles
from woodfrog.operations.cut import CutStats, come_to_rest
from woodfrog.operations.data import close_all
from woodfrog.operations.lent import LentMemory
from woodfrog.operations.members import Member, member_of, side_by_side
from woodfrog.operations.notes import HandleNote, Notes, Record, target_key
from woodfrog.operations.placement import driver_pairs
from woodfrog.operations.stall import Stall
from woodfrog.target.identity import Identity
from woodfrog.target.link import AgentLink
from woodfrog.target.memory import Mapping
from woodfrog.target.process import ProcessTree
from woodfrog.target.tracking import Tracked
from woodfrog.target.wire import Message

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SETTLE_TIMEOUT_S = 120.0  # a checkpoint or restore of the driver's own: 16 s measured at 16 GiB
SETTLE_INTERVAL_S = 0.05
LOCK_TIMEOUT_S = 30.0  # of a quiesced target: nothing is in flight


class FrozenTarget:
    """The target that `notes` describe. Owns the exported descriptors until `close`.

    `notes` are written to the keeper before the first step that the target cannot take back by itself. Each step is
    made on all of the target's GPU processes (`members`) side by side; a step on the way back leaves dead ones out.
    """

    def __init__(self, context: Context, notes: Notes) -> None:
        self.context = context
        self.notes = notes
        notes.members = notes.gpu_processes  # so that what is noted of the only one stays as well
        self.members = [Member(context, number, note) for number, note in enumerate(notes.gpu_processes)]
        self.record = Record(context.keeper, target_key(notes.pid, notes.start_ticks))
        self.fds: list[int] = []
        self.control_memory_offered = 0  # bytes, see `offer_control_memory`
        self.control_memory_taken = 0  # of them, by the driver; known once the target runs again
        self.cut: CutStats | None = None  # what it took to bring several processes to rest
        self.quiesced_at: float = 0.0  # monotonic; when the target began to wait
        self.resumed_at: float = 0.0
        self.paused_s: float = 0.0  # before that
        self.driver_s: float = 0.0  # in the driver's own calls
        self.stall = Stall()  # what the rest of the target's wait went to
        self._exported: list[int] = []  # `fds` as the target gave them
        self._packed: dict[int, list[Message]] = {}  # what gives these back, by member; of `_exported` only
        self.before_resume: Callable[[], None] = lambda: None  # the memory is back, the gates are closed still
        self.visit = Visit()  # of a target that has no interposer, see driver/entering.py
        self.lent: LentMemory | None = None  # of such a target, where its driver lends its memory

    # ── the way in ──────────────────────────────────────────────────────────────────────────────────────────────

    def offer_control_memory(self, size_bytes: int, files: ControlFiles | None = None, files_bytes: int = 0) -> None:
        """The target, which still runs, makes memory ready for what the driver is going to save of each process: its
        own (`size_bytes`), or `files` of ours (`files_bytes` of all processes) where that can be. Saves time only."""
        if not self.notes.managed:
            return
        each_bytes = files_bytes // len(self.members)

        def offer(member: Member) -> int:
            link = member.link()
            ready = files.offer(link, each_bytes) if files is not None else 0
            return ready or link.offer_control_memory(size_bytes)

        self.control_memory_offered = sum(side_by_side(self.members, offer))

    def export_ahead(self) -> None:
        """The target, which still runs, makes the descriptors of its memory that the handover will ask for. Saves time
        only; what it allocates from here on is exported while it waits."""
        if self.notes.managed:
            side_by_side(self.members, lambda member: member.link().export_ahead())

    def stop_clocks(self) -> set[int]:
        """The target, which still runs, is to have PyTorch's clock stand still from its rest to its resume: the
        processes that will."""
        if not self.notes.managed:
            return set()
        followed = side_by_side(self.members, lambda member: member.link().stop_clock())
        return {member.pid for member, libraries in zip(self.members, followed, strict=True) if libraries}

    def withdraw_control_memory(self) -> None:
        """What was offered and is not needed after all. Does nothing to a target that does not run."""
        if not self.control_memory_offered:
            return
        self.control_memory_offered = 0
        for member in self.members:
            link = self.context.agents.link(member.pid)
            if link is not None and link.state == "running":
                try:
                    link.withdraw_control_memory()
                except WoodfrogError as failure:  # the agent takes it back by itself when this connection ends
                    log.warning("process %d keeps %s: %s", member.pid, "memory it was to give back", failure)

    def quiesce(self, timeout_s: float) -> None:
        """The target's work comes to rest: by its gates, or by the driver's lock when it has none of ours."""
        self.check_alive()
        self.quiesced_at = time.monotonic()
        if self.notes.managed:
            self._come_to_rest(timeout_s)
            return
        self.record.keep(self.notes, [])
        side_by_side(self.members, lambda member: member.driver.lock(timeout_s))

    def _come_to_rest(self, timeout_s: float) -> None:
        """All gates closed, all work finished."""
        operation_id = self.notes.operation_id
        if len(self.members) > 1:
            self.cut = come_to_rest(self.members, operation_id, timeout_s)
            log.info("%s is at rest: %s", self.notes.name, self.cut)
        else:
            with self.stall.part("quiesce"):
                self.link().quiesce(operation_id, timeout_s)

    def peek(self, timeout_s: float) -> tuple[list[HandleNote], list[int], float]:
        """The target's memory as it is now, which it keeps: handles, a descriptor for each (the caller's to close), and
        the seconds that it waited for that, all of its processes at once. It runs on, also after a failure."""
        self.check_alive()
        begun = time.monotonic()
        fds: list[int] = []
        try:
            self._come_to_rest(timeout_s)
            handles = self._take_exports(fds)
            fault_point("precopy.peek.exported")
            side_by_side(self.members, lambda member: member.link().resume())
        except BaseException:
            self._let_go()
            close_all(fds)
            raise
        self.paused_s = time.monotonic() - begun
        return handles, fds, self.paused_s

    def _let_go(self) -> None:
        """Processes that still own their memory run on: by wire.h they do by themselves once nobody is connected."""
        for member in self.members:
            link = self.context.agents.link(member.pid)
            if link is not None:
                link.close()

    def export(self) -> None:
        """The target passes a descriptor for each allocation, and the keeper has them when this returns."""
        self.fds = self._exported = []
        with self.stall.part("export_memory"):
            self.notes.handles = self._take_exports(self.fds)
        with self.stall.part("keeper"):
            self.record.keep(self.notes, self.fds)

    def _take_exports(self, fds: list[int]) -> list[HandleNote]:
        """What all processes export, numbered through; a descriptor for each handle is added to `fds`."""
        with ExitStack() as open_:
            exports = side_by_side(self.members, lambda member: open_.enter_context(member.link().export_memory()))
            handles = [
                handle
                for member, exported in zip(self.members, exports, strict=True)
                for handle in member.take(exported)
            ]
            fds += [fd for exported in exports for fd in exported.fds.take()]
        return handles

    def check_mappings(self) -> None:
        """WireError when what was said to lie in the memory cannot be. Not looked at before the target has let go of
        its memory: it waits, and has thousands of them."""
        _ = self.mappings

    def take_dirty(self) -> Tracked:
        """What the target may have written since its last image, as far as it follows its launches. Not `told` of
        several processes: what one of them writes into memory of another, only the other's image would miss."""
        if len(self.members) > 1:
            return Tracked()
        return self.members[0].link().dirty(self.notes.operation_id)

    def tell_committed(self) -> None:
        """The image is durable. Should the target not hear of it, it tells more the next time, never less."""
        for member in self.members:
            try:
                member.link().committed(self.notes.operation_id)
            except WoodfrogError as failure:
                log.warning("process %d was not told that its image is committed: %s", member.pid, failure)

    def release(self) -> None:
        """The target unmaps and lets go. Only after `export`."""
        with self.stall.part("release_memory"):
            side_by_side(self.members, lambda member: member.link().release_memory())

    def detach(self) -> None:
        """The agents close their connections: CRIU must find no descriptor of ours."""
        if self.notes.managed:
            with self.stall.part("detach"):
                side_by_side(self.members, lambda member: self.context.agents.detach(member.pid))

    def checkpoint_driver(self) -> None:
        """The driver's part of the state moves into the processes' own memory."""
        self.check_alive()
        with self._in_driver():
            if self.notes.managed:
                side_by_side(self.members, lambda member: member.driver.lock(LOCK_TIMEOUT_S))
                side_by_side(self.members, lambda member: member.driver.checkpoint())
                return
            if self.lent is not None:
                self.lent.take_out(self.members, self.record)
                return
            # Nothing of ours is in there: what can be done for it is done from outside.
            self.visit = side_by_side(self.members, self._checkpoint_entered)[0]

    def _checkpoint_entered(self, member: Member) -> Visit:
        with entered(member.pid, beside=len(self.members)) as visitor:
            member.driver.checkpoint()
        return visitor.visit

    # ── the way back ────────────────────────────────────────────────────────────────────────────────────────────

    def bring_back(self) -> None:
        """From wherever the target is to running, and out of the keeper. Safe to repeat. TargetLostError when a process
        of it is dead; the others run by then."""
        self.bring_back_driver()
        self.bring_back_memory()

    def bring_back_driver(self) -> None:
        """The first half of `bring_back`: all but its memory, which the daemon may still be reading."""
        self._check_worth()
        self.continue_stopped()
        self.restore_driver()

    def bring_back_memory(self) -> None:
        """The second half: the memory, and the gates open."""
        self._check_worth()
        self.return_and_resume()
        self.record.drop()
        self.check_alive()

    def _check_worth(self) -> None:
        if not self.alive:
            self.record.drop()  # nobody needs that memory any more
            self.check_alive()

    def continue_stopped(self) -> None:
        """Processes that a dump left stopped run again."""
        if self.notes.stop:
            with ProcessTree(self.notes.root_pid) as tree:
                tree.resume()

    def restore_driver(self) -> None:
        """The driver's state back on the GPU and unlocked, from whichever of its states it is in."""
        # What a call that succeeded has led to need not be asked again: the target is waiting.
        with self._in_driver():
            self._bring_each(self._restore_one)

    def _restore_one(self, member: Member) -> None:
        state, surprises = settled_state(member), 0
        while (step := self._steps_back.get(state)) is not None:
            take, leads_to = step
            try:
                take(member)
                state = leads_to
            except WoodfrogError:
                # What a daemon since dead had asked the driver for may have been under way, and come before this.
                found, surprises = settled_state(member), surprises + 1
                if found is state or surprises > len(self._steps_back):
                    raise
                state = found
        if state is not ProcessState.RUNNING:
            raise WoodfrogError(
                f"the driver says process {member.pid} is {state.name.lower()} where it should be running",
                advice="the driver knows no way back from there; end the process and restore an image",
                pid=member.pid,
                target_state=TargetState.FROZEN,
            )

    @property
    def _steps_back(self) -> dict[ProcessState, tuple[Callable[[Member], None], ProcessState]]:
        return {
            ProcessState.CHECKPOINTED: (self._restore_driver_of, ProcessState.LOCKED),
            ProcessState.LOCKED: (lambda member: member.driver.unlock(), ProcessState.RUNNING),
        }

    def _restore_driver_of(self, member: Member) -> None:
        if self.lent is not None and self.lent.has(member):
            self.lent.bring_in(member)
            return
        visitor = None if self.notes.managed else restore_entered(member.pid, len(self.members))
        with visitor or nullcontext():
            member.driver.restore(driver_pairs(self.notes, member.note))
        if visitor is not None and member is self.members[0]:
            self.visit = self.visit.with_restore(visitor.visit)

    def return_memory(self) -> None:
        """The same physical memory back at the same addresses; the gates are still closed."""
        if self.notes.managed:
            self._bring_each(self._return_one)

    def _return_one(self, member: Member) -> None:
        link = member.link()
        if link.state in ("released", "returned"):
            ready = self._packed.get(member.number) if self.fds is self._exported else None
            link.return_packed(ready or self._packed_return(member))

    def prepare_return(self) -> None:
        """Pack what `return_memory` sends, while the target still waits for its driver."""
        self._packed = {member.number: self._packed_return(member) for member in self.members}

    def _packed_return(self, member: Member) -> list[Message]:
        mine = [index for index, one in enumerate(self.notes.handles) if member_of(one.handle) == member.number]
        # What the daemon made anew, or got from the keeper, may lie elsewhere than what the target gave.
        return AgentLink.packed_return(
            [member.own_handle(self.notes.handles[index]) for index in mine],
            [self.fds[index] for index in mine],
            same=self.fds is self._exported,
        )

    def return_and_resume(self) -> None:
        """Memory back in every process, then the gates open."""
        with self.stall.part("return_batch"):
            self.return_memory()
        with self.stall.part("guard"):
            self.before_resume()
        if self.notes.managed:
            with self.stall.part("resume"):
                taken = self._bring_each(self._resume_one)
            if any(taken):
                self.control_memory_taken = sum(one or 0 for one in taken)
            if all(one is not None for one in taken):  # who came back has settled it
                self.control_memory_offered = 0
        self.resumed_at = time.monotonic()

    def _resume_one(self, member: Member) -> int | None:
        link = member.link()
        return link.resume() if link.state != "running" else None

    # ── the rest ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _in_driver(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.driver_s += time.monotonic() - begun

    def _bring_each(self, work: Callable[[Member], Result]) -> list[Result | None]:
        """`work` on all that live, side by side. One that ends meanwhile is no failure of the others."""

        def unless_dead(member: Member) -> Result | None:
            try:
                return work(member)
            except WoodfrogError as failure:
                if member.alive or not self.alive:
                    raise
                log.warning("process %d ended on its way back: %s", member.pid, failure.reason)
                return None

        living = [member for member in self.members if member.alive]
        if not living:
            self.check_alive()
        return side_by_side(living, unless_dead)

    @property
    def mappings(self) -> list[Mapping]:
        """Of all processes; an address means something together with the handle's process only."""
        return [mapping for member in self.members for mapping in member.mappings]

    def link(self) -> AgentLink:
        """The agent's connection of a target of one process; it is woken when it sleeps."""
        (member,) = self.members
        return member.link()

    @property
    def stall_s(self) -> float:
        """How long the target waited, from its quiesce until it ran again (or until now), and in a pause before."""
        if not self.quiesced_at:
            return self.paused_s
        return self.paused_s + (self.resumed_at or time.monotonic()) - self.quiesced_at

    @property
    def identity(self) -> Identity:
        return Identity(self.notes.pid, self.notes.start_ticks)

    @property
    def alive(self) -> bool:
        """Whether any process of it is there."""
        return self.notes.alive

    def check_alive(self) -> None:
        """TargetLostError when a process is gone or its number belongs to another one now."""
        for member in self.members:
            if not member.alive:
                others = "; the other processes of the target are not ended by that" if self.alive else ""
                raise TargetLostError(
                    f"process {member.pid} ended in the middle of the operation{others}",
                    pid=member.pid,
                    target_state=TargetState.RUNNING if self.alive else TargetState.GONE,
                    advice="see the target's log; restore an earlier image",
                )

    def state_after(self, undo_failures: Sequence[WoodfrogError]) -> str:
        """What to tell about the target after an undo."""
        if not self.alive:
            return TargetState.GONE
        # That some of it is dead is no failure of bringing back the rest.
        failed = [failure for failure in undo_failures if not isinstance(failure, TargetLostError)]
        return TargetState.FROZEN if failed else TargetState.RUNNING

    def close(self) -> None:
        """Close the descriptors that this process holds; the keeper's stay."""
        fds, self.fds = self.fds, []
        close_all(fds)


def settled_state(member: Member) -> ProcessState:
    """The driver's state, once it is not in the middle of something that a daemon since dead had asked for."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (state := member.driver.state()) in (ProcessState.CHECKPOINTING, ProcessState.RESTORING):
        if time.monotonic() > deadline:
            raise TimeoutExceededError(
                f"the driver is still {state.name.lower()} process {member.pid} after {SETTLE_TIMEOUT_S:g} s",
                advice="its memory is safe with the keeper; `woodfrog resume` tries again",
                pid=member.pid,
                target_state=TargetState.FROZEN,
            )
        time.sleep(SETTLE_INTERVAL_S)  # the driver tells nobody when it is done
    return state


class OnOneTarget:
    """What operations on one target have in common: `_frozen` is it, once it was begun with."""

    _frozen: FrozenTarget | None = None

    @property
    def frozen_target(self) -> FrozenTarget | None:
        """The target once it was begun with; for the table of those that could not be brought back."""
        return self._frozen

    @property
    def _target(self) -> FrozenTarget:
        assert self._frozen is not None
        return self._frozen
