"""CRIU as woodfrog uses it: find the program, dump a process tree into a folder, restore it from one.

Both calls block, are bounded by their time-out, and either succeed or raise a WoodfrogError that says why. They know
nothing of GPUs. A dump never kills its target: it leaves it running, or stopped for the caller to kill once the image
is durable. A restore never changes the image; it refuses before CRIU is called when a process number is taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from woodfrog.cpu import files, images, lazy_dump, options, pages_by, pid_namespace, processes
from woodfrog.cpu.gate import VARIABLE, Gate, waited_s
from woodfrog.cpu.lazy_pages import OPTIONS as LAZY_OPTIONS
from woodfrog.cpu.lazy_pages import VARIABLE as LAZY_VARIABLE
from woodfrog.cpu.lazy_pages import LazyPages
from woodfrog.cpu.pid_namespace import NewNamespace
from woodfrog.cpu.processes import refuse_taken_numbers as refuse_taken_numbers  # part of this interface
from woodfrog.cpu.reason import Kind, Reason, reason
from woodfrog.cpu.rewrite import Changes
from woodfrog.cpu.run import Finished, run
from woodfrog.errors import (
    BadImageError,
    NoSpaceError,
    NotFoundError,
    RefusedError,
    TargetState,
    TimeoutExceededError,
    WoodfrogError,
)

# 4.0 and older fail on kernels from 6.13 on (the vDSO has another layout there).
MINIMUM_VERSION = (4, 1)
# From 6.16 on the kernel does not tell two options of network sockets, and CRIU insisted on them before 4.2.
SOCKETS_VERSION = (4, 2)
SOCKETS_KERNEL = (6, 16)
_CAP_CHECKPOINT_RESTORE = 40  # linux/capability.h
MEMORY_ADVICE = "Free memory, or raise the memory limit of the daemon's control group, and try again."
# criu/cr-restore.c: what it says of a process that was killed, depending on when that was.
_KILLED = re.compile(r"killed by signal 9\b|post-restore script ret code|Can't attach to \d+: No such process")


@dataclass(frozen=True)
class Dumped:
    """A finished dump. The caller owns the folder and everything in it."""

    directory: Path
    elapsed_s: float
    size_bytes: int
    tasks: list[images.Task]
    shell_job: bool  # must be given to the restore
    connections: bool = False  # so must this: TCP connections between processes of the tree were saved


@dataclass(frozen=True)
class Restored:
    """A finished restore. The root is a child of the nearest subreaper, which has to reap it."""

    pid: int
    tasks: list[images.Task]
    elapsed_s: float
    notes: list[str] = field(default_factory=list)
    init_pid: int = 0  # of a new PID namespace, its process 1, which is a child like the root otherwise
    waited_s: float = 0.0  # of `elapsed_s`, at the gate


class GateShutError(WoodfrogError):
    """A dump was not wanted any more before it had begun, or not in time."""


@dataclass(frozen=True)
class Criu:
    """A CRIU program that runs here. Get one by `find`."""

    path: Path
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        return ".".join(str(part) for part in self.version)

    def check(self) -> str | None:
        """What the kernel or this user's privileges lack for CRIU, as one sentence; None when nothing does."""
        with _scratch(None) as scratch:
            words: list[str | Path] = [self.path, "check", "--no-default-config", "--libdir", scratch]
            finished = run(words, timeout_s=30, work_directory=scratch)
        if finished.returncode == 0:
            return None
        lines = finished.output.splitlines() or ["no output"]
        first = next((line for line in lines if "Error" in line or "Warn" in line), lines[0])
        return "'criu check' failed: " + re.sub(r"^\s*(?:Error|Warn)\s*\([^)]*\):\s*", "", first).strip()

    def limitations(self) -> list[str]:
        """What this CRIU cannot do on this kernel although `check` is content, one sentence each."""
        kernel = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
        if self.version < SOCKETS_VERSION and kernel >= SOCKETS_KERNEL:
            return [f"CRIU {self.version_text} cannot save a target that has network sockets on this kernel."]
        return []

    def dump(
        self,
        pid: int,
        directory: Path,
        *,
        leave_running: bool,
        timeout_s: float = 600.0,
        shell_job: bool | None = None,
        connections: bool = False,
        log_directory: Path | None = None,
        ghost_limit_bytes: int = options.GHOST_LIMIT_BYTES,
        passed_over: Sequence[str] = (),
        inner_pid: int | None = None,
        pages_ahead: Path | None = None,
        gate: Gate | None = None,
        gate_s: float = 600.0,
    ) -> Dumped:
        """Save the process tree below `pid` (CPU side only) into `directory`, which is created 0700 and must be empty.

        With `leave_running` the tree runs on afterwards; without, it is left stopped, for the caller to kill
        once the image is durable or to continue. `shell_job` None decides by the tree's session. `connections`:
        all of the tree's TCP connections are between its own processes, and are saved. `passed_over`: names
        (options.file_name) of files whose contents are the caller's affair. `inner_pid`: the tree runs in a PID
        namespace (cpu.pid_namespace), where that is the number of its root. `pages_ahead`: what lazy_dump.reserve made
        for this tree, then without `inner_pid`; the tree stands still for a shorter time, and the files are the same.
        With `gate` CRIU is started, and does nothing to the tree before it is opened; `timeout_s` runs from then. When
        it is shut instead, by whom ever or because it was not opened within `gate_s`, CRIU ends at once, and
        GateShutError says so. CRIU's log becomes part of the image.
        On failure the tree runs on, the log is kept in `log_directory` if given (its end is in the error's details
        either way), and RefusedError, NoSpaceError, TimeoutExceededError or WoodfrogError says why.
        """
        directory = directory.absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise RefusedError(
                f"The folder for the CPU side, {directory}, is not empty.",
                advice="Use a new one.",
                pid=pid,
                phase="cpu",
            )
        if shell_job is None:
            shell_job = processes.needs_shell_job(pid)
        from woodfrog._native import paths

        # The log is written elsewhere than the images: on a full disk it could not say that the disk is full.
        with _scratch(log_directory) as work:
            arguments = options.dump(
                self.path,
                pid=pid if inner_pid is None else inner_pid,
                images=directory,
                work=work,
                plugins=_no_plugins(work),
                leave_running=leave_running,
                shell_job=shell_job,
                connections=connections,
                unprivileged=_unprivileged(),
                freeze_timeout_s=int(min(timeout_s, 3600)),
                ghost_limit_bytes=ghost_limit_bytes,
                passed_over=passed_over,
                script=paths.gate() if gate is not None else None,
            )
            if inner_pid is not None:
                arguments = pid_namespace.enter(pid, arguments)
            start = partial(
                run,
                timeout_s=timeout_s,
                work_directory=work,
                variables={VARIABLE: str(gate.fd)} if gate is not None else {},
                takes_back=True,
                gate=gate,
                gate_s=gate_s,
            )
            handed = [gate.fd] if gate is not None else []
            try:
                if pages_ahead is None:
                    finished = start(arguments, pass_fds=handed)
                else:
                    finished = lazy_dump.run(arguments, start, images=directory, ahead=pages_ahead, handed=handed)
                if gate is not None and gate.is_shut:
                    raise GateShutError(
                        f"The dump of the CPU side was given up before it began, at the latest after {gate_s:g} s.",
                        advice="Try again.",
                        phase="cpu",
                        pid=pid,
                        target_state=TargetState.RUNNING,
                    )
                log = work / options.DUMP_LOG
                if finished.returncode != 0:
                    kept = _keep_log(log, log_directory)
                    raise _failure("dump", finished, _log(log), kept, pid, timeout_s, TargetState.RUNNING)
                tasks = images.tasks(directory)
                for name in (options.DUMP_LOG, options.DUMP_STATISTICS):
                    shutil.copyfile(work / name, directory / name)
                _make_private(directory)
            except BaseException as error:
                if not leave_running and not isinstance(error, GateShutError):
                    processes.resume(pid)  # a CRIU that is killed in the last moment, too, leaves the target stopped
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _disk_full(pid) from error
                raise
        return Dumped(directory, finished.elapsed_s, _size_bytes(directory), tasks, shell_job, connections)

    def restore(
        self,
        directory: Path,
        *,
        log_directory: Path | None = None,
        timeout_s: float = 600.0,
        shell_job: bool = False,
        connections: bool = False,
        inherited: Mapping[str, int] | None = None,
        namespace: NewNamespace | None = None,
        changes: Changes | None = None,
        gate: Gate | None = None,
    ) -> Restored:
        """Bring the tree in `directory` back, with its old process numbers; returns when it runs. With `namespace`
        these are its numbers in a PID namespace that is made for it, and nobody else's here matter.

        `directory` is only read. CRIU's log goes to `log_directory` as restore.log, if given; its end is in the details
        of an error either way. `inherited`: descriptors (the caller's) for what the dump passed over, by its names.
        With `gate`, files of pages (images.is_pages) need only be there, and be whole once it is opened.
        Raises RefusedError before CRIU is called when a number or a file is not available.
        On failure nothing of the tree is left behind.
        """
        directory = directory.absolute()
        if not directory.is_dir():
            raise BadImageError(f"The image has no CPU side: {directory} does not exist.", advice="Use another image.")
        tasks = images.tasks(directory)
        if namespace is None:
            refuse_taken_numbers(tasks)
        from woodfrog._native import paths

        lazy = LazyPages.of(directory, tasks)
        with _scratch(log_directory) as work, files.kept_links(directory), lazy or contextlib.nullcontext():
            source, file_plan = files.prepare(directory, work, changes, namespace, lazy.replaced if lazy else None)
            script = paths.gate() if gate is not None or lazy is not None else None
            arguments = options.restore(
                self.path,
                images=source,
                work=work,
                plugins=_no_plugins(work),
                shell_job=shell_job,
                connections=connections,
                unprivileged=_unprivileged(),
                script=script,
                extra=[*options.inherited(inherited or {}), *(LAZY_OPTIONS if lazy is not None else ())],
            )
            if namespace is not None:
                numbers = {number for task in tasks for number in (task.pid, *task.threads)}
                arguments = namespace.around(arguments, root_pid=tasks[0].pid, taken=numbers)
            began_ticks = processes.now_ticks()
            handed = [*(inherited or {}).values(), *([gate.fd] if gate is not None else [])]
            variables = {VARIABLE: str(gate.fd)} if gate is not None else {}
            if lazy is not None:
                lazy.begin(work)
                handed += lazy.descriptors
                variables[LAZY_VARIABLE] = lazy.variable
            finished = run(
                arguments,
                timeout_s=timeout_s,
                work_directory=work,
                pass_fds=handed,
                variables=variables,
                at_timeout=lazy.give_up if lazy is not None else lambda: None,
                hung=lazy.hung if lazy is not None else None,
            )
            log = _log(work / options.RESTORE_LOG)
            if finished.returncode != 0:
                if namespace is None:  # what was in a namespace has ended with it
                    processes.kill_remains(tasks, began_ticks)
                kept = _keep_log(work / options.RESTORE_LOG, log_directory)
                if lazy is not None and lazy.failure is not None and finished.returncode is not None:
                    raise _unfilled(lazy.failure, kept, tasks[0].pid) from lazy.failure
                raise _failure("restore", finished, log, kept, tasks[0].pid, timeout_s, TargetState.NONE)
            pid = _restored_pid(work / options.RESTORE_PID, tasks[0].pid)
            init_pid = int(_log(work / pid_namespace.INIT_PID_FILE)) if namespace is not None else 0
            if log_directory is not None:
                _keep_log(work / options.RESTORE_LOG, log_directory)
        return Restored(pid, tasks, finished.elapsed_s, file_plan.notes, init_pid, waited_s(log))


