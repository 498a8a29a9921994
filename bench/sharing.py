"""Shared GPU memory through every operation, on a real driver: do all who shared it see one memory afterwards?

The target is the tests' own (tests/sim/targets/sharer.cpp, the driver API alone): one process that exports memory and
imports it again, or several that import each other's. Each kind of memory goes through each operation in a target of
its own; before and after, each process writes and all others must see it.

* device        cuMemCreate on the GPU, by descriptor
* host          cuMemCreate in host memory (HOST_NUMA), by descriptor
* legacy        cuIpcGetMemHandle of a small and a large cuMemAlloc
* registered    cuMemHostRegister of a shared mapping

Then the same with PyTorch (targets/share_tensors.py: torch.multiprocessing, CUDA tensors both ways), each step's value
compared with those of an undisturbed run.

summary: right, attempted, refused, torch_compared (steps). `--quick` has a minute: two processes each, one for what is
registered.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import target_process

SOURCE = harness.REPOSITORY / "tests" / "sim" / "targets" / "sharer.cpp"
OPERATIONS = ("leave_running", "suspend_resume", "stop_restore")
ANSWER_S = 120.0
GOALS = {"right": "= attempted"}


class Wrong(Exception):
    """A process does not see what it should."""


def build(work: Path) -> Path:
    """The target, linked with the driver that this process gets."""
    ctypes.CDLL("libcuda.so.1")
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libcuda.so" in line)
    includes = [Path(found) for found in ("/usr/local/cuda/include", os.environ.get("CUDA_HOME", "") + "/include")]
    try:
        import nvidia

        includes += [Path(place) / "cu13" / "include" for place in nvidia.__path__]
    except ImportError:
        pass  # the toolkit's own, then
    include = next(place for place in includes if (place / "cuda.h").exists())
    program = work / "sharer"
    command = ["g++", "-std=c++20", "-O1", f"-I{include}", str(SOURCE), "-o", str(program), library, "-pthread"]
    subprocess.run(command, check=True)
    return program


class Tree:
    """One running target that takes orders."""

    def __init__(self, handle: Any, output: Path, orders: Path) -> None:
        self.handle = handle
        self.root = int(handle.pid)
        self._output, self._orders = output, orders
        self._count = 0
        self._wait("0 ready")

    def order(self, *words: object) -> str:
        """One order and its answer; Wrong when that is an error."""
        self._count += 1
        with self._orders.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        os.kill(self.root, signal.SIGUSR1)
        answer = self._wait(f"{self._count} ").split(" ", 1)[1]
        if answer.startswith("error"):
            raise Wrong(f"{words}: {answer}")
        return answer

    def see(self, name: str, worker: int, value: int) -> None:
        """`worker` must read `value` everywhere in that memory."""
        if (found := self.order(worker, "check", name, value)) != "ok":
            raise Wrong(f"process {worker} reads {found} in {name}")

    def adopt(self, handle: Any) -> None:
        """Follow the restored target."""
        self.handle = handle
        self.root = int(handle.details.root_pid)

    def _wait(self, prefix: str) -> str:
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            for line in self._output.read_text(errors="replace").splitlines(keepends=True):
                if line.startswith(prefix) and line.endswith("\n"):
                    return line.rstrip("\n")
            time.sleep(target_process.POLL_S)
        raise Wrong(f"no answer {prefix!r}; the output ends: {self._output.read_text()[-800:]}")


@contextmanager
def running(program: Path, work: Path, label: str, workers: int) -> Iterator[Tree]:
    """A target under woodfrog, ended at the end of the block."""
    import woodfrog

    output, orders = work / f"{label}.log", work / f"{label}.orders"
    output.unlink(missing_ok=True)
    orders.write_text("")
    log = work / f"{label}.jsonl"
    log.touch()
    argv = [str(program), str(orders), str(workers)]
    start = target_process.Start(argv, dict(os.environ), target_process.Log(log), output)
    handle = woodfrog.run(start.argv, name=f"{label}-{os.getpid()}", env=start.environment, log=output)
    run = target_process.TargetRun(label, handle.pid, start, None, handle)
    tree: Tree | None = None
    try:
        tree = Tree(handle, output, orders)
        yield tree
    finally:
        if tree is not None and tree.root != handle.pid:
            run.adopt(tree.handle)
            with contextlib.suppress(ProcessLookupError):
                os.kill(tree.root, signal.SIGKILL)
        run.end()


def prepare(tree: Tree, kind: str, workers: int) -> list[tuple[str, int]]:
    """Memory of that kind, shared by all; (name, worker) for each who has it."""
    if kind == "registered":
        tree.order(0, "register", "m", 4)
        return [("m", 0)]
    if kind == "legacy":
        tree.order(0, "alloc", "small", 64)
        tree.order(0, "alloc", "m", 6 << 10)
        for other in range(1, workers):
            tree.order(0, "ipc_send", "m", other)
            tree.order(other, "ipc_take", "m", 0)
        tree.order(0, "ipc_send", "small", 0)  # a process that has made handles, at least
        return [("m", worker) for worker in range(workers)]
    where = "host" if kind == "host" else ""
    tree.order(0, "make", "m", 64, where)
    tree.order(0, "map", "m", 64, where)
    holders = [("m", 0)]
    for other in range(1, workers) if workers > 1 else (0,):
        name = "m" if other else "again"
        tree.order(0, "send", "m", other)
        tree.order(other, "take", name, 0)
        tree.order(other, "map", name, 64, where)
        holders.append((name, other))
    return holders


def operate(tree: Tree, operation: str) -> None:
    """The operation; the tree is followed into its new processes."""
    import woodfrog

    if operation == "suspend_resume":
        woodfrog.suspend(tree.handle)
        woodfrog.resume(tree.handle)
        return
    image = woodfrog.checkpoint(tree.handle, stop=operation == "stop_restore").image
    if operation == "stop_restore":
        tree.handle.wait(60.0)
        tree.adopt(woodfrog.restore(image, verify=True))
    woodfrog.rm(image)


def check(tree: Tree, holders: Sequence[tuple[str, int]], operation: str) -> None:
    """What was written before is seen after, and what each writes then all see."""
    first, owner = holders[0]
    tree.order(owner, "write", first, 7)
    operate(tree, operation)
    for name, worker in holders:
        tree.see(name, worker, 7)
    for value, (name, worker) in enumerate(holders, 100):
        tree.order(worker, "write", name, value)
        for other, reader in holders:
            tree.see(other, reader, value)


Row = Callable[[str, Callable[[], None]], bool]


def one_tree(program: Path, work: Path, kind: str, workers: int, attempt: Row, allowed: Callable[[], bool]) -> None:
    """All operations on memory of one kind, one after the other in one target; after one that fails in a new one."""
    left = list(OPERATIONS)
    while left and allowed():
        label = f"sharing-{kind}-{workers}-{left[0]}"
        with running(program, work, label, workers) as tree:
            holders = prepare(tree, kind, workers)
            while left and allowed():
                operation = left.pop(0)
                if not attempt(operation, functools.partial(check, tree, holders, operation)):
                    break


def with_torch(work: Path, options: Sequence[str], attempt: Row, allowed: Callable[[], bool]) -> int:
    """All operations on processes of PyTorch that have each other's tensors open; how many steps were as they are
    when nothing disturbs them."""
    import woodfrog

    options = [*options, "--steps", "1000000", "--pace-ms", "20"]
    first = 1
    with (
        target_process.plain("share_tensors", options, work, "share-undisturbed") as reference,
        target_process.interposed("share_tensors", options, work, "share-managed") as run,
    ):
        run.wait_start(60.0)
        run.wait_more_steps(3)

        def one(operation: str) -> None:
            nonlocal first
            if operation == "suspend_resume":
                woodfrog.suspend(run.pid)
                woodfrog.resume(run.pid)
            else:
                image = woodfrog.checkpoint(run.pid, stop=operation == "stop_restore").image
                if operation == "stop_restore":
                    run.wait_ended()
                    run.adopt(woodfrog.restore(image, verify=True))
                woodfrog.rm(image)
            run.wait_more_steps(3, 30.0)
            last = run.log.last_step
            reference.wait_step(last, 30.0)
            if different := target_process.steps_differ(reference.log, run.log, first, last):
                raise Wrong(different)
            first = last + 1

        for operation in OPERATIONS:
            if allowed() and not attempt(operation, functools.partial(one, operation)):
                break
    return first - 1


def main() -> int:
    """Returns the exit status: 0 if nothing was wrong."""
    from woodfrog.errors import RefusedError

    parser = harness.parser(__doc__ or "", budget_s=240)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torch-args", nargs="*", default=[], help="of targets/share_tensors.py, without its dashes")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results, budget, failures = harness.Results("sharing"), harness.Budget(arguments.budget_s), []
    program = build(arguments.work)
    counts = {"right": 0, "attempted": 0, "refused": 0, "torch_compared": 0}
    kinds = ("device", "host", "legacy", "registered")
    cases = [(2, kind) for kind in kinds[:3]] if arguments.quick else [
        (workers, kind) for workers in arguments.workers for kind in kinds[:3]
    ]  # fmt: skip
    cases.append((1, "registered"))

    def attempts(workers: int, kind: str) -> Row:
        def attempt(operation: str, work: Callable[[], None]) -> bool:
            row = {"workers": workers, "memory": kind, "operation": operation}
            begin_s = time.monotonic()
            counts["attempted"] += 1
            try:
                work()
            except RefusedError as refusal:
                counts["refused"] += 1
                results.add(**row, right=False, refused=True, **harness.error_members(refusal))
            except Exception as failure:  # noqa: BLE001 (the other cases are tried all the same)
                failures.append(f"{kind} of {workers}, {operation}: {failure}")
                results.add(**row, right=False, **harness.error_members(failure))
            else:
                counts["right"] += 1
                results.add(**row, right=True, seconds=time.monotonic() - begin_s)
                return True
            return False

        return attempt

    def allowed() -> bool:
        if budget.allows(8.0):
            return True
        failures.append("the time was used up before all cases were tried")
        return False

    def tried(what: str, work: Callable[[], None]) -> None:
        """What fails before it comes to an operation is told as well."""
        try:
            work()
        except Exception as failure:  # noqa: BLE001
            failures.append(f"{what}: {failure}")
            results.add(memory=what, right=False, **harness.error_members(failure))
        results.summary |= {name: float(value) for name, value in counts.items()}

    def torch_tensors() -> None:
        options = [f"--{word}" for word in arguments.torch_args]
        counts["torch_compared"] = with_torch(arguments.work, options, attempts(2, "torch"), allowed)

    if arguments.torch:
        tried("torch", torch_tensors)
    for workers, kind in cases:
        if not allowed():
            break
        row = attempts(workers, kind)
        tried(kind, functools.partial(one_tree, program, arguments.work, kind, workers, row, allowed))
    harness.finish(results, GOALS, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
