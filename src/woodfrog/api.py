"""The public API: each function does what the verb of the same name does, and raises WoodfrogError for every failure.

Operations go to the node daemon of the runtime directory, which is started when there is none; `images`, `inspect`,
`verify` and `rm` read the store themselves and need no daemon. It must never print.

Events (`on_event`) are dicts: {"event": "begin"|"end"|"undo", "phase": …, "seconds": …} and {"event": "progress",
"phase": …, "bytes_done": …, "bytes_total": …, "seconds": …}.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from woodfrog import launch
from woodfrog.daemon import runtime_dir
from woodfrog.daemon.client import Client, ensure_daemon
from woodfrog.errors import TargetState, UsageError, WoodfrogError
from woodfrog.image_api import OnEvent, StorePath, images, inspect, open_image, place_of, rm, store_text, verify
from woodfrog.results import (
    CheckpointResult,
    ImageInfo,
    MigrateResult,
    PromotionResult,
    RestoreResult,
    ResumeResult,
    StandbyResult,
    SuspendResult,
    SwitchResult,
    TargetInfo,
    VerifyResult,
)

__all__ = [
    "CheckpointResult",
    "ImageInfo",
    "MigrateResult",
    "OnEvent",
    "PromotionResult",
    "RestoreResult",
    "ResumeResult",
    "StandbyResult",
    "StorePath",
    "SuspendResult",
    "SwitchResult",
    "Target",
    "TargetInfo",
    "VerifyResult",
    "checkpoint",
    "end_standby",
    "images",
    "inspect",
    "migrate",
    "open_image",
    "promotion",
    "ps",
    "restore",
    "resume",
    "rm",
    "run",
    "standby",
    "standby_pool",
    "suspend",
    "switch",
    "verify",
]

DEFAULT_TIMEOUT_S = 30.0
# How long after a target's end the daemon's word on its exit code is waited for.
_EXIT_CODE_S = 2.0
_Result = TypeVar("_Result")


class Target:
    """A process that woodfrog can checkpoint, made by `run` or `restore` (`details`: the daemon's report of that).

    `exit_code` is None while it runs, and for a restored target (whose parent is the daemon) also when `wait` was
    called only after its end.
    """

    _pidfd = -1  # until it is known: __del__ may find a half-made object

    def __init__(
        self,
        name: str,
        pid: int,
        log: str,
        process: subprocess.Popen[bytes] | None = None,
        *,
        log_offset: int = 0,
        details: RestoreResult | None = None,
    ) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.log_offset = log_offset  # where its output begins in the log
        self.started_unix_s = time.time()
        self.details = details
        self.exit_code: int | None = None
        self._process = process
        self._pidfd = -1 if process is not None else _pidfd_open(pid)
        self._waiter: threading.Thread | None = None

    def poll(self) -> bool:
        """True while it runs."""
        if self._process is not None:
            self.exit_code = self._process.poll()
            return self.exit_code is None
        return self._pidfd >= 0 and not _readable(self._pidfd, 0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end and return the exit code (negative: the signal that ended it), as far as it can be known.

        TimeoutError when `timeout_s` passes first; the target runs on.
        """
        late = TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout_s} s")
        if self._process is not None:
            try:
                self.exit_code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise late from None
            return self.exit_code
        if self._pidfd < 0:
            return self.exit_code
        if self._waiter is None:
            # The daemon is the parent and knows the code; the pidfd knows the end whatever becomes of the daemon.
            self._waiter = threading.Thread(target=self._ask_exit_code, name="woodfrog-wait", daemon=True)
            self._waiter.start()
        if not _readable(self._pidfd, timeout_s):
            raise late
        self._waiter.join(_EXIT_CODE_S)
        return self.exit_code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens when it has ended already."""
        try:
            if self._process is not None:
                self._process.send_signal(number)
            elif self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def _ask_exit_code(self) -> None:
        try:
            with Client.connect() as client:
                answer = client.call("wait", {"pid": self.pid})
        except WoodfrogError:
            return  # no daemon, or it does not know: the end is seen all the same
        code, number = answer.get("exit_code"), answer.get("signal")
        self.exit_code = -number if number else code

    def __repr__(self) -> str:
        return f"<Target {self.name} pid {self.pid}>"

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def run(
    argv: Sequence[str],
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    log: str | os.PathLike[str] | None = None,
    track: bool = False,
    io_uring: bool | None = None,
) -> Target:
    """Start a program so that it can be checkpointed. With `track` it follows its launches, and what they cannot have
    written is not hashed at a checkpoint. Without `io_uring`, which CRIU cannot save, the kernel has none for it (a
    seccomp filter; without CAP_SYS_ADMIN nothing inside can gain privileges then). None: not where that costs nothing,
    that is with CAP_SYS_ADMIN. It gets no standard input; its output is appended to `log` (default: logs/NAME.log in
    the runtime directory). `env` replaces the environment, as in subprocess."""
    if not argv:
        raise UsageError("there is no command to run", advice="woodfrog run -- PROGRAM ARGUMENTS…")
    interposer = launch.interposer()
    with ensure_daemon() as client:
        directory = runtime_dir.path()
        if name is None:
            name = launch.default_name(argv, (target.name for target in _targets(client)))
    log_path = Path(log).absolute() if log is not None else directory / "logs" / f"{name}.log"
    environment = launch.target_environment(
        name, directory, os.environ if env is None else env, interposer, track=track
    )
    log_offset = log_path.stat().st_size if log_path.exists() else 0
    process = launch.start(argv, name=name, log=log_path, env=environment, cwd=cwd, io_uring=io_uring)
    return Target(name, process.pid, str(log_path), process, log_offset=log_offset)


def checkpoint(
    target: Target | int | str,
    *,
    stop: bool = False,
    leave_running: bool = True,
    cpu: bool = True,
    store: StorePath = None,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    compress: str = "auto",
    incremental: bool = True,
    check_clean: bool = False,
    concurrent: str = "auto",
    precopy: bool = False,
    on_event: OnEvent | None = None,
) -> CheckpointResult:
    """Write an image of a running target (a Target, a pid, or a name). `stop` (or leave_running=False) ends it once the
    image is durable. `cpu=False` leaves the CPU side out: such an image holds GPU memory only. `timeout` (seconds)
    bounds the wait for the target's work in flight. `compress`: auto, none, lz4, zstd or zstd:LEVEL. Only what the
    store does not have is moved; without `incremental` all GPU memory is, and is compared in host memory.
    `check_clean`: of a target that follows its launches, hash also what they cannot have written, and fail if that
    differs. `concurrent`: "copy" lets the target run on beside a copy of what is new in the GPU's memory, "cow" while
    that is captured from its own, "stop" only when it is out of it; "auto" is "copy" where there is room for it, else
    "cow". The result's `concurrent` says what was done, and `retaken` whether "cow" missed a write and "stop" followed.
    `precopy`: copies in rounds while it still runs, so that less is left once it waits."""
    params = {
        "target": _target(target),
        "stop": stop or not leave_running,
        "cpu": cpu,
        "store": store_text(store),
        "name": name,
        "timeout_s": float(timeout),
        "compress": compress,
        "incremental": incremental,
        "check_clean": check_clean,
        "concurrent": concurrent,
        "precopy": precopy,
    }
    return _call("checkpoint", params, on_event, CheckpointResult)


def restore(
    image: str,
    *,
    gpu_map: Mapping[str, str] | None = None,
    mode: str = "eager",
    wait: bool = False,
    store: StorePath = None,
    verify: bool = False,
    standby: bool = True,
    new_pid_namespace: bool = False,
    name: str | None = None,
    ports: Mapping[int, int] | None = None,
    binds: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    hook: str | None = None,
    hook_timeout: float | None = None,
    on_event: OnEvent | None = None,
) -> Target:
    """Bring an image (NAME@NUMBER, NAME, or STORE/ before either) back as a process with the pids that it had; with
    `new_pid_namespace` it has them in a PID namespace of its own, so that any number of processes of one image can run,
    each with its own name (`name`, or the image's with -2, -3 … behind it) and log. `ports`: TCP ports that the image
    listens on → others to listen on instead (0: any free one; `target.details.ports` says which). `binds`: paths here →
    where the target finds them, in a new PID namespace. `env` reaches programs that use `woodfrog.on_restore`. `hook`:
    a shell command that is run before the target goes on, its time limit `hook_timeout` seconds; if it fails, so does
    the restore.
    `gpu_map`: GPU in the image → GPU here, each a UUID or an ordinal. `verify` hashes the memory again once it is in
    place. A standby process of that image is taken if there is one, unless `standby` is False.

    `mode`: "eager" runs the target once its data is on the GPU; "mapped" runs it on host memory that holds its data,
    which then moves to the GPU, in pauses of a few milliseconds; "ordered" moves first what it uses first. `wait`
    returns only when all has moved. The daemon's report is in `target.details`; its `standby` says whether one was
    taken, its `promotion` what has become of that."""
    store, image = place_of(image, store)
    params = {
        "image": image,
        "gpu_map": _gpu_map(gpu_map),
        "mode": mode,
        "wait": wait,
        "store": store_text(store),
        "verify": verify,
        "standby": standby,
        **_instance(new_pid_namespace, name, ports, binds, hook, hook_timeout),
        "environment": dict(env or {}),
    }
    result = _call("restore", params, on_event, RestoreResult)
    return Target(result.name, result.root_pid or result.pid, result.log, details=result)


def standby(
    image: str,
    *,
    count: int = 1,
    hold: str = "host",
    new_pid_namespace: bool = False,
    name: str | None = None,
    ports: Mapping[int, int] | None = None,
    binds: Mapping[str, str] | None = None,
    hook: str | None = None,
    hook_timeout: float | None = None,
    gpu_map: Mapping[str, str] | None = None,
    store: StorePath = None,
    on_event: OnEvent | None = None,
) -> list[StandbyResult]:
    """Have `count` processes of an image wait, restored up to where only their memory is missing; `restore` of that
    image then takes one. Those that wait already count. More than one are each in a PID namespace of their own, as one
    is with `new_pid_namespace`; `name`, `ports` (0 for several), `binds` and `hook` as for `restore`. `hold`: "host"
    keeps their data in the host arena (taking one costs a copy), "device" in the GPU's memory (taking one costs a
    remap), "mapped" in host memory that the process is mapped to when it is taken (a remap too; its data is promoted
    while it runs)."""
    store, image = place_of(image, store)
    params = {
        "image": image,
        "gpu_map": _gpu_map(gpu_map),
        "store": store_text(store),
        "hold": hold,
        "count": count,
        **_instance(new_pid_namespace, name, ports, binds, hook, hook_timeout),
    }
    return _call("standby", params, on_event, list[StandbyResult])


def _instance(
    new_pid_namespace: bool,
    name: str | None,
    ports: Mapping[int, int] | None,
    binds: Mapping[str, str] | None,
    hook: str | None,
    hook_timeout: float | None,
) -> dict[str, Any]:
    """Parameters of what a process has that others of its image have not."""
    return {
        "new_pid_namespace": new_pid_namespace,
        "target_name": name,
        "ports": {str(old): new for old, new in (ports or {}).items()},
        "binds": [[str(Path(here).absolute()), there] for here, there in (binds or {}).items()],
        "hook": hook,
        "hook_timeout_s": hook_timeout,
    }


def standby_pool() -> list[TargetInfo]:
    """The processes that wait in the standby pool."""
    return [target for target in ps() if target.state == TargetState.STANDBY]


def end_standby(which: int | str = "") -> list[int]:
    """End the processes of the standby pool that are of this image, or have this pid, or all; the pids of those that
    were ended. NotFoundError if one is named and there is none."""
    return _call("standby_end", {"which": str(which)}, None, list[int])


def suspend(
    target: Target | int | str,
    *,
    level: str = "cold",
    timeout: float = DEFAULT_TIMEOUT_S,
    on_event: OnEvent | None = None,
) -> SuspendResult:
    """Take a target off the GPU: its memory waits in host memory, the process lives on, frozen at its next GPU call.
    `level`: "cold" leaves nothing of it on the GPU; "warm" leaves its context there (some hundred MiB), and it is back
    after a copy."""
    params = {"target": _target(target), "timeout_s": float(timeout), "level": level}
    return _call("suspend", params, on_event, SuspendResult)


def resume(
    target: Target | int | str,
    *,
    gpu_map: Mapping[str, str] | None = None,
    wait: bool = False,
    on_event: OnEvent | None = None,
) -> ResumeResult:
    """Give a suspended target its GPU memory back; it goes on where it was. `gpu_map`: on other GPUs than it left, as
    for `migrate`. Of a running target whose promotion stopped (a restore with another mode than "eager"), that goes on;
    `wait` returns once it has ended."""
    params = {"target": _target(target), "gpu_map": _gpu_map(gpu_map), "wait": wait}
    return _call("resume", params, on_event, ResumeResult)


def promotion(target: Target | int | str, *, wait: bool = False, on_event: OnEvent | None = None) -> PromotionResult:
    """How far the memory of a target that was restored as "mapped" or "ordered" has come on its way to the GPU; `wait`
    returns once it has ended. NotFoundError for a target without one."""
    result = _call("promotion", {"target": _target(target), "wait": wait}, on_event, ResumeResult)
    assert result.promotion is not None  # or the daemon says why there is none
    return result.promotion


def migrate(
    target: Target | int | str,
    gpu_map: Mapping[str, str],
    *,
    precopy: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    on_event: OnEvent | None = None,
) -> MigrateResult:
    """Move a running target to other GPUs of this machine; its processes stay. `gpu_map`: GPU that it is on → GPU that
    it goes to, each a UUID or an ordinal (on the left: counted through those that the target uses). GPUs that are not
    named stay. `precopy`: its memory is copied while it still runs, and again what it has changed since."""
    params = {
        "target": _target(target),
        "gpu_map": _gpu_map(gpu_map),
        "precopy": precopy,
        "timeout_s": float(timeout),
    }
    return _call("migrate", params, on_event, MigrateResult)


def switch(
    leaving: Target | int | str,
    coming: Target | int | str,
    *,
    level: str = "cold",
    timeout: float = DEFAULT_TIMEOUT_S,
    on_event: OnEvent | None = None,
) -> SwitchResult:
    """Suspend one target and resume a suspended one in its place, both at once where the GPU has room for both. If the
    second cannot come, the first runs on. `level`, `timeout`: of the suspend."""
    params = {"out": _target(leaving), "in": _target(coming), "level": level, "timeout_s": float(timeout)}
    return _call("switch", params, on_event, SwitchResult)


def ps() -> list[TargetInfo]:
    """The targets that the daemon knows, by pid."""
    with ensure_daemon() as client:
        return _targets(client)


def _call(verb: str, params: dict[str, Any], on_event: OnEvent | None, kind: type[_Result]) -> _Result:
    with ensure_daemon() as client:
        return msgspec.convert(client.call(verb, params, on_event), kind)


def _gpu_map(gpu_map: Mapping[str, str] | None) -> dict[str, str]:
    return {str(there): str(here) for there, here in (gpu_map or {}).items()}


def _targets(client: Client) -> list[TargetInfo]:
    return msgspec.convert(client.call("ps"), list[TargetInfo])


def _target(target: Target | int | str) -> int | str:
    if isinstance(target, Target):
        return target.pid
    if isinstance(target, str) and target.isdigit():
        return int(target)
    if isinstance(target, int) and target < 1:
        raise UsageError(f"{target} is no process id")
    return target


def _pidfd_open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1  # it has ended already


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