def find() -> Criu:
    """The CRIU to use: $WOODFROG_CRIU, the private prefix, the PATH, in this order; too old ones are passed over.

    Raises NotFoundError naming what was looked at.
    """
    seen: list[str] = []
    for candidate in _candidates():
        version = version_of(candidate)
        if version is None:
            seen.append(f"{candidate} does not run")
        elif version < MINIMUM_VERSION:
            seen.append(f"{candidate} is {'.'.join(map(str, version))}")
        else:
            return Criu(candidate, version)
        if candidate == _from_environment():
            break  # an explicit choice that does not work is an error, not a reason to take another
    wanted = ".".join(map(str, MINIMUM_VERSION))
    raise NotFoundError(
        f"There is no CRIU >= {wanted} here" + (f" ({'; '.join(seen)})." if seen else "."),
        advice="scripts/get-criu.sh provides one under .prefix; or set WOODFROG_CRIU. suspend and resume work without.",
        target_state=TargetState.UNTOUCHED,
    )


def version_of(program: Path) -> tuple[int, ...] | None:
    """The version that a program calling itself CRIU reports; None when it does not run or says something else."""
    try:
        out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", out, re.MULTILINE)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _candidates() -> Iterator[Path]:
    if (explicit := _from_environment()) is not None:
        yield explicit
    for prefix in (
        Path(__file__).resolve().parents[3] / ".prefix" / "criu",  # a source tree
        Path(sys.prefix).parent / ".prefix" / "criu",  # a virtual environment in a source tree
        Path(sys.prefix) / "criu",  # put beside an installed package
    ):
        if (program := prefix / "bin" / "criu").exists():
            yield program
    if on_path := shutil.which("criu", path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"):
        yield Path(on_path)


def _from_environment() -> Path | None:
    value = os.environ.get("WOODFROG_CRIU")
    return Path(value).absolute() if value else None


@contextlib.contextmanager
def _scratch(beside: Path | None) -> Iterator[Path]:
    """A folder of our own (0700), removed afterwards; below `beside` when given, so that it can hold what is kept."""
    if beside is not None:
        beside.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="criu-", dir=beside))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _no_plugins(work: Path) -> Path:
    """An empty folder for --libdir; CRIU would otherwise look where its package puts plugins."""
    empty = work / "plugins"
    empty.mkdir(mode=0o700, exist_ok=True)
    return empty


