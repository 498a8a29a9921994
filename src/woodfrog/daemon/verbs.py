"""The verbs of daemon.sock: parameters checked, the target found and locked, the operation run, its result counted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from woodfrog.daemon.instances import INSTANCE_PARAMETERS, instance_of
from woodfrog.daemon.node import Node
from woodfrog.daemon.promotions import Promotion
from woodfrog.daemon.server import Call, Verb, optional, refuse_unknown, required
from woodfrog.daemon.targets import Resolved
from woodfrog.errors import NotFoundError, RefusedError, TargetState, UsageError, WoodfrogError
from woodfrog.image.writer import parse_compression
from woodfrog.operations import room
from woodfrog.operations.checkpoint_plan import CheckpointRequest
from woodfrog.operations.concurrent import check_way
from woodfrog.operations.manifest import version
from woodfrog.operations.migrate import Migrate, MigrateRequest
from woodfrog.operations.notes import COLD, HOLD_HOST, WARM, Notes
from woodfrog.operations.placement import resolve
from woodfrog.operations.promote import EAGER, MODES
from woodfrog.operations.restore import Restore
from woodfrog.operations.restore_plan import RestoreRequest
from woodfrog.operations.resume import Resume, ResumeRequest
from woodfrog.operations.retake import RetakenCheckpoint
from woodfrog.operations.suspend import Suspend, SuspendRequest
from woodfrog.operations.switch import Switch, SwitchRequest
from woodfrog.target import pid_namespace
from woodfrog.target.identity import ProcessHandle

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest

log = logging.getLogger(__name__)

MAX_TIMEOUT_S = 86_400.0


class Running(Protocol):
    """What a runner is asked here."""

    @property
    def times(self) -> dict[str, float]: ...

    def cancel(self, reason: str) -> bool: ...


class Operation(Protocol):
    @property
    def runner(self) -> Running: ...

    def run(self) -> dict[str, Any]: ...


class Verbs:
    """One method a verb. `stop` is called once the daemon shall end."""

    def __init__(self, node: Node, stop: Callable[[], None]) -> None:
        self._node = node
        self._stop = stop

    def table(self) -> dict[str, Verb]:
        return {
            "ping": self.ping,
            "ps": self.ps,
            "checkpoint": self.checkpoint,
            "restore": self.restore,
            "promotion": self.promotion,
            "standby": self.standby,
            "standby_end": self.standby_end,
            "suspend": self.suspend,
            "resume": self.resume,
            "switch": self.switch,
            "migrate": self.migrate,
            "wait": self.wait,
            "arena": self.arena,
            "doctor": self.doctor,
            "metrics": self.metrics,
            "stop": self.stop,
        }

    def ping(self, call: Call) -> dict[str, Any]:
        """Who answers. Never waits."""
        return {
            "pid": os.getpid(),
            "version": version(),
            "runtime_directory": str(self._node.directory),
            "ready": self._node.started,
        }

    def ps(self, call: Call) -> list[dict[str, Any]]:
        _ = self._node.context  # targets that are being recovered are in the table only afterwards
        self._drop_dead()
        rows = self._node.targets.rows()
        for row in rows:
            promotion = self._node.promotions.latest(row["root_pid"])
            if promotion is not None and row["state"] == TargetState.RUNNING:
                row["hosted_bytes"] = promotion.hosted_bytes
        return rows

    def checkpoint(self, call: Call) -> dict[str, Any]:
        params = call.params
        known = {"target", "stop", "cpu", "store", "name", "timeout_s", "compress", "incremental", "check_clean"}
        refuse_unknown(params, known | {"concurrent", "precopy"})
        target = self._running(params, "checkpoint")
        request = CheckpointRequest(
            root_pid=target.root_pid,
            stop=optional(params, "stop", bool, False),
            cpu=optional(params, "cpu", bool, True),
            store=_place(optional(params, "store", str, "")),
            name=optional(params, "name", str, ""),
            timeout_s=_timeout(params),
            compress=optional(params, "compress", str, "auto"),
            incremental=optional(params, "incremental", bool, True),
            check_clean=optional(params, "check_clean", bool, False),
            concurrent=optional(params, "concurrent", str, "auto"),
            precopy=optional(params, "precopy", bool, False),
        )
        parse_compression(request.compress)
        check_way(request.concurrent, stop=request.stop)

        def make() -> Operation:
            self._require_running(target, "checkpoint")
            return RetakenCheckpoint(self._node.context, request, call.emit)

        return self._run("checkpoint", target.root_pid, call, make)

    def restore(self, call: Call) -> dict[str, Any]:
        params = call.params
        refuse_unknown(params, {"image", "store", "gpu_map", "mode", "verify", "standby", "wait", *INSTANCE_PARAMETERS})
        mode = optional(params, "mode", str, EAGER)
        if mode not in MODES:
            raise UsageError(f"there is no restore mode {mode!r}", advice=f"this version has: {', '.join(MODES)}")
        context = self._node.context
        image = required(params, "image", str)
        store = _place(optional(params, "store", str, ""))
        manifest = context.store(store).manifest(image)
        request = RestoreRequest(
            image=image,
            store=store,
            gpu_map=self._gpu_map(params, manifest),
            verify=optional(params, "verify", bool, False),
            mode=mode,
            **instance_of(params),
        )
        taken = None
        if optional(params, "standby", bool, True):
            taken = self._node.standby.take(self._run, request, manifest, call)
        if taken is not None:
            result, promoting = taken
        else:
            with self._node.targets.for_restore(request, manifest) as (turn, named):
                restore = Restore(context, named, call.emit)
                result = self._run("restore", turn, call, lambda: restore)
                promoting = restore.promotion
        promotion = self._promote(promoting)
        with ProcessHandle(result["pid"]) as handle:
            self._node.targets.remember_name(handle.identity, result["name"])
        return self._with_promotion(result, promotion, call)

    def promotion(self, call: Call) -> dict[str, Any]:
        """The newest promotion of a target; with `wait` once it has ended."""
        refuse_unknown(call.params, {"target", "wait"})
        target = self._running(call.params, "promotion")
        promotion = self._node.promotions.latest(target.root_pid)
        if promotion is None:
            raise NotFoundError(
                f"{target.name} (process {target.pid}) has had no promotion", pid=target.pid, target_state=target.state
            )
        return self._with_promotion({"name": target.name, "pid": target.pid}, promotion, call)

    def _with_promotion(self, result: dict[str, Any], promotion: Promotion | None, call: Call) -> dict[str, Any]:
        """`result` with what is to be told of the promotion, of which the call may want to see the end."""
        if promotion is None:
            return result
        if optional(call.params, "wait", bool, False):
            self._node.promotions.wait(promotion, call.emit, call.cancellable)
        told = promotion.to_dict()
        if promotion.failure is not None and promotion.failure.target_state != TargetState.RUNNING:
            raise promotion.failure
        warnings = list(result.get("warnings", []))
        if told["reason"]:
            left = told["left_bytes"] >> 20
            warnings.append(
                f"{left} MiB stay on host memory, where the target runs slower and right: {told['reason']}; "
                "`woodfrog resume` goes on with the promotion"
            )
        return {**result, "promotion": told, "warnings": warnings}

    def standby(self, call: Call) -> list[dict[str, Any]]:
        """Processes of an image, restored and waiting: as many as asked for, those that are there counted."""
        params = call.params
        refuse_unknown(params, {"image", "store", "gpu_map", "hold", "count", *INSTANCE_PARAMETERS})
        context = self._node.context
        image, store = required(params, "image", str), _place(optional(params, "store", str, ""))
        manifest = context.store(store).manifest(image)
        gpu_map = self._gpu_map(params, manifest)
        request = RestoreRequest(image=image, store=store, gpu_map=gpu_map, **instance_of(params))
        hold, count = optional(params, "hold", str, HOLD_HOST), optional(params, "count", int, 1)
        return self._node.standby.fill(self._run, request, manifest, hold, count, call)

    def standby_end(self, call: Call) -> list[int]:
        """End processes of the pool: those of an image, the one with that pid, or (nothing named) all."""
        refuse_unknown(call.params, {"which"})
        _ = self._node.context
        return self._node.standby.end(optional(call.params, "which", str, ""))

    def suspend(self, call: Call) -> dict[str, Any]:
        refuse_unknown(call.params, {"target", "timeout_s", "level"})
        level = _level(call.params)
        target = self._running(call.params, "suspend")
        request = SuspendRequest(target.root_pid, _timeout(call.params), level)

        def make() -> Operation:
            self._require_running(target, "suspend")
            return Suspend(self._node.context, request, call.emit)

        result = self._run("suspend", target.root_pid, call, make)
        self._node.promotions.overtaken(target.root_pid)
        return result

    def resume(self, call: Call) -> dict[str, Any]:
        """A suspended target runs on; of a running one the promotion goes on that had stopped."""
        refuse_unknown(call.params, {"target", "gpu_map", "wait"})
        gpu_map = optional(call.params, "gpu_map", dict, {})
        context = self._node.context
        target = self._node.targets.resolve(_reference(call.params))
        if target.key in self._node.targets.frozen:
            if gpu_map:
                raise RefusedError(
                    f"{target.name} (process {target.pid}) is frozen: its memory is on the GPUs that it left",
                    advice=f"woodfrog resume {target.name}, then woodfrog migrate",
                    pid=target.pid,
                    target_state=TargetState.FROZEN,
                )
            return self._bring_back(target.key)

        if target.state == TargetState.RUNNING and (
            promotion := self._node.promotions.resume(target.root_pid, [pid for pid, _ in target.members])
        ):
            result = {"name": target.name, "pid": target.pid, "state": target.state, "phases": {}, "bytes": 0}
            return self._with_promotion(result, promotion, call)

        def make() -> Operation:
            notes = self._node.targets.suspended.get(target.key)
            if notes is None:
                raise RefusedError(
                    f"{target.name} (process {target.pid}) is not suspended, and all of its memory is on the GPU",
                    pid=target.pid,
                    target_state=TargetState.RUNNING,
                )
            resumed.append(Resume(context, ResumeRequest(notes, gpu_map), call.emit))
            return resumed[0]

        resumed: list[Resume] = []
        result = self._run("resume", target.root_pid, call, make)
        return self._with_promotion(result, self._promote(resumed[0].promotion), call)

    def _promote(self, notes: Notes | None) -> Promotion | None:
        """Begin with what has to follow an operation."""
        return self._node.promotions.start(notes) if notes is not None else None

    def migrate(self, call: Call) -> dict[str, Any]:
        """A running target to other GPUs of this machine, in the same processes."""
        params = call.params
        refuse_unknown(params, {"target", "gpu_map", "timeout_s", "precopy"})
        target = self._running(params, "migrate")
        request = MigrateRequest(
            target.root_pid,
            optional(params, "gpu_map", dict, {}),
            timeout_s=_timeout(params),
            precopy=optional(params, "precopy", bool, False),
        )

        def make() -> Operation:
            self._require_running(target, "migrate")
            return Migrate(self._node.context, request, call.emit)

        result = self._run("migrate", target.root_pid, call, make)
        if all(old != new for old, new in result["gpu_map"].items()):
            self._node.promotions.overtaken(target.root_pid)
        return result

    def wait(self, call: Call) -> dict[str, Any]:
        """Wait for the end of a restored target, whose parent is this daemon; its exit status where it is known."""
        pid = required(call.params, "pid", int)
        # In a PID namespace process 1 reaps it, ends with its status, and is ours to reap.
        init = pid_namespace.init_above(pid)
        with ProcessHandle(pid) as handle:
            identity = handle.identity
            handle.wait(MAX_TIMEOUT_S)
        if init is not None:
            identity = init.identity
        status = self._node.reaper.wait(identity, 1.0)
        if status is None:
            return {"pid": pid, "exit_code": None, "signal": None}
        return {"pid": pid, "exit_code": status.exit_code, "signal": status.signal or None}

    def switch(self, call: Call) -> dict[str, Any]:
        """One target leaves the GPU, a suspended one comes back."""
        refuse_unknown(call.params, {"out", "in", "level", "timeout_s"})
        level, timeout_s = _level(call.params), _timeout(call.params)
        leaving = self._running({"target": call.params.get("out")}, "switch")
        coming = self._node.targets.resolve(_reference({"target": call.params.get("in")}))
        if leaving.root_pid == coming.root_pid:
            raise UsageError("a target cannot take its own place", advice="name two targets")

        def make() -> Switch:
            self._require_running(leaving, "switch")
            notes = self._node.targets.suspended.get(coming.key)
            if notes is None:
                raise RefusedError(
                    f"{coming.name} (process {coming.pid}) is {coming.state}; it has to be suspended to be switched in",
                    pid=coming.pid,
                    target_state=coming.state,
                )
            request = SwitchRequest(leaving.root_pid, notes, timeout_s, level)
            switched.append(Switch(self._node.context, request, call.emit))
            return switched[0]

        switched: list[Switch] = []
        first, second = sorted((leaving.root_pid, coming.root_pid))  # of two switches each waits for the same one first
        with self._node.targets.one_at_a_time(first, "switch"):
            result = self._run("switch", second, call, make)
        self._node.promotions.overtaken(leaving.root_pid)
        self._promote(switched[0].promotion)
        return result

    def arena(self, call: Call) -> dict[str, Any]:
        arenas = self._node.context.arenas
        return {
            "size_bytes": arenas.size_bytes,
            "free_bytes": arenas.free_bytes,
            "prepared_bytes": arenas.prepared_bytes,
            "host_available_bytes": room.host_available_bytes(),
        }

    def doctor(self, call: Call) -> dict[str, Any]:
        """What only the daemon knows; the checks themselves are the command line's."""
        devices = self._node.devices
        return {
            **self.ping(call),
            "devices": [
                {"ordinal": one.ordinal, "uuid": uuid, "name": one.name, "total_bytes": one.total_bytes}
                for uuid, one in devices.all().items()
            ],
            "device_failure": devices.failure,
            "arena": self.arena(call),
            "suspended": [notes.name for notes in self._node.targets.suspended.values()],
            "frozen": [notes.name for notes in self._node.targets.frozen.values()],
        }

    def metrics(self, call: Call) -> dict[str, Any]:
        return self._node.metrics.snapshot()

    def stop(self, call: Call) -> dict[str, Any]:
        """End the daemon and its keeper; refused while anybody depends on them."""
        _ = self._node.context
        self._drop_dead()
        self._node.require_idle()
        self._node.let_go()
        self._stop()  # first: once the keeper is gone, nobody may reach a daemon that is about to end
        self._node.keeper.stop()
        return {"stopped": True}

    # ── shared ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, name: str, root_pid: int, call: Call, make: Callable[[], Operation]) -> dict[str, Any]:
        with self._node.targets.one_at_a_time(root_pid, name):
            operation = make()
            call.cancellable(operation.runner.cancel)
            outcome, size = "ok", 0
            try:
                result = operation.run()
                size = result.get("bytes", 0)
            except WoodfrogError as failure:
                outcome = type(failure).__name__
                self._note_frozen(operation, failure)
                raise
            finally:
                self._node.metrics.record(name, outcome, operation.runner.times, size)
        log.info("%s of process %d: %s", name, root_pid, {key: round(s, 4) for key, s in result["phases"].items()})
        return result

    def _note_frozen(self, operation: Operation, failure: WoodfrogError) -> None:
        """A target that could not be brought back stays in the table, for `resume` to try again."""
        target = getattr(operation, "frozen_target", None)
        if failure.target_state == TargetState.FROZEN and target is not None:
            self._node.targets.frozen[(target.notes.pid, target.notes.start_ticks)] = target.notes
        coming = getattr(operation, "frozen_incoming", None)
        if failure.details.get("in_state") == TargetState.FROZEN and coming is not None:
            self._node.targets.frozen[(coming.notes.pid, coming.notes.start_ticks)] = coming.notes

    def _bring_back(self, key: tuple[int, int]) -> dict[str, Any]:
        notes = self._node.targets.frozen[key]
        with self._node.targets.one_at_a_time(notes.root_pid, "resume"):
            self._node.recovery.again(notes)
        return {"name": notes.name, "pid": notes.pid, "state": TargetState.RUNNING, "phases": {}, "bytes": 0}

    def _running(self, params: dict[str, Any], verb: str) -> Resolved:
        _ = self._node.context
        target = self._node.targets.resolve(_reference(params))
        self._require_running(target, verb)
        return target

    def _require_running(self, target: Resolved, verb: str) -> None:
        """Asked again once the target's turn has come: the operation before may have suspended it."""
        for state, key, _ in self._node.targets.waiting():
            if key == target.key:
                raise RefusedError(
                    f"{target.name} (process {target.pid}) is {state}; {verb} needs it running",
                    advice=f"woodfrog resume {target.name}",
                    pid=target.pid,
                    target_state=state,
                )

    def _drop_dead(self) -> None:
        """Data of suspended targets that were killed is of no use to anybody."""
        context = self._node.context
        for notes in list(self._node.targets.suspended.values()):
            if not notes.alive and notes.root_pid not in self._node.targets.operations:
                what = f"standby process of {notes.image}," if notes.hold else "suspended"
                log.warning("%s process %d (%s) has ended; its data is let go", what, notes.pid, notes.name)
                Resume(context, ResumeRequest(notes)).discard()

    def _gpu_map(self, params: dict[str, Any], manifest: Manifest) -> dict[str, str]:
        """UUIDs or ordinals, on both sides, as UUIDs of 32 hex digits."""
        there = [one.uuid for one in manifest.devices]
        return resolve(self._node.devices, optional(params, "gpu_map", dict, {}), there)


def _reference(params: dict[str, Any]) -> int | str:
    value = params.get("target")
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UsageError("the parameter 'target' must be a pid or a name")
    return value


def _timeout(params: dict[str, Any]) -> float:
    value = optional(params, "timeout_s", float, 30.0)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise UsageError(f"a time-out of {value:g} s makes no sense", advice=f"0 < timeout ≤ {MAX_TIMEOUT_S:g}")
    return float(value)


def _level(params: dict[str, Any]) -> str:
    level: str = optional(params, "level", str, COLD)
    if level not in (WARM, COLD):
        raise UsageError(f"there is no level {level!r}", advice="warm or cold")
    return level


def _place(store: str) -> str:
    if store and not store.startswith(("/", "ram:", "s3://")):
        raise UsageError(f"the store {store!r} is neither an absolute path nor ram:NAME nor s3://BUCKET/PREFIX")
    return store
