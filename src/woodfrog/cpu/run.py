"""Runs CRIU as a child, in a session of its own, with a time-out that ends the whole group.

Must never leave a child behind, and never wait without a bound. A dump is not killed: its target has CRIU's code where
its own was at times, and of 305 killed at random 6 cost it a process. Its writes are refused, so that it fails and
takes everything back itself. For the same reason CRIU is not told to die with its parent: it ends a moment after the
daemon did, and the new daemon finds it by the folder in its arguments (`still_running`).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from woodfrog.cpu.gate import Gate

# CRIU needs little time to die once it is killed; this bounds the wait for one stuck in the kernel (a hung filesystem).
_KILL_WAIT_S = 10.0
# For a dump to notice that it may not write, and to let its target go: more than what it writes at once takes.
TAKE_BACK_S = 60.0
# To end at a gate that was shut, of one that waits there or has not come so far: it has nothing to take back.
SHUT_S = 10.0


@dataclass(frozen=True)
class Finished:
    """How a run ended. `returncode` is that of subprocess; None: the time-out came first and the group was killed."""

    returncode: int | None
    elapsed_s: float
    output: str  # what CRIU said outside its log: little, mostly errors in its arguments
    stopped: bool = False  # it failed by itself after the time-out, since it might not write any more
    lacked_memory: bool = False  # meanwhile the kernel ended some process of this machine for want of memory


def run(
    arguments: Sequence[str | Path],
    *,
    timeout_s: float,
    work_directory: Path,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    takes_back: bool = False,
    at_timeout: Callable[[], None] = lambda: None,
    gate: Gate | None = None,
    gate_s: float = 0.0,
    hung: int | None = None,
) -> Finished:
    """Run the program in `work_directory`; what it prints goes to a file there, and comes back cut to 4 KiB.
    `variables`: of its environment, beside the few that it gets of ours. `takes_back`: at the time-out it is made to
    fail at its next write and given TAKE_BACK_S, before it is killed; should it have ended well, it has. `at_timeout`:
    called before either. `gate`: the time runs from when it is opened. When that is not within `gate_s` it is shut;
    when it is shut, by whom ever, the program has done nothing, gets SHUT_S to end, and is killed. `hung`: a
    descriptor; when that can be read the program is killed."""
    begin, ended_before = time.monotonic(), _ended_for_memory()
    output_path = work_directory / "criu.out"
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "TMPDIR", "LANG")}
    environment |= variables or {}
    with open(output_path, "wb", opener=_private) as output:
        child = subprocess.Popen(
            [os.fspath(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work_directory,
            env=environment,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            restore_signals=not takes_back,  # Python ignores SIGXFSZ, and so does the child then
        )
    returncode: int | None = None
    stopped = False
    try:
        with _pidfd(child) as ended:
            let_on = gate is None or _is_opened(gate, gate_s, ended)
            ready = _wait(timeout_s if let_on else SHUT_S, ended, hung)
            if ready is None and let_on:
                at_timeout()
                if takes_back:
                    _refuse_writes(child.pid)
                    ready = _wait(TAKE_BACK_S, ended)
                    stopped = ready == ended
            if ready == ended:
                returncode = child.wait()
                stopped = stopped and returncode != 0
            elif ready is not None or not let_on:
                returncode = -signal.SIGKILL  # what it is ended with now
    finally:
        if child.returncode is None:
            _kill_group(child)
    text = output_path.read_bytes()[-4096:].decode(errors="replace")
    output_path.unlink(missing_ok=True)
    return Finished(returncode, time.monotonic() - begin, text, stopped, _ended_for_memory() > ended_before)


def still_running(work_directory: Path) -> int | None:
    """Pid of a CRIU that a daemon, since dead, started for this folder and that has not ended; else None."""
    folder = os.fsencode(work_directory)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if process.stat().st_uid != os.geteuid():
                continue
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked
        # The program itself is among the first arguments: behind a loader or an interpreter it is not the very first.
        if folder in arguments and any(b"criu" in argument.rpartition(b"/")[2] for argument in arguments[:4]):
            return int(process.name)
    return None


@contextlib.contextmanager
def _pidfd(child: subprocess.Popen[bytes]) -> Iterator[int]:
    """Can be read once it has ended. Popen.wait with a time-out looks only every 50 ms."""
    fd = os.pidfd_open(child.pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_opened(gate: Gate, gate_s: float, ended: int) -> bool:
    """Waits for that. False: it was, or is now, shut. True, too, when what would wait there has ended."""
    if _wait(gate_s, ended, gate.decided) is None:
        gate.shut()
    return not gate.is_shut


def _wait(timeout_s: float, *descriptors: int | None) -> int | None:
    """The first of them that can be read; None: none in time."""
    poll = select.poll()
    for one in descriptors:
        if one is not None:
            poll.register(one, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
    return next((one for one in descriptors if one in ready), None)


def _ended_for_memory() -> int:
    """Processes of this machine that the kernel has ended for want of memory, its own or a control group's."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)  # Linux 4.13
    return int(found[1]) if found else 0


def _refuse_writes(pid: int) -> None:
    """To files, of the process and all below it (a PID namespace's first process stands above CRIU): EFBIG."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, 0))


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    below = _children(child.pid)
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # One that hangs in the kernel (a dead filesystem) ends when that lets it; the daemon's reaper takes it then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_KILL_WAIT_S)
        # Process 1 of a PID namespace: ours to reap now, where we are a subreaper, and with it all that it ran.
        for pidfd in below:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(_KILL_WAIT_S * 1000):
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        for pidfd in below:
            os.close(pidfd)


def _children(pid: int) -> list[int]:
    """A pidfd of each child in the group that `pid` leads; the caller closes them."""
    found = []
    try:
        numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(number)) == pid:
                found.append(os.pidfd_open(int(number)))
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