def _log(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _keep_log(log: Path, directory: Path | None) -> Path | None:
    """Copy CRIU's log to where it outlives the scratch folder; None when it is not kept."""
    if directory is None or not log.exists():
        return None
    kept = directory / log.name
    shutil.copyfile(log, kept)
    kept.chmod(0o600)
    return kept


def _failure(
    what: str, finished: Finished, log: str, kept: Path | None, pid: int, timeout_s: float, state: str
) -> WoodfrogError:
    details = {"log": str(kept) if kept else "", "log_tail": log[-4000:], "returncode": finished.returncode}
    if finished.returncode is None or finished.stopped:
        advice = "Try again with a larger --timeout; a large resident memory takes about half a second per GB."
        if finished.returncode is None and state == TargetState.RUNNING:
            advice = f"CRIU did not take its dump back and was killed: see whether the target still works. {advice}"
        return TimeoutExceededError(
            f"The CPU side's {what} did not end within {timeout_s:g} s and was stopped.",
            advice=advice,
            phase="cpu",
            pid=pid,
            target_state=state,
            details=details,
        )
    if finished.lacked_memory and (finished.returncode == -signal.SIGKILL or _KILLED.search(log)):
        # A limit of a control group is one of the host's memory too, to who is in it.
        return NoSpaceError(
            f"The kernel ended a process for lack of memory during the CPU side's {what}.",
            advice=f"{MEMORY_ADVICE} CRIU's log: {kept}" if kept else MEMORY_ADVICE,
            phase="cpu",
            pid=pid,
            target_state=state,
            details=details,
        )
    known = reason(log) if log.strip() else Reason(f"CRIU failed: {finished.output.strip()[-500:] or 'no output'}", "")
    kinds: dict[Kind, type[WoodfrogError]] = {
        Kind.FAILED: WoodfrogError,
        Kind.REFUSED: RefusedError,
        Kind.NO_SPACE: NoSpaceError,
        Kind.TIMEOUT: TimeoutExceededError,
        Kind.BAD_IMAGE: BadImageError,
    }
    advice = f"{known.advice} CRIU's log: {kept}" if kept else known.advice
    return kinds[known.kind](known.sentence, advice=advice, phase="cpu", pid=pid, target_state=state, details=details)


def _unfilled(failure: BaseException, kept: Path | None, pid: int) -> WoodfrogError:
    from woodfrog._native import transfer

    where = f" CRIU's log: {kept}" if kept else ""
    if isinstance(failure, transfer.TransferError) and failure.code == -errno.ENOMEM:
        return NoSpaceError(
            "The host's memory ran out while the memory of the restored processes was filled.",
            advice=f"{MEMORY_ADVICE}{where}",
            phase="cpu",
            pid=pid,
            target_state=TargetState.NONE,
        )
    return WoodfrogError(
        f"The memory of the restored processes could not be filled: {failure}.",
        advice=f"{pages_by.VARIABLE}=criu in the daemon's environment leaves that to CRIU.{where}",
        phase="cpu",
        pid=pid,
        target_state=TargetState.NONE,
    )


def _restored_pid(path: Path, expected: int) -> int:
    text = _log(path).strip()
    if text != str(expected):
        raise WoodfrogError(
            f"CRIU reports process {text or 'none'} where {expected} was dumped.",
            phase="cpu",
            target_state=TargetState.NONE,
        )
    return expected


def _disk_full(pid: int) -> NoSpaceError:
    return NoSpaceError(
        "The disk filled up while the CPU side was being saved.",
        advice="Free space, or choose another store with --store.",
        phase="cpu",
        pid=pid,
        target_state=TargetState.RUNNING,
    )


def _make_private(directory: Path) -> None:
    """CRIU creates its images 0644 less the umask; they hold the target's memory, so only the owner may read them."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            Path(entry.path).chmod(0o600)


def _size_bytes(directory: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))


def _unprivileged() -> bool:
    if os.geteuid() == 0:
        return False
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    if not effective & 1 << _CAP_CHECKPOINT_RESTORE:
        raise RefusedError(
            "Saving or restoring the CPU side needs root or CAP_CHECKPOINT_RESTORE, and this daemon has neither.",
            advice="Run the daemon as root; suspend and resume work without.",
            phase="cpu",
        )
    return True
