"""Finds the interposer's agents in running processes and wakes those that sleep.

An agent without a connection holds no descriptor of ours and cannot be called: it is found by its thread's name and
woken by a signal to that thread alone (wire.h). The signal's default action ends a process, so it is sent only to a
thread that is seen to block it or to wait for it. Must never signal a process as a whole.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from dataclasses import dataclass
from pathlib import Path

from woodfrog.errors import RefusedError, TargetLostError, TargetState
from woodfrog.target import procfs
from woodfrog.target.identity import Identity, ProcessHandle
from woodfrog.target.process import AGENT_THREAD_NAME

WAKE_SIGNAL_OFFSET = 3  # native/wire/wire.h WF_WAKE_SIGNAL_OFFSET
_RT_SIGTIMEDWAIT = {"x86_64": "128", "aarch64": "137"}  # the kernel's system call tables


@dataclass(frozen=True)
class Agent:
    """An agent thread of this user, connected or asleep."""

    pid: int
    tid: int
    start_ticks: int  # of the process
    name: str  # WOODFROG_NAME of the target, "" when it has none

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start_ticks)


def wake_signal() -> int:
    """SIGRTMAX is the C library's; both sides use the same."""
    return int(signal.SIGRTMAX) - WAKE_SIGNAL_OFFSET


def managed_targets() -> list[Agent]:
    """Every agent of this user, by pid."""
    own = os.geteuid()
    found: list[Agent] = []
    for pid in procfs.pids():
        try:
            if Path(f"/proc/{pid}").stat().st_uid != own:
                continue
            found.extend(_agents_of(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or not to be looked into: not a target of ours
    return sorted(found, key=lambda agent: agent.pid)


def agent_of(pid: int) -> Agent | None:
    """The agent in this process; None when it has none (it was not started by `woodfrog run`)."""
    return next(iter(_agents_of(pid)), None)


def wake(agent: Agent) -> None:
    """Tell a sleeping agent to connect; one that is connected is not harmed. TargetLostError when it is gone."""
    with ProcessHandle(agent.pid, agent.start_ticks) as handle:
        handle.require_alive()
        if not _takes_wake_signal(agent.pid, agent.tid):
            raise RefusedError(
                f"Thread {agent.tid} of process {agent.pid} is called an agent but does not wait for the wake signal.",
                advice="The target may be starting or ending: try again. It was not touched.",
                pid=agent.pid,
            )
        _tgkill(agent.pid, agent.tid, wake_signal())


def _agents_of(pid: int) -> list[Agent]:
    for tid in procfs.threads(pid):
        if procfs.thread_name(pid, tid) == AGENT_THREAD_NAME and _takes_wake_signal(pid, tid):
            stat = procfs.stat(pid)
            return [Agent(pid, tid, stat.start_ticks, _name_of(pid))] if stat is not None else []
    return []


def _takes_wake_signal(pid: int, tid: int) -> bool:
    """Whether the wake signal would stay pending for this thread, or end its wait, instead of ending the process.

    While a thread waits in rt_sigtimedwait the kernel takes what it waits for out of its blocked set, so the mask alone
    does not tell.
    """
    fields = procfs.status(pid, tid) or {}
    if int(fields.get("SigBlk", "0"), 16) >> (wake_signal() - 1) & 1:
        return True
    try:
        call = (procfs.text(pid, f"task/{tid}/syscall") or "").split()
        return bool(call) and call[0] == _RT_SIGTIMEDWAIT.get(platform.machine())
    except PermissionError:
        return False


def _name_of(pid: int) -> str:
    for variable in (procfs.text(pid, "environ") or "").split("\0"):
        if variable.startswith("WOODFROG_NAME="):
            return variable.partition("=")[2][:63]  # wire.h: hello.name has room for 63
    return ""


def _tgkill(pid: int, tid: int, number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(ctypes.c_int(pid), ctypes.c_int(tid), ctypes.c_int(number)) == 0:
        return
    error = ctypes.get_errno()
    raise TargetLostError(
        f"The agent of process {pid} could not be woken: {os.strerror(error)}.",
        pid=pid,
        target_state=TargetState.GONE if error == 3 else TargetState.RUNNING,  # ESRCH
    )
