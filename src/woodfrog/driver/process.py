"""The driver's own checkpoint of one process: lock, checkpoint, restore, unlock, as the driver's state machine has it.

    running ──lock──▶ locked ──checkpoint──▶ checkpointed ──restore──▶ locked ──unlock──▶ running

A restore ends in *locked*. A lock that timed out leaves the target running. There is no way back after an error inside
checkpoint: the driver calls the process *failed*. Must never be asked about a thread: the driver takes a thread's
number for its process without a word, so that is refused here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from woodfrog.driver import features, library
from woodfrog.driver.library import DriverError
from woodfrog.errors import (
    NoSpaceError,
    NotFoundError,
    RefusedError,
    TargetLostError,
    TargetState,
    TimeoutExceededError,
)


class ProcessState(IntEnum):
    """CUprocessState (cuda.h); the last two came with CUDA 13.4."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


@dataclass(frozen=True)
class GpuPair:
    """A GPU of the checkpoint and the one to restore it onto, by UUID (16 bytes each)."""

    old_uuid: bytes
    new_uuid: bytes

    def __post_init__(self) -> None:
        if len(self.old_uuid) != 16 or len(self.new_uuid) != 16:
            raise ValueError("a GPU's UUID has 16 bytes")


_TARGET_STATES = {
    ProcessState.RUNNING: TargetState.RUNNING,
    ProcessState.LOCKED: TargetState.FROZEN,
    ProcessState.CHECKPOINTED: TargetState.FROZEN,
    ProcessState.FAILED: TargetState.GONE,
    ProcessState.CHECKPOINTING: TargetState.FROZEN,
    ProcessState.RESTORING: TargetState.FROZEN,
}

# How the driver answers about a process that has never called it, by driver branch.
_NOT_A_CUDA_PROCESS = frozenset(
    {
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_NOT_INITIALIZED",
        "CUDA_ERROR_NOT_SUPPORTED",
        "CUDA_ERROR_NOT_FOUND",
        "CUDA_ERROR_NOT_PERMITTED",
    }
)
_TIMEOUTS = frozenset({"CUDA_ERROR_NOT_READY", "CUDA_ERROR_TIMEOUT", "CUDA_ERROR_LAUNCH_TIMEOUT"})


