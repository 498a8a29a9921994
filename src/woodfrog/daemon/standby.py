"""The standby pool: which restored processes wait for which image, filling it, taking from it, ending what is in it.

What is in it are suspended targets whose notes say `hold`; the keeper has them, so that a daemon that starts finds the
pool of its predecessor. One process of an image can have the numbers that the image says; more are each in a PID
namespace of their own. Must never leave data behind whose process has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from woodfrog.daemon.targets import Targets
from woodfrog.errors import NotFoundError, RefusedError, TargetLostError, UsageError
from woodfrog.operations.context import Context
from woodfrog.operations.end_tree import end_tree
from woodfrog.operations.notes import HOLD_DEVICE, HOLD_HOST, HOLD_MAPPED, Notes
from woodfrog.operations.phases import Emit
from woodfrog.operations.restore_plan import RestoreRequest
from woodfrog.operations.resume import Resume, ResumeRequest
from woodfrog.operations.standby import Standby
from woodfrog.operations.take import Take, TakeRequest
from woodfrog.target.identity import Identity, ProcessHandle

if TYPE_CHECKING:
    from woodfrog.daemon.server import Call
    from woodfrog.image.manifest import Manifest

log = logging.getLogger(__name__)

MAX_COUNT = 1000
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
        """`count` processes of that image wait afterwards; those that did before are told of as well. Of several each
        new one is in a PID namespace of its own. When one cannot be made, those before it stay."""
        if hold not in (HOLD_HOST, HOLD_DEVICE, HOLD_MAPPED):
            raise UsageError(f"data cannot be held in {hold!r}", advice="host, device or mapped")
        if not 1 <= count <= MAX_COUNT:
            raise UsageError(f"{count} standby processes make no sense", advice=f"1 to {MAX_COUNT}")
        if count > 1 and (request.name or any(request.ports.values())):
            raise UsageError(
                "several processes cannot have one name, nor one port",
                advice="leave out --name; --port OLD=auto gives each a free one",
            )
        if request.environment:
            raise UsageError("a process is told its environment when it is taken", advice="restore … --env NAME=VALUE")
        request = replace(request, new_pid_namespace=request.new_pid_namespace or count > 1)
        told = [self._told(notes) for notes in self._matching(manifest, request)][:count]
        if not request.new_pid_namespace and not told:
            self._refuse_waiting_numbers(request, manifest)
        while len(told) < count:
            with self._targets.for_restore(request, manifest) as (turn, named):
                result = run("standby", turn, call, partial(Standby, self._context, named, hold, call.emit))
            for notes in self._all():
                if notes.pid == result["pid"]:
                    self._watch(notes)
            told.append({**result, "new": True})
        return told

    def _refuse_waiting_numbers(self, request: RestoreRequest, manifest: Manifest) -> None:
        for notes in self._all():
            if set(notes.tree) & {process.pid for process in manifest.processes}:
                raise RefusedError(
                    f"process {notes.pid} of {notes.image} waits in the standby pool, and {request.image} needs its "
                    "number",
                    advice=f"woodfrog standby --end {notes.image}, or standby with --new-pid-namespace",
                    pid=notes.pid,
                )

    # ── taking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take(
        self, run: Run, request: RestoreRequest, manifest: Manifest, call: Call
    ) -> tuple[dict[str, Any], Notes | None] | None:
        """A waiting process of that image runs on: the restore's result, and what is to be promoted; or None."""
        for notes in self._matching(manifest, request):
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
        take = TakeRequest(
            notes,
            manifest,
            store_url,
            request.verify,
            request.mode,
            request.environment,
            request.hook,
            request.hook_timeout_s,
        )
        return Take(self._context, take, emit)

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
        for one in notes.gpu_processes:
            watched = (notes, Identity(one.pid, one.start_ticks))
            threading.Thread(target=self._await_end, args=watched, name=f"standby-{one.pid}", daemon=True).start()

    def _await_end(self, notes: Notes, process: Identity) -> None:
        try:
            with ProcessHandle(process.pid, process.start_ticks) as handle:
                while not handle.wait(NO_LIMIT_S):
                    log.debug("process %d still waits", process.pid)
        except (NotFoundError, TargetLostError) as gone:
            log.debug("%s", gone.reason)
        with self._targets.one_at_a_time(notes.root_pid, "standby"):
            key = (notes.pid, notes.start_ticks)
            if self._context.suspended.get(key) is not notes or process.is_alive():
                return
            log.warning("standby process %d of %s has ended; its data is let go", process.pid, notes.image)
            if len(notes.gpu_processes) > 1:  # nobody wants a job without one of its ranks
                for pid in (notes.root_pid, *(one.pid for one in notes.gpu_processes)):
                    end_tree(self._context, pid, alive=True)
            Resume(self._context, ResumeRequest(notes)).discard()

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> list[Notes]:
        return [notes for notes in list(self._context.suspended.values()) if notes.hold]

    def _matching(self, manifest: Manifest, request: RestoreRequest) -> list[Notes]:
        """Those of this very image (its operation's number is its own, wherever it was copied to) that are alive, on
        the GPUs, in a namespace and with the name that were asked for."""
        gpu_map = request.gpu_map
        wanted = {one.ordinal: gpu_map[one.uuid] for one in manifest.devices if one.uuid in gpu_map}
        return [
            notes
            for notes in self._all()
            if notes.operation_id == manifest.operation
            and (notes.instance or not request.new_pid_namespace)
            and request.name in ("", notes.name)
            and all(old in notes.ports and new in (0, notes.ports[old]) for old, new in request.ports.items())
            and (not request.binds or list(request.binds) == notes.binds)
            and wanted.items() <= notes.devices.items()
            and all(Identity(one.pid, one.start_ticks).is_alive() for one in notes.gpu_processes)
        ]

    def _told(self, notes: Notes) -> dict[str, Any]:
        return {
            "image": notes.image,
            "name": notes.name,
            "pid": notes.pid,
            "root_pid": notes.root_pid,
            "instance": notes.instance,
            "ports": {str(old): new for old, new in notes.ports.items()},
            "state": "standby",
            "hold": notes.hold,
            "new": False,
            "bytes": sum(handle.size for handle in notes.handles),
        }
