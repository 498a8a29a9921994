"""A process tree as it is now: each process with what matters for checkpointing it.

A snapshot: reading it changes nothing, and a tree that changes meanwhile is read again until it held still. Killing and
continuing go through handles taken with the snapshot, so they reach exactly these processes. Must not judge; see
preconditions.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath

from woodfrog.errors import NotFoundError, RefusedError, TargetState, WoodfrogError
from woodfrog.target import procfs
from woodfrog.target.identity import Identity, ProcessHandle

AGENT_THREAD_NAME = "woodfrog-agent"  # native/wire/wire.h WF_AGENT_THREAD_NAME
_INTERPOSER = "libwoodfrog_interpose.so"
_SNAPSHOT_TRIES = 5


class FileKind(Enum):
    """Kinds of open files that matter to a checkpoint; everything else is `other`."""

    NVIDIA = "nvidia"  # /dev/nvidia*
    SOCKET = "socket"
    PIPE = "pipe"
    TERMINAL = "terminal"
    IO_URING = "io_uring"
    DELETED = "deleted"
    ANONYMOUS = "anonymous"  # other anon_inode files: eventfd, epoll, …
    OTHER = "other"


@dataclass(frozen=True)
class OpenDescriptor:
    number: int
    kind: FileKind
    path: str  # as readlink shows it, e.g. "socket:[123]"


@dataclass(frozen=True)
class ProcessInfo:
    """One process. Sizes in bytes; `start_ticks` in clock ticks after boot."""

    pid: int
    start_ticks: int
    parent_pid: int
    session_id: int
    terminal: int
    state: str
    name: str
    command_line: tuple[str, ...]
    uid: int
    threads: tuple[int, ...]
    agent_tid: int | None  # the interposer's agent thread, when there is one
    tracer_pid: int  # 0: none
    namespaces: dict[str, str]
    descriptors: tuple[OpenDescriptor, ...]
    libcuda: str | None  # path of the driver library that is mapped
    interposed: bool
    resident_bytes: int
    is_kernel_thread: bool

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start_ticks)

    @property
    def is_zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def is_simulated(self) -> bool:
        """Whether the driver library that it uses is the simulated GPU."""
        return self.libcuda is not None and PurePosixPath(self.libcuda).parent.name == "simgpu"

    def of_kind(self, kind: FileKind) -> list[OpenDescriptor]:
        return [descriptor for descriptor in self.descriptors if descriptor.kind is kind]


@dataclass
class ProcessTree:
    """`pid` and all its descendants, root first. Owns a handle of each process; close it, or use it in a `with`."""

    pid: int
    processes: list[ProcessInfo] = field(init=False)
    handles: dict[int, ProcessHandle] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """NotFoundError when there is no such process, RefusedError for a thread's number or another user's process."""
        try:
            self.processes = self._read_until_still()
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> ProcessInfo:
        return self.processes[0]

    @property
    def resident_bytes(self) -> int:
        return sum(process.resident_bytes for process in self.processes)

    def with_agent(self) -> list[ProcessInfo]:
        """Processes that the interposer speaks for."""
        return [process for process in self.processes if process.agent_tid is not None]

    def with_driver(self) -> list[ProcessInfo]:
        """Processes that have the driver library mapped. Forked children do too, whether they can use it or not."""
        return [process for process in self.processes if process.libcuda is not None]

    def require_unchanged(self) -> None:
        """TargetLostError when a process of the tree has ended; RefusedError when a new one has appeared."""
        for handle in self.handles.values():
            handle.require_alive()
        new = set(_descendants(self.pid)) - self.handles.keys() - {self.pid}
        if new:
            raise RefusedError(
                f"The target started another process ({min(new)}) during the operation.",
                advice="Try again when it is not starting processes.",
                pid=self.pid,
                target_state=TargetState.RUNNING,
            )

    def stop(self) -> None:
        """SIGSTOP to every process; `resume` undoes it."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to every process that was stopped (a dump with leave_running=False leaves them so)."""
        self._signal_all(signal.SIGCONT)

    def kill(self, timeout_s: float = 30.0) -> None:
        """End every process, and wait until all have; WoodfrogError names one that hangs in the kernel.

        Children first would let a parent react to their death, so all are stopped before any is killed.
        """
        self._signal_all(signal.SIGSTOP)
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + timeout_s
        for handle in self.handles.values():
            if not handle.wait(max(0.0, deadline - time.monotonic())):
                raise WoodfrogError(
                    f"Process {handle.pid} did not end within {timeout_s:g} s after SIGKILL; it hangs in the kernel.",
                    advice="Look at /proc/<pid>/stack and the kernel's log; the image is complete.",
                    pid=handle.pid,
                    target_state=TargetState.FROZEN,
                )

    def close(self) -> None:
        for handle in self.handles.values():
            handle.close()
        self.handles.clear()

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal_all(self, number: int) -> None:
        for handle in self.handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle.pidfd, number)

    def _read_until_still(self) -> list[ProcessInfo]:
        _refuse_thread(self.pid)
        for _ in range(_SNAPSHOT_TRIES):
            wanted = [self.pid, *_descendants(self.pid)]
            for pid in wanted:
                if pid not in self.handles:
                    with contextlib.suppress(NotFoundError):
                        self.handles[pid] = ProcessHandle(pid)
            for pid in self.handles.keys() - set(wanted):
                self.handles.pop(pid).close()
            if self.pid not in self.handles:
                raise NotFoundError(f"Process {self.pid} does not exist.", pid=self.pid, target_state=TargetState.GONE)
            found = [info for pid in wanted if (info := read(pid)) is not None]
            same = [self.pid, *_descendants(self.pid)] == wanted == [info.pid for info in found]
            if same and all(self.handles[info.pid].identity == info.identity for info in found):
                return found
        raise RefusedError(
            f"The process tree of {self.pid} changes faster than it can be read.",
            advice="Try again when it is not starting and ending processes.",
            pid=self.pid,
        )


