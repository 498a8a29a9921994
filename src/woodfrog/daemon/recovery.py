"""What a daemon that starts does with what its predecessor had in hand, whenever that was killed.

For each record in the keeper: wait for a CRIU that is still at work, look at the process, the driver, the agent and the
store, and then either finish (the operation was past its commit point) or return (it was not). The notes only say where
to look. Must never drop a record whose memory a living target still needs.

    record      what it means                          what is done
    target:     GPU memory of a target in the keeper   a complete image of a `stop`, or suspended data, is there: finish
                                                       by ending the target or dropping the record; else bring it back
    suspend:    data of a suspended target in an arena kept, unless the target runs (a resume had ended) or is dead;
                (a standby process: or in GPU memory)  likewise
    restore:    a tree was being restored              it runs: kept; else it is ended, the image is still there
    promote:    a running target was being promoted    its promotion goes on, once everything else is in order
    arena:      an arena's memory                      adopted by ArenaPool
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
from collections.abc import Sequence
from pathlib import Path

from woodfrog.cpu.run import still_running
from woodfrog.daemon.keeper_client import KeeperClient
from woodfrog.daemon.targets import Targets
from woodfrog.driver.process import DriverProcess, ProcessState
from woodfrog.errors import BadImageError, NotFoundError, TargetLostError, WoodfrogError
from woodfrog.operations.context import Context
from woodfrog.operations.dump_folder import folder_of, remove_abandoned
from woodfrog.operations.end_tree import end_tree
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.instance import end_namespace, use_outer_numbers
from woodfrog.operations.members import AGENT_TIMEOUT_S
from woodfrog.operations.migrate import MIGRATE, retreat
from woodfrog.operations.notes import WARM, Notes, Record, read_notes, suspend_key, target_key
from woodfrog.operations.resume import loan_of, spaces_of, suspend_driver
from woodfrog.operations.space import Space
from woodfrog.target import pid_namespace, procfs
from woodfrog.target.identity import Identity, ProcessHandle

log = logging.getLogger(__name__)

CRIU_TIMEOUT_S = 600.0  # what an orphaned CRIU may still need
# Suspend before target: a target's record is judged by what is suspended. Promote after restore, which may end it.
KINDS = ("restore", "suspend", "target", "promote")


class Recovery:
    """Goes through the keeper's records once, at the daemon's start; `one` again for a target that stayed frozen."""

    def __init__(self, context: Context, keeper: KeeperClient, targets: Targets) -> None:
        self._context = context
        self._keeper = keeper
        self._targets = targets
        self.promoting: list[Notes] = []  # targets whose promotion is to go on

    def run(self) -> None:
        """All records. A record that cannot be dealt with is kept, and told in the log."""
        keys = [record.key for record in self._keeper.list()]
        for kind in KINDS:
            for key in keys:
                if key.startswith(f"{kind}:"):
                    self._attempt(kind, key)
        remove_abandoned(self._context.runtime_directory)

    def again(self, notes: Notes) -> None:
        """Try once more to bring back a target that stayed frozen. Raises what stands in the way."""
        fds = self._keeper.fetch(target_key(notes.pid, notes.start_ticks))
        try:
            self.target(notes, fds[1:])
        finally:
            for fd in fds:
                os.close(fd)

    def _attempt(self, kind: str, key: str) -> None:
        log.info("recovering %s", key)
        try:
            fds = self._keeper.fetch(key)
        except NotFoundError:
            return
        try:
            notes = read_notes(fds[0])
            if kind == "restore":
                self._restore(key, notes)
            elif kind == "suspend":
                self._suspended(key, notes)
            elif kind == "promote":
                self._promoted(key, notes)
            else:
                self.target(notes, fds[1:])
        except (WoodfrogError, OSError, RuntimeError):
            log.exception("%s could not be recovered and stays in the keeper", key)
        finally:
            for fd in fds:
                os.close(fd)

    # ── target: ─────────────────────────────────────────────────────────────────────────────────────────────────

    def target(self, notes: Notes, fds: Sequence[int]) -> None:
        """Finish or return one target whose memory is in the keeper. Raises and keeps the record when neither works."""
        _wait_for_criu(*folder_of(self._context.runtime_directory, notes).glob("criu-*"))
        key = (notes.pid, notes.start_ticks)
        record = Record(self._keeper, target_key(*key), exists=True)
        if not notes.alive:
            log.warning("process %d (%s) has ended; its memory is let go", notes.pid, notes.name)
            record.drop()
            self._targets.frozen.pop(key, None)
            return
        if notes.operation == "suspend" and key in self._context.suspended:
            log.info("%s is suspended: finished", notes.name)
            record.drop()
            return
        if notes.stop and self._image_of(notes):
            log.info("the image of %s is complete: ending it", notes.name)
            end_tree(self._context, notes.root_pid, alive=True)
            record.drop()
            return
        self._targets.frozen[key] = notes
        with contextlib.suppress(TargetLostError):  # a part of it has ended; the rest runs
            self._bring_back(notes, fds)
        del self._targets.frozen[key]
        if notes.operation == "resume":
            self._drop_suspended(notes)
        log.info("%s (process %d) runs again", notes.name, notes.pid)

    def _bring_back(self, notes: Notes, fds: Sequence[int]) -> None:
        frozen = FrozenTarget(self._context, notes)
        frozen.record = Record(self._keeper, target_key(notes.pid, notes.start_ticks), exists=True)
        first = max(0, notes.memory_from - 1)  # `fds` are those behind the notes
        frozen.fds = [os.dup(fd) for fd in fds[first : first + len(notes.handles)]]
        lent = notes.operation in ("suspend", "checkpoint") and not notes.managed
        if lent:  # its data is in the arena, if it was taken out
            self._context.arenas.reserve(notes.extents)
        spaces = spaces_of(self._context, notes) if lent else {}
        frozen.lent = loan_of(self._context, notes, spaces) if lent else None
        try:
            if notes.operation == MIGRATE and not notes.memory_from:
                retreat(frozen)
            frozen.bring_back()
        finally:
            frozen.close()
        for space in spaces.values():
            space.free()

    def _image_of(self, notes: Notes) -> bool:
        """Whether the image that this operation was writing is complete."""
        images = self._context.store(notes.store)
        for entry in reversed(images.store.list(notes.image)):  # the newest first: there may be thousands
            with contextlib.suppress(BadImageError, NotFoundError):
                if images.manifest(entry.reference).operation == notes.operation_id:
                    return True
        return False

    # ── suspend: ────────────────────────────────────────────────────────────────────────────────────────────────

    def _suspended(self, key: str, notes: Notes) -> None:
        identity = (notes.pid, notes.start_ticks)
        record = Record(self._keeper, key, exists=True)
        if not notes.alive:
            log.warning("suspended process %d (%s) has ended; its data is let go", notes.pid, notes.name)
            record.drop()
            return
        keys = {found.key for found in self._keeper.list()}
        self._context.arenas.reserve(notes.extents)
        self._context.suspended[identity] = notes
        if target_key(*identity) in keys:
            return  # in the middle of a suspend or a resume: the target's own record decides
        if self._runs(notes):
            log.info("%s runs already: its suspended data is let go", notes.name)
            self._drop_suspended(notes)
            return
        if notes.level != WARM:
            # A resume may have been cut off after the driver's half.
            frozen = FrozenTarget(self._context, notes)
            frozen.lent = loan_of(self._context, notes, spaces_of(self._context, notes))
            suspend_driver(frozen, lambda: record.update(notes))

    def _runs(self, notes: Notes) -> bool:
        """Whether a resume had come to its end."""
        living = [one for one in notes.gpu_processes if Identity(one.pid, one.start_ticks).is_alive()]
        if any(DriverProcess(one.pid).state() is not ProcessState.RUNNING for one in living):
            return False
        if not notes.managed:
            return True
        return all(self._context.agents.ensure(one.pid, AGENT_TIMEOUT_S).state == "running" for one in living)

    def _drop_suspended(self, notes: Notes) -> None:
        identity = (notes.pid, notes.start_ticks)
        suspended = self._context.suspended.pop(identity, None)
        Record(self._keeper, suspend_key(*identity), exists=True).drop()
        if suspended is not None:
            Space(self._context.arenas, suspended.extents, suspended.user).free()

    # ── promote: ────────────────────────────────────────────────────────────────────────────────────────────────

    def _promoted(self, key: str, notes: Notes) -> None:
        if notes.alive:
            self.promoting.append(notes)
            return
        log.info("process %d (%s) has ended; there is nothing to promote", notes.pid, notes.name)
        Record(self._keeper, key, exists=True).drop()

    # ── restore: ────────────────────────────────────────────────────────────────────────────────────────────────

    def _restore(self, key: str, notes: Notes) -> None:
        work = Path(notes.directory)
        _wait_for_criu(*work.glob("criu-*"), work)
        record = Record(self._keeper, key, exists=True)
        init = pid_namespace.find(notes.instance) if notes.instance else None
        if init is not None:
            try:
                use_outer_numbers(notes, pid_namespace.outer_numbers(init))
            except BadImageError:
                log.info("the restore of %s had not come far", notes.image)
                notes.tree, notes.commands = [], []
        # Without its namespace the numbers in the notes are those of strangers.
        found = self._restored_processes(notes) if init is not None or not notes.instance else []
        if any(self._is_standby(identity) for identity in found):
            log.info("%s (process %d) waits in the standby pool", notes.name, notes.pid)
        elif found and self._restored_runs(notes):
            log.info("%s (process %d) had been restored", notes.name, notes.pid)
        else:
            for identity in found:
                log.warning("ending process %d, left by a restore of %s that was cut off", identity.pid, notes.image)
                with contextlib.suppress(NotFoundError), ProcessHandle(identity.pid, identity.start_ticks) as handle:
                    handle.kill()
            if init is not None:
                end_namespace(self._context.reaper, init.identity)
        record.drop()
        shutil.rmtree(work, ignore_errors=True)

    def _restored_processes(self, notes: Notes) -> list[Identity]:
        """Processes with the tree's numbers that came from that restore: begun after it, and with the same command."""
        found = []
        for pid, command in zip(notes.tree, notes.commands, strict=True):
            stat = procfs.stat(pid)
            if stat is None or stat.state in "ZX" or stat.start_ticks < notes.begun_ticks:
                continue
            if " ".join(procfs.command_line(pid)) == command:
                found.append(Identity(pid, stat.start_ticks))
        return found

    def _is_standby(self, identity: Identity) -> bool:
        """Whether this process had become one of the pool: its own record is there."""
        key = suspend_key(identity.pid, identity.start_ticks)
        return any(record.key == key for record in self._keeper.list())

    def _restored_runs(self, notes: Notes) -> bool:
        for one in notes.gpu_processes:
            stat = procfs.stat(one.pid)
            if stat is None:
                return False
            one.start_ticks = stat.start_ticks
            if one.pid == notes.pid:
                notes.start_ticks = stat.start_ticks
        try:
            return self._runs(notes)
        except WoodfrogError as failure:
            log.info("the restored process %d does not answer: %s", notes.pid, failure.reason)
            return False


def _wait_for_criu(*directories: Path) -> None:
    """Wait for a CRIU that outlived its daemon: cutting it off in the middle could cost the target."""
    for directory in directories:
        pid = still_running(directory)
        if pid is None:
            continue
        log.info("waiting for CRIU (process %d)", pid)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(CRIU_TIMEOUT_S * 1000):
                raise WoodfrogError(f"CRIU (process {pid}) has not ended within {CRIU_TIMEOUT_S:g} s")
        finally:
            os.close(pidfd)
