"""What stands in the way of an operation on a target: each obstacle with its reason and the way out.

Looks only; refuses nothing itself. Obstacles say for which part they count: some are in the way of any operation, some
only of an image (the CPU side must be dumped), some only of the driver's own checkpoint. Must be complete enough that
whatever passes here does not fail later for a reason that could have been seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from woodfrog.errors import RefusedError
from woodfrog.target import procfs
from woodfrog.target.memory import Survey
from woodfrog.target.pid_namespace import init_of
from woodfrog.target.pipes import outside_pipes
from woodfrog.target.process import FileKind, ProcessInfo, ProcessTree


class Scope(Enum):
    """Which operations an obstacle is in the way of."""

    ALL = "all"
    IMAGE = "image"  # those that dump the CPU side: checkpoint; not suspend and resume
    NOTE = "note"  # none: something that the user should know


@dataclass(frozen=True)
class Obstacle:
    """`code` is stable and for programs; `reason` and `advice` are for people."""

    code: str
    scope: Scope
    pid: int
    reason: str
    advice: str


# What the interposer reports (native/wire/wire.h WF_OBSTACLES).
_REPORTED = {
    "managed_memory": (
        Scope.ALL,
        "The target uses managed (unified) memory, which the driver cannot checkpoint.",
        "Use cudaMalloc instead of cudaMallocManaged (PyTorch: do not enable UVM).",
    ),
    "imported_memory": (
        Scope.ALL,
        "The target shares GPU memory in a way that woodfrog does not follow (a fabric handle, or a memory pool's).",
        "Share it by file descriptor (cuMemExportToShareableHandle) or by a legacy IPC handle, or release it first.",
    ),
    "legacy_ipc": (
        Scope.ALL,
        "The target shares memory that the driver allocated by CUDA IPC, which this driver cannot checkpoint.",
        "Start it without WOODFROG_DRIVER_ALLOC, and all processes that share with it by `woodfrog run`.",
    ),
    "multicast": (
        Scope.ALL,
        "The target has multicast objects (NVLS), with which the driver's checkpoint hangs.",
        "Start the target with NCCL_NVLS_ENABLE=0.",
    ),
    "capture_active": (
        Scope.NOTE,
        "The target is capturing a CUDA graph; the operation waits until the capture has ended.",
        "Nothing to do.",
    ),
    "ending": (
        Scope.ALL,
        "The target is ending: it runs its exit handlers and is giving the GPU up.",
        "It is too late for this one; take the image before the program returns from main.",
    ),
    "mig_or_mps": (
        Scope.ALL,
        "The target runs on a MIG instance or under MPS, which the driver cannot checkpoint.",
        "Run it on a whole GPU, without MPS.",
    ),
}


def survey(
    tree: ProcessTree,
    *,
    agent_survey: Survey | None = None,
    agent_surveys: Mapping[int, Survey] | None = None,
    is_cuda_process: Callable[[int], bool] | None = None,
    mig_enabled: bool | None = None,
) -> list[Obstacle]:
    """Everything in the way, worst first.

    `agent_survey` is the interposer's answer where there is one, `agent_surveys` those of several by process;
    `is_cuda_process` asks the driver about a pid (left out: having the driver library mapped counts); `mig_enabled` is
    whether a GPU of the target is split.
    """
    found = list(_of_processes(tree.processes))
    found += _of_gpu_processes(tree, is_cuda_process)
    found += _of_surroundings(tree)
    answers = dict(agent_surveys or {})
    if agent_survey is not None:
        answers[tree.pid] = agent_survey
    for pid, answer in answers.items():
        for name in answer.obstacles:
            scope, reason, advice = _REPORTED.get(name, (Scope.ALL, f"The interposer reports an obstacle: {name}.", ""))
            found.append(Obstacle(name, scope, pid, reason, advice))
    if mig_enabled and not any(obstacle.code == "mig_or_mps" for obstacle in found):
        scope, reason, advice = _REPORTED["mig_or_mps"]
        found.append(Obstacle("mig_or_mps", scope, tree.pid, reason, advice))
    order = list(Scope)
    return sorted(found, key=lambda obstacle: order.index(obstacle.scope))


def gpu_processes(tree: ProcessTree, is_cuda_process: Callable[[int], bool] | None = None) -> list[ProcessInfo]:
    """The processes of the tree that use a GPU: those with an agent, and those that the driver knows.

    The agent starts with the first successful cuInit. So a process that has the interposer but no agent does not use
    CUDA (a forked helper), and the driver is not asked: how it answers about such a child is documented nowhere.
    """
    return [
        process
        for process in tree.with_driver()
        if process.agent_tid is not None
        or (not process.interposed and (is_cuda_process(process.pid) if is_cuda_process else True))
    ]


def refuse(obstacles: Iterable[Obstacle], *, image: bool) -> None:
    """RefusedError naming all obstacles that count for the operation; `image`: it dumps the CPU side."""
    scopes = {Scope.ALL, Scope.IMAGE} if image else {Scope.ALL}
    standing = [obstacle for obstacle in obstacles if obstacle.scope in scopes]
    if not standing:
        return
    first = standing[0]
    raise RefusedError(
        " ".join(dict.fromkeys(obstacle.reason for obstacle in standing)),
        advice=" ".join(dict.fromkeys(obstacle.advice for obstacle in standing if obstacle.advice)),
        phase="survey",
        pid=first.pid,
        details={"obstacles": [{"code": one.code, "pid": one.pid, "reason": one.reason} for one in standing]},
    )


def _of_processes(processes: Iterable[ProcessInfo]) -> Iterator[Obstacle]:
    own_namespaces = procfs.namespaces(os.getpid())
    for process in processes:
        yield from _of_process(process)
        yield from _of_namespaces(process, own_namespaces)
        yield from _of_files(process)


def _of_process(process: ProcessInfo) -> Iterator[Obstacle]:
    pid = process.pid
    if process.is_kernel_thread:
        yield Obstacle("kernel_thread", Scope.ALL, pid, f"{pid} is a kernel thread.", "Give a process.")
        return
    if process.is_zombie:
        yield Obstacle(
            "zombie",
            Scope.ALL,
            pid,
            f"Process {pid} has ended and waits for its parent (process {process.parent_pid}) to notice.",
            "If it is a child of the target, the target has to wait for it; if it is the target, it is too late.",
        )
        return
    if process.state == "T":
        yield Obstacle(
            "stopped",
            Scope.ALL,
            pid,
            f"Process {pid} is stopped (SIGSTOP), so it cannot come to rest in an orderly way.",
            f"Continue it: kill -CONT {pid}.",
        )
    if process.tracer_pid:
        yield Obstacle(
            "traced",
            Scope.ALL,
            pid,
            f"Process {pid} is being traced by process {process.tracer_pid} (a debugger or strace).",
            "Detach the tracer.",
        )
    if process.uid != os.geteuid() and os.geteuid() != 0:
        yield Obstacle(
            "other_user",
            Scope.ALL,
            pid,
            f"Process {pid} belongs to user {process.uid}.",
            "Run woodfrog as that user, or as root.",
        )


def _of_namespaces(process: ProcessInfo, own: dict[str, str]) -> Iterator[Obstacle]:
    # CRIU would have to dump and rebuild these namespaces, which woodfrog does not ask it to.
    other = [kind for kind in ("pid", "mnt", "net", "ipc", "uts", "user") if kind in process.namespaces]
    differing = [kind for kind in other if own.get(kind) != process.namespaces[kind]]
    if set(differing) <= {"pid", "mnt"} and init_of(process.pid) is not None:
        return  # restored by woodfrog with --new-pid-namespace: CRIU runs in there as well
    if differing:
        yield Obstacle(
            "namespaces",
            Scope.ALL if "pid" in differing else Scope.IMAGE,
            process.pid,
            f"Process {process.pid} runs in a container (other {', '.join(differing)} namespaces than the daemon).",
            "Run woodfrog inside the same container.",
        )


def _of_files(process: ProcessInfo) -> Iterator[Obstacle]:
    if terminals := process.of_kind(FileKind.TERMINAL):
        yield Obstacle(
            "terminal",
            Scope.IMAGE,
            process.pid,
            f"Process {process.pid} has a terminal open ({terminals[0].path}).",
            "Start it with `woodfrog run`, or with input and output redirected; suspend works as it is.",
        )
    if process.of_kind(FileKind.IO_URING):
        yield Obstacle(
            "io_uring",
            Scope.IMAGE,
            process.pid,
            f"Process {process.pid} uses io_uring, which CRIU cannot save.",
            "Start it with `woodfrog run --no-io-uring` (most programs do without then, torchrun too; the default "
            "with CAP_SYS_ADMIN); suspend works as it is.",
        )


def _of_gpu_processes(tree: ProcessTree, is_cuda_process: Callable[[int], bool] | None) -> Iterator[Obstacle]:
    users = gpu_processes(tree, is_cuda_process)
    if not users:
        yield Obstacle(
            "no_gpu_process",
            Scope.ALL,
            tree.pid,
            f"Neither process {tree.pid} nor a child of it uses CUDA.",
            "Give the process that does (`woodfrog ps`), or wait until it has started to.",
        )
    elif any(process.agent_tid is not None for process in users):
        for process in users:
            if process.agent_tid is None:
                yield Obstacle(
                    "without_interposer",
                    Scope.ALL,
                    process.pid,
                    f"Process {process.pid} uses CUDA without woodfrog's interposer, other processes of the target "
                    "with it.",
                    "Let it inherit LD_PRELOAD, WOODFROG_NAME and WOODFROG_RUNTIME_DIR from `woodfrog run`.",
                )
    using = {process.pid for process in users}
    for process in tree.processes:
        if process.pid not in using and process.of_kind(FileKind.NVIDIA):
            yield Obstacle(
                "inherited_gpu_files",
                Scope.IMAGE,
                process.pid,
                f"Process {process.pid} uses no CUDA but holds the GPU's files of its parent, which CRIU cannot save.",
                "Start such helpers before CUDA is used, or by spawn instead of fork (PyTorch DataLoader: "
                "multiprocessing_context='spawn').",
            )


def _of_surroundings(tree: ProcessTree) -> Iterator[Obstacle]:
    inside = {process.pid for process in tree.processes}
    if tree.root.terminal and tree.root.session_id not in inside:
        yield Obstacle(
            "foreign_session",
            Scope.IMAGE,
            tree.pid,
            f"Process {tree.pid} belongs to the terminal session of process {tree.root.session_id}.",
            "Start it with `woodfrog run`, or under setsid with input and output redirected; suspend works as it is.",
        )
    for pipe in outside_pipes(tree.processes):
        if pipe.writes:
            yield Obstacle(
                "outside_pipe",
                Scope.IMAGE,
                pipe.pid,
                f"Process {pipe.pid} writes into a pipe (descriptor {pipe.descriptor}) that process {pipe.other_pid}, "
                "which is not part of the target, reads.",
                "Start the target with `woodfrog run`, or redirect its output to a file; suspend works as it is.",
            )
        else:
            yield Obstacle(
                "outside_input",
                Scope.NOTE,
                pipe.pid,
                f"Process {pipe.pid} reads from a pipe (descriptor {pipe.descriptor}) that process {pipe.other_pid} "
                "writes; after a restore it sees the end of its input.",
                "Redirect its input from /dev/null if that matters.",
            )