def read(pid: int) -> ProcessInfo | None:
    """One process; None when it is gone. RefusedError when this user may not look into it."""
    try:
        stat, status = procfs.stat(pid), procfs.status(pid)
        if stat is None or status is None:
            return None
        threads = procfs.threads(pid)
        agent = next((tid for tid in threads if procfs.thread_name(pid, tid) == AGENT_THREAD_NAME), None)
        mapped = [mapping.path for mapping in procfs.mapped_files(pid)]
        return ProcessInfo(
            pid=pid,
            start_ticks=stat.start_ticks,
            parent_pid=stat.parent_pid,
            session_id=stat.session_id,
            terminal=stat.terminal,
            state=stat.state,
            name=stat.name,
            command_line=procfs.command_line(pid),
            uid=int(status["Uid"].split()[0]),
            threads=threads,
            agent_tid=agent,
            tracer_pid=int(status.get("TracerPid", "0")),
            namespaces=procfs.namespaces(pid),
            descriptors=tuple(
                OpenDescriptor(number, classify(path), path) for number, path in sorted(procfs.descriptors(pid).items())
            ),
            libcuda=next((path for path in mapped if PurePosixPath(path).name.startswith("libcuda.so")), None),
            interposed=any(PurePosixPath(path).name == _INTERPOSER for path in mapped),
            resident_bytes=procfs.resident_bytes(pid),
            is_kernel_thread=stat.kernel_thread,
        )
    except PermissionError:
        raise RefusedError(
            f"Process {pid} belongs to another user, or may not be looked into by this one.",
            advice="Run woodfrog as the target's user, or as root.",
            pid=pid,
        ) from None


def classify(path: str) -> FileKind:
    """What kind of open file a link of /proc/<pid>/fd shows."""
    if path.startswith("/dev/nvidia"):
        return FileKind.NVIDIA
    if path.startswith("socket:"):
        return FileKind.SOCKET
    if path.startswith("pipe:"):
        return FileKind.PIPE
    if path.startswith(("/dev/pts/", "/dev/tty", "/dev/console")) or path == "/dev/ptmx":
        return FileKind.TERMINAL
    if path.startswith("anon_inode:"):
        return FileKind.IO_URING if "io_uring" in path else FileKind.ANONYMOUS
    if path.endswith(" (deleted)") and not path.startswith("/memfd:"):
        return FileKind.DELETED
    return FileKind.OTHER


def _descendants(pid: int) -> list[int]:
    """Pids below `pid`, parents before children, siblings by number."""
    found: list[int] = []
    for child in procfs.children(pid):
        found.append(child)
        found.extend(_descendants(child))
    return found


def _refuse_thread(pid: int) -> None:
    """The driver takes a thread's number for its process without a word; here it is an error."""
    status = procfs.status(pid) if pid > 0 else None
    if status is None:
        raise NotFoundError(
            f"Process {pid} does not exist.",
            advice="`woodfrog ps` lists the targets.",
            pid=pid,
            target_state=TargetState.GONE,
        )
    if (leader := int(status["Tgid"])) != pid:
        raise RefusedError(
            f"{pid} is the number of a thread of process {leader} ('{status['Name']}').",
            advice=f"Give the process: {leader}.",
            pid=pid,
        )
    if pid == os.getpid():
        raise RefusedError("A process cannot checkpoint itself from here.", pid=pid)
