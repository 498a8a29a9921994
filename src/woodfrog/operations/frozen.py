"""One target on its way into the frozen state and back.

Each step in has its way back, and `bring_back` is the one way home from anywhere: it asks the process, the driver and
the agent what state they are in rather than remembering it, so that undo, return and the recovery after a killed daemon
are the same code. The order is ARCHITECTURE's ("Order within a checkpoint"), and must never be changed for speed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from woodfrog.driver.entering import Visit, entered
from woodfrog.driver.process import DriverProcess, GpuPair, ProcessState
from woodfrog.errors import TargetLostError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.operations.context import Context
from woodfrog.operations.data import close_all
from woodfrog.operations.notes import HandleNote, Notes, Record, target_key
from woodfrog.target.identity import Identity
from woodfrog.target.link import AgentLink
from woodfrog.target.memory import Mapping, Shared
from woodfrog.target.process import ProcessTree
from woodfrog.target.tracking import Tracked

log = logging.getLogger(__name__)

log = logging.getLogger(__name__)

AGENT_TIMEOUT_S = 30.0  # an agent answers within milliseconds; a machine that swaps takes longer
SETTLE_TIMEOUT_S = 120.0  # a checkpoint or restore of the driver's own: 16 s measured at 16 GiB
SETTLE_INTERVAL_S = 0.05
LOCK_TIMEOUT_S = 30.0  # of a quiesced target: nothing is in flight


class FrozenTarget:
    """The target that `notes` describe. Owns the exported descriptors until `close`.

    `notes` are written to the keeper before the first step that the target cannot take back by itself.
    """

    def __init__(self, context: Context, notes: Notes) -> None:
        self.context = context
        self.notes = notes
        self.record = Record(context.keeper, target_key(notes.pid, notes.start_ticks))
        self.fds: list[int] = []
        self.mappings: list[Mapping] = []
        self.shared: list[Shared] = []  # which of the handles other processes may have (operations/sharing.py)
        self.control_memory_offered = 0  # bytes, see `offer_control_memory`
        self.control_memory_taken = 0  # of them, by the driver; known once the target runs again
        self.quiesced_at: float = 0.0  # monotonic; when the target began to wait
        self.resumed_at: float = 0.0
        self.paused_s: float = 0.0  # before that
        self.driver_s: float = 0.0  # in the driver's own calls
        self.visit = Visit()  # of a target that has no interposer, see driver/entering.py

    @cached_property
    def driver(self) -> DriverProcess:
        """The driver's view of the process; NotFoundError once that has ended."""
        return DriverProcess(self.notes.pid)

    # ── the way in ──────────────────────────────────────────────────────────────────────────────────────────────

    def offer_control_memory(self, size_bytes: int) -> None:
        """The target, which still runs, makes memory ready for what the driver is going to save. Saves time only."""
        if self.notes.managed:
            self.control_memory_offered = self.link().offer_control_memory(size_bytes)

    def withdraw_control_memory(self) -> None:
        """What was offered and is not needed after all. Does nothing to a target that does not run."""
        if not self.control_memory_offered:
            return
        self.control_memory_offered = 0
        link = self.context.agents.link(self.notes.pid)
        if link is not None and link.state == "running":
            try:
                link.withdraw_control_memory()
            except WoodfrogError as failure:  # the agent takes it back by itself when this connection ends
                log.warning("process %d keeps %s: %s", self.notes.pid, "memory it was to give back", failure)

    def quiesce(self, timeout_s: float) -> None:
        """The target's work comes to rest: by its gate, or by the driver's lock when it has none of ours."""
        self.check_alive()
        self.quiesced_at = time.monotonic()
        if self.notes.managed:
            self.link().quiesce(self.notes.operation_id, timeout_s)
        else:
            self.record.keep(self.notes, [])
            self.driver.lock(timeout_s)

    def peek(self, timeout_s: float) -> tuple[list[HandleNote], list[int], float]:
        """The target's memory as it is now, which it keeps: handles, a descriptor for each (the caller's to close), and
        the seconds that it waited for that. It runs on, also after a failure."""
        self.check_alive()
        link = self.link()
        begun = time.monotonic()
        link.quiesce(self.notes.operation_id, timeout_s)
        fds: list[int] = []
        try:
            with link.export_memory() as exported:
                handles = [HandleNote(one.handle, one.size_bytes, one.device, one.kind) for one in exported.handles]
                fds = exported.fds.take()
            fault_point("precopy.peek.exported")
            link.resume()
        except BaseException:
            link.close()  # by wire.h a target that still owns its memory then runs on by itself
            close_all(fds)
            raise
        self.paused_s = time.monotonic() - begun
        return handles, fds, self.paused_s

    def export(self) -> None:
        """The target passes a descriptor for each allocation, and the keeper has them when this returns."""
        with self.link().export_memory() as exported:
            self.mappings = exported.mappings
            self.shared = exported.shared
            host_nodes = {shared.handle: shared.host_node for shared in exported.shared}
            self.notes.handles = [
                HandleNote(
                    handle.handle,
                    handle.size_bytes,
                    handle.device,
                    handle.kind,
                    host_node=host_nodes.get(handle.handle, -1),
                )
                for handle in exported.handles
            ]
            self.fds = exported.fds.take()
        self.record.keep(self.notes, self.fds)

    def take_dirty(self) -> Tracked:
        """What the target may have written since its last image, as far as it follows its launches."""
        return self.link().dirty(self.notes.operation_id)

    def tell_committed(self) -> None:
        """The image is durable. Should the target not hear of it, it tells more the next time, never less."""
        try:
            self.link().committed(self.notes.operation_id)
        except WoodfrogError as failure:
            log.warning("process %d was not told that its image is committed: %s", self.notes.pid, failure)

    def release(self) -> None:
        """The target unmaps and lets go. Only after `export`."""
        self.link().release_memory()

    def detach(self) -> None:
        """The agent closes its connection: CRIU must find no descriptor of ours."""
        if self.notes.managed:
            self.context.agents.detach(self.notes.pid)

    def checkpoint_driver(self) -> None:
        """The driver's part of the state moves into the process's own memory."""
        self.check_alive()
        with self._in_driver():
            if self.notes.managed:
                self.driver.lock(LOCK_TIMEOUT_S)
                self.driver.checkpoint()
                return
            # Nothing of ours is in there: what can be done for it is done from outside.
            with entered(self.notes.pid) as visitor:
                self.driver.checkpoint()
            self.visit = visitor.visit

    # ── the way back ────────────────────────────────────────────────────────────────────────────────────────────

    def bring_back(self) -> None:
        """From wherever the target is to running, and out of the keeper. Safe to repeat; TargetLostError if dead."""
        self.bring_back_driver()
        self.bring_back_memory()

    def bring_back_driver(self) -> None:
        """The first half of `bring_back`: all but its memory, which the daemon may still be reading."""
        self._check_worth()
        self.continue_stopped()
        self.restore_driver()

    def bring_back_memory(self) -> None:
        """The second half: the memory, and the gate opens."""
        self._check_worth()
        self.return_and_resume()
        self.record.drop()

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
        state = self.settled_state()
        # What a call that succeeded has led to need not be asked again: the target is waiting.
        with self._in_driver():
            if state is ProcessState.CHECKPOINTED:
                self.driver.restore(gpu_pairs(self.notes))
                state = ProcessState.LOCKED
            if state is ProcessState.LOCKED:
                self.driver.unlock()
                state = ProcessState.RUNNING
        if state is not ProcessState.RUNNING:
            raise WoodfrogError(
                f"the driver says process {self.notes.pid} is {state.name.lower()} where it should be running",
                advice="the driver knows no way back from there; end the process and restore an image",
                pid=self.notes.pid,
                target_state=TargetState.FROZEN,
            )

    def settled_state(self) -> ProcessState:
        """The driver's state, once it is not in the middle of something that a daemon since dead had asked for."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (state := self.driver.state()) in (ProcessState.CHECKPOINTING, ProcessState.RESTORING):
            if time.monotonic() > deadline:
                raise TimeoutExceededError(
                    f"the driver is still {state.name.lower()} process {self.notes.pid} after {SETTLE_TIMEOUT_S:g} s",
                    advice="its memory is safe with the keeper; `woodfrog resume` tries again",
                    pid=self.notes.pid,
                    target_state=TargetState.FROZEN,
                )
            time.sleep(SETTLE_INTERVAL_S)  # the driver tells nobody when it is done
        return state

    def return_memory(self) -> AgentLink | None:
        """The same physical memory back at the same addresses; the gate is still closed. None when not managed."""
        if not self.notes.managed:
            return None
        link = self.link()
        if link.state in ("released", "returned"):
            link.return_memory([handle.to_handle() for handle in self.notes.handles], self.fds)
        return link

    def return_and_resume(self) -> None:
        """Memory back, gate open."""
        link = self.return_memory()
        if link is not None and link.state != "running":
            self.control_memory_taken = link.resume()
            self.control_memory_offered = 0  # the agent has settled it
        self.resumed_at = time.monotonic()

    # ── the rest ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _in_driver(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.driver_s += time.monotonic() - begun

    def link(self) -> AgentLink:
        """The agent's connection; it is woken when it sleeps."""
        return self.context.agents.ensure(self.notes.pid, AGENT_TIMEOUT_S)

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
        return self.identity.is_alive()

    def check_alive(self) -> None:
        """TargetLostError when the process is gone or its number belongs to another one now."""
        if not self.alive:
            raise TargetLostError(
                f"process {self.notes.pid} ended in the middle of the operation",
                pid=self.notes.pid,
                target_state=TargetState.GONE,
                advice="see the target's log; restore an earlier image",
            )

    def state_after(self, undo_failures: Sequence[WoodfrogError]) -> str:
        """What to tell about the target after an undo."""
        if not self.alive:
            return TargetState.GONE
        return TargetState.FROZEN if undo_failures else TargetState.RUNNING

    def close(self) -> None:
        """Close the descriptors that this process holds; the keeper's stay."""
        fds, self.fds = self.fds, []
        close_all(fds)


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


def gpu_pairs(notes: Notes) -> list[GpuPair]:
    """The GPUs to restore onto, for the driver: empty when every GPU is the one it was."""
    if all(old == new for old, new in notes.gpu_pairs):
        return []
    return [GpuPair(bytes.fromhex(old), bytes.fromhex(new)) for old, new in notes.gpu_pairs]