class DriverProcess:
    """One CUDA process as the driver sees it. Holds nothing; the pid must stay the same process (target.identity)."""

    def __init__(self, pid: int) -> None:
        """NotFoundError when there is no such process, RefusedError for a thread's number."""
        self.pid = pid
        leader = _thread_group(pid)
        if leader is None:
            raise NotFoundError(f"Process {pid} does not exist.", pid=pid, target_state=TargetState.GONE)
        if leader != pid:
            raise RefusedError(
                f"{pid} is the number of a thread of process {leader}.", advice=f"Give the process: {leader}.", pid=pid
            )

    def state(self) -> ProcessState:
        """The driver's state of the process; RefusedError when it is no CUDA process, DriverError for the rest."""
        try:
            return self._state()
        except DriverError as error:
            self._require_alive()
            if not _may_look_into(self.pid):
                raise RefusedError(
                    f"This user may not have the driver look at process {self.pid}.",
                    advice="Be its owner or root.",
                    pid=self.pid,
                    details=error.details,
                ) from error
            if error.result in _NOT_A_CUDA_PROCESS:
                raise RefusedError(
                    f"Process {self.pid} does not use CUDA as far as the driver knows ({error.result}).",
                    advice="Give the process that does (`woodfrog ps --all`), or wait until it has started to.",
                    pid=self.pid,
                    details=error.details,
                ) from error
            raise

    def _state(self) -> ProcessState:
        try:
            return ProcessState(int(library.call("cuCheckpointProcessGetState", self.pid, pid=self.pid)))
        except ValueError:  # of bindings that are older than the driver: a state that they have no name for
            state = ctypes.c_int()
            library.call_raw("cuCheckpointProcessGetState", ctypes.c_int(self.pid), ctypes.byref(state), pid=self.pid)
            return ProcessState(state.value)

    def lock(self, timeout_s: float) -> None:
        """Stop new driver calls and wait for the work in flight. TimeoutExceededError: the target runs on."""
        arguments = library.bindings().CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, min(int(timeout_s * 1000), 0xFFFFFFFF))  # 0 would mean for ever
        try:
            library.call("cuCheckpointProcessLock", self.pid, arguments, pid=self.pid)
        except DriverError as error:
            if error.result in _TIMEOUTS and self.state() is ProcessState.RUNNING:
                raise TimeoutExceededError(
                    f"The driver could not lock the target within {timeout_s:g} s: its GPU work did not finish.",
                    advice="It runs on. Try again with a larger --timeout, or when it is less busy.",
                    pid=self.pid,
                    target_state=TargetState.RUNNING,
                    details=error.details,
                ) from error
            raise self._explained(error, "lock") from error

    def checkpoint(self) -> None:
        """Move the target's GPU state that is still there to host memory, and let the GPU go."""
        try:
            library.call("cuCheckpointProcessCheckpoint", self.pid, None, pid=self.pid)
        except DriverError as error:
            raise self._explained(error, "checkpoint") from error

    def restore(self, gpu_pairs: Sequence[GpuPair] = ()) -> None:
        """Bring the GPU state back; afterwards the target is locked. `gpu_pairs` must name every GPU of the target."""
        arguments = _restore_arguments(gpu_pairs) if gpu_pairs else None
        try:
            library.call("cuCheckpointProcessRestore", self.pid, arguments, pid=self.pid)
        except DriverError as error:
            if error.result == "CUDA_ERROR_OUT_OF_MEMORY":
                raise NoSpaceError(
                    "The GPU has not enough free memory for the target's control state (about 0.5 GB).",
                    advice="Free GPU memory (`nvidia-smi`), then `woodfrog resume`.",
                    pid=self.pid,
                    target_state=TargetState.FROZEN,
                    details=error.details,
                ) from error
            raise self._explained(error, "restore") from error

    def unlock(self) -> None:
        """Let the target's driver calls go on."""
        try:
            library.call("cuCheckpointProcessUnlock", self.pid, None, pid=self.pid)
        except DriverError as error:
            raise self._explained(error, "unlock") from error

    def restore_thread_id(self) -> int:
        """The thread of the target that the driver needs running for a restore; CRIU must not hold it stopped."""
        return int(library.call("cuCheckpointProcessGetRestoreThreadId", self.pid, pid=self.pid))

    def _explained(self, error: DriverError, step: str) -> DriverError | TargetLostError:
        """The same failure with the state that the process is in now, and what that means."""
        if _thread_group(self.pid) is None:
            return _ended(self.pid, step)
        try:
            state = self.state()
        except (DriverError, RefusedError):
            return error
        advice = {
            ProcessState.RUNNING: "The target runs on.",
            ProcessState.LOCKED: "The target is locked: unlock lets it go on.",
            ProcessState.CHECKPOINTED: "The target's GPU state is safe in host memory: restore can be tried again.",
            ProcessState.FAILED: "The driver has given the process up; only an earlier image brings it back.",
            ProcessState.CHECKPOINTING: "The driver is still at it: wait for it.",
            ProcessState.RESTORING: "The driver is still at it: wait for it.",
        }[state]
        if error.result == "CUDA_ERROR_NOT_SUPPORTED":
            advice += (
                " The target uses something that the driver cannot save (managed memory, IPC, MPS, MIG, multicast)."
            )
            if newer := features.lacking("gpu_remap", "legacy_ipc"):
                advice += f" Newer drivers can do more: {'; '.join(newer)}."
        return DriverError(
            f"The driver's {step} failed: {error.result or error.reason}; the process is {state.name.lower()}.",
            result=error.result,
            call=error.call,
            code=error.code,
            pid=self.pid,
            advice=advice,
            target_state=_TARGET_STATES[state],
            details={"state": state.name.lower()},
        )

    def _require_alive(self) -> None:
        if _thread_group(self.pid) is None:
            raise _ended(self.pid, "call")


def is_cuda_process(pid: int) -> bool:
    """Whether the driver knows this process; False also for one that has ended. NoDriverError without a driver."""
    try:
        DriverProcess(pid).state()
    except (RefusedError, NotFoundError, TargetLostError) as error:
        if isinstance(error, library.NoDriverError):
            raise
        return False
    return True


def _restore_arguments(gpu_pairs: Sequence[GpuPair]) -> Any:
    module = library.bindings()
    if not hasattr(module, "CUcheckpointGpuPair"):
        raise DriverError(
            "This version of cuda-bindings cannot move a target to another GPU.",
            advice="Install cuda-bindings 13 or newer.",
            call="cuCheckpointProcessRestore",
        )
    pairs = []
    for pair in gpu_pairs:
        entry = module.CUcheckpointGpuPair()
        for name, value in (("oldUuid", pair.old_uuid), ("newUuid", pair.new_uuid)):
            uuid = module.CUuuid()
            ctypes.memmove(uuid.getPtr(), value, len(value))  # its `bytes` can only be read
            setattr(entry, name, uuid)
        pairs.append(entry)
    arguments = module.CUcheckpointRestoreArgs()
    arguments.gpuPairs = pairs
    arguments.gpuPairsCount = len(pairs)
    return arguments


def _thread_group(pid: int) -> int | None:
    """The process that a number belongs to; None when there is none, or only a zombie."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return None if fields["State"].strip()[0] in "ZX" else int(fields["Tgid"])


def _may_look_into(pid: int) -> bool:
    """Whether the kernel would let this process see another one's files and memory; True when that has ended."""
    try:
        Path(f"/proc/{pid}/exe").readlink()
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _ended(pid: int, step: str) -> TargetLostError:
    return TargetLostError(
        f"The target (process {pid}) ended during the driver's {step}.",
        advice="Its output may say why; an earlier image can be restored.",
        pid=pid,
        target_state=TargetState.GONE,
    )
