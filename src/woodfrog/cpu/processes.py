"""The processes of a dumped or restored tree, by their numbers: who has them now, and what a failed run left of them.

Signals only what is known to come from the tree; a number alone never says so. Must not wait for anything but the end
of what it has killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from woodfrog.cpu.images import Task
from woodfrog.errors import NotFoundError, RefusedError, TargetState


def needs_shell_job(pid: int) -> bool:
    """Whether the session of `pid` began in a process outside of the tree below it."""
    try:
        return os.getsid(pid) != pid
    except ProcessLookupError:
        raise NotFoundError(f"Process {pid} does not exist.", pid=pid, target_state=TargetState.GONE) from None


def refuse_taken_numbers(tasks: list[Task]) -> None:
    """RefusedError when a process or thread number of the tree belongs to somebody else now."""
    taken = []
    for number in sorted({number for task in tasks for number in (task.pid, *task.threads)}):
        if (holder := _holder(number)) is not None:
            taken.append((number, holder))
    if not taken:
        return
    number, holder = taken[0]
    more = f" ({len(taken) - 1} more numbers are taken too)" if len(taken) > 1 else ""
    raise RefusedError(
        f"The target needs number {number}, which belongs to {holder}{more}.",
        advice="End that process (it is often the original target, still alive) and restore again.",
        pid=tasks[0].pid,
        phase="cpu",
        target_state=TargetState.NONE,
        details={"numbers": [taken_number for taken_number, _ in taken]},
    )


def _holder(number: int) -> str | None:
    """Who has this process or thread number, in words; threads are found too although /proc does not list them."""
    try:
        status = Path(f"/proc/{number}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    name, leader = fields.get("Name", "?").strip(), fields.get("Tgid", "?").strip()
    if fields.get("State", "").strip().startswith("Z"):
        parent = fields.get("PPid", "?").strip()
        return f"'{name}', which has ended but was not waited for by its parent (process {parent})"
    return f"'{name}' (process {leader})" if leader == str(number) else f"a thread of process {leader} ('{name}')"


def resume(pid: int) -> None:
    """Let a tree go on that a dump has just left stopped; stopped processes keep their numbers."""
    try:
        threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()]
        for thread in threads:
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                resume(int(child))
        os.kill(pid, signal.SIGCONT)
    except (FileNotFoundError, ProcessLookupError):
        return


def now_ticks() -> int:
    """The present in the unit of /proc/<pid>/stat's start time: clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def kill_remains(tasks: list[Task], since_ticks: int) -> None:
    """End what a killed CRIU left of a half-restored tree, and reap it where it falls to this process.

    The numbers were free before it began. A process that has one now, began since, and is below this process or another
    of the tree came from CRIU; whoever else got the number meanwhile is not touched.
    """
    own = {os.getpid(), *(task.pid for task in tasks)}
    with contextlib.ExitStack() as opened:
        remains = []
        for task in tasks:  # parents come before their children
            try:
                pidfd = os.pidfd_open(task.pid)
                opened.callback(os.close, pidfd)
                fields = Path(f"/proc/{task.pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) in own and int(fields[19]) >= since_ticks:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    remains.append(pidfd)
            except (FileNotFoundError, ProcessLookupError):
                continue
        # Parents first: once its parent has ended a process is our child, and its number is taken until it is reaped.
        for pidfd in remains:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
