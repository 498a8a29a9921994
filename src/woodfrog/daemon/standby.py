"""The standby pool: which restored processes wait for which image, filling it, taking from it, ending what is in it.

What is in it are suspended targets whose notes say `hold`; the keeper has them, so that a daemon that starts finds the
pool of its predecessor. One process an image: it has the process number that the image says. Must never leave data
behind whose process has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from woodfrog.daemon.targets import Targets
from woodfrog.errors import NotFoundError, RefusedError, TargetLostError, UsageError
from woodfrog.operations.checkpoint import end_tree
from woodfrog.operations.context import Context
from woodfrog.operations.notes import HOLD_DEVICE, HOLD_HOST, HOLD_MAPPED, Notes
from woodfrog.operations.phases import Emit
from woodfrog.operations.restore import RestoreRequest
from woodfrog.operations.resume import Resume, ResumeRequest
from woodfrog.operations.standby import Standby
from woodfrog.operations.take import Take, TakeRequest
from woodfrog.target.identity import Identity, ProcessHandle

if TYPE_CHECKING:
    from woodfrog.daemon.server import Call
    from woodfrog.image.manifest import Manifest

log = logging.getLogger(__name__)

NO_LIMIT_S = 1e6  # of a wait for the end of a process, in one piece


class Run(Protocol):
    """Verbs._run: one operation on one tree at a time, counted."""

    def __call__(self, name: str, root_pid: int, call: Call, make: Callable[[], Any], /) -> dict[str, Any]: ...


class StandbyPool:
    """Thread-safe, as far as the operations on one tree take turns."""

    def __init__(self, context: Context, targets: Targets) -> None:
        self._context = context
        self._targets = targets

    # ── filling ─────────────────────────────────────────────────────────────────────────────────────────────────

    def fill(
        self, run: Run, request: RestoreRequest, manifest: Manifest, hold: str, count: int, call: Call
    ) -> list[dict[str, Any]]:
        """`count` processes of that image wait afterwards; those that did before are told of as well."""
        if hold not in (HOLD_HOST, HOLD_DEVICE, HOLD_MAPPED):
            raise UsageError(f"data cannot be held in {hold!r}", advice="host, device or mapped")
        if count != 1:
            raise RefusedError(
                f"{count} standby processes of one image were asked for, and this version keeps one: each has the "
                "process number that it had when it was checkpointed, which is there once",
                advice="count 1; restore it, and a new one can be made once that process has ended",
            )
        root_pid = manifest.cpu.root_pid if manifest.cpu else manifest.gpu_pid
        there = self._matching(manifest, request.gpu_map)
        if there:
            return [self._told(notes) for notes in there]
        for notes in self._all():
            if set(notes.tree) & {process.pid for process in manifest.processes}:
                raise RefusedError(
                    f"process {notes.pid} of {notes.image} waits in the standby pool, and {request.image} needs its "
                    "number",
                    advice=f"woodfrog standby --end {notes.image}",
                    pid=notes.pid,
                )
        result = run("standby", root_pid, call, lambda: Standby(self._context, request, hold, call.emit))
        for notes in self._matching(manifest, request.gpu_map):
            self._watch(notes)
        return [{**result, "new": True}]

    # ── taking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take(
        self, run: Run, request: RestoreRequest, manifest: Manifest, call: Call
    ) -> tuple[dict[str, Any], Notes | None] | None:
        """A waiting process of that image runs on: the restore's result, and what is to be promoted; or None."""
        for notes in self._matching(manifest, request.gpu_map):
            taken: list[Take] = []

            def make(notes: Notes = notes, taken: list[Take] = taken) -> Take:
                taken.append(self._take(notes, request, manifest, call.emit))
                return taken[0]

            try:
                result = run("take", notes.root_pid, call, make)
                return result, taken[0].promotion
            except (TargetLostError, NotFoundError) as gone:
                log.warning("standby process %d of %s could not be taken: %s", notes.pid, notes.image, gone.reason)
        return None

    def _take(self, notes: Notes, request: RestoreRequest, manifest: Manifest, emit: Emit) -> Take:
        if self._context.suspended.get((notes.pid, notes.start_ticks)) is not notes:
            raise NotFoundError(f"somebody else has taken process {notes.pid}")
        store_url = self._context.store(request.store).url
        return Take(self._context, TakeRequest(notes, manifest, store_url, request.verify, request.mode), emit)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, which: str) -> list[int]:
        """End those of the image `which`, the one with that pid, or ("") all; their pids. NotFoundError for none."""
        chosen = [
            notes
            for notes in self._all()
            if not which or which in (str(notes.pid), notes.image, notes.image.rpartition("@")[0])
        ]
        if which and not chosen:
            raise NotFoundError(f"no standby process is of {which!r}", advice="see `woodfrog standby --list`")
        ended = []
        for notes in chosen:
            with self._targets.one_at_a_time(notes.root_pid, "standby"):
                if self._context.suspended.get((notes.pid, notes.start_ticks)) is notes:
                    end_tree(self._context, notes.root_pid, alive=True)
                    Resume(self._context, ResumeRequest(notes)).discard()
                    ended.append(notes.pid)
        return ended

    def watch_all(self) -> None:
        """Of a predecessor's pool, too, none may end unseen."""
        for notes in self._all():
            self._watch(notes)

    def _watch(self, notes: Notes) -> None:
        threading.Thread(target=self._await_end, args=(notes,), name=f"standby-{notes.pid}", daemon=True).start()

    def _await_end(self, notes: Notes) -> None:
        try:
            with ProcessHandle(notes.pid, notes.start_ticks) as handle:
                while not handle.wait(NO_LIMIT_S):
                    log.debug("process %d still waits", notes.pid)
        except (NotFoundError, TargetLostError) as gone:
            log.debug("%s", gone.reason)
        with self._targets.one_at_a_time(notes.root_pid, "standby"):
            key = (notes.pid, notes.start_ticks)
            if self._context.suspended.get(key) is notes and not Identity(*key).is_alive():
                log.warning("standby process %d of %s has ended; its data is let go", notes.pid, notes.image)
                Resume(self._context, ResumeRequest(notes)).discard()

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> list[Notes]:
        return [notes for notes in list(self._context.suspended.values()) if notes.hold]

    def _matching(self, manifest: Manifest, gpu_map: Mapping[str, str]) -> list[Notes]:
        """Those of this very image (its operation's number is its own, wherever it was copied to) that are alive, on
        the GPUs that were asked for."""
        wanted = {one.ordinal: gpu_map[one.uuid] for one in manifest.devices if one.uuid in gpu_map}
        return [
            notes
            for notes in self._all()
            if notes.operation_id == manifest.operation
            and wanted.items() <= notes.devices.items()
            and Identity(notes.pid, notes.start_ticks).is_alive()
        ]

    def _told(self, notes: Notes) -> dict[str, Any]:
        return {
            "image": notes.image,
            "name": notes.name,
            "pid": notes.pid,
            "root_pid": notes.root_pid,
            "state": "standby",
            "hold": notes.hold,
            "new": False,
            "bytes": sum(handle.size for handle in notes.handles),
        }
