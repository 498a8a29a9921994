"""What stands in the way is named before anything is touched, each with its reason and the way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from woodfrog.errors import RefusedError
from woodfrog.target import procfs
from woodfrog.target.memory import Survey
from woodfrog.target.preconditions import Obstacle, Scope, gpu_processes, refuse, survey
from woodfrog.target.process import FileKind, OpenDescriptor, ProcessInfo, ProcessTree

NOTHING = Survey(0, 0, 0, 0, 0, 0, 0, (), ())


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[ProcessTree]:
    """A real process in its own session with nothing special open; tests change what was read of it."""
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with ProcessTree(process.pid) as found:
        yield found
    process.kill()
    process.wait()


def codes(obstacles: list[Obstacle], scope: Scope | None = None) -> set[str]:
    return {obstacle.code for obstacle in obstacles if scope is None or obstacle.scope is scope}


def as_gpu_process(tree: ProcessTree, **changes: object) -> None:
    tree.processes[0] = replace(tree.processes[0], libcuda="/usr/lib/libcuda.so.1", **changes)  # type: ignore[arg-type]


def test_an_ordinary_gpu_process_has_nothing_in_the_way(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    assert survey(tree, agent_survey=NOTHING, is_cuda_process=lambda pid: True) == []
    refuse([], image=True)


def test_a_process_without_cuda_is_named(tree: ProcessTree) -> None:
    assert codes(survey(tree)) == {"no_gpu_process"}
    as_gpu_process(tree)
    assert codes(survey(tree, is_cuda_process=lambda pid: False)) == {"no_gpu_process"}


CHANGES: dict[str, tuple[dict[str, object], Scope]] = {
    "zombie": ({"state": "Z"}, Scope.ALL),
    "stopped": ({"state": "T"}, Scope.ALL),
    "traced": ({"tracer_pid": 77}, Scope.ALL),
    "kernel_thread": ({"is_kernel_thread": True}, Scope.ALL),
    "terminal": ({"descriptors": (OpenDescriptor(0, FileKind.TERMINAL, "/dev/pts/1"),)}, Scope.IMAGE),
    "io_uring": ({"descriptors": (OpenDescriptor(9, FileKind.IO_URING, "anon_inode:[io_uring]"),)}, Scope.IMAGE),
}


@pytest.mark.parametrize("code", sorted(CHANGES))
def test_each_state_of_a_process_that_is_in_the_way_is_named(tree: ProcessTree, code: str) -> None:
    changes, scope = CHANGES[code]
    as_gpu_process(tree, **changes)
    found = [obstacle for obstacle in survey(tree) if obstacle.code == code]
    assert [obstacle.scope for obstacle in found] == [scope]
    assert found[0].pid == tree.pid
    assert found[0].advice
    with pytest.raises(RefusedError, match=str(tree.pid)) as caught:
        refuse(found, image=True)
    assert caught.value.phase == "survey"
    assert caught.value.target_state == "untouched"
    if scope is Scope.IMAGE:
        refuse(found, image=False)  # not in the way of a suspend


def test_a_real_stopped_process_is_seen(tree: ProcessTree) -> None:
    os.kill(tree.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, tree.pid, os.WSTOPPED | os.WNOWAIT)
    with ProcessTree(tree.pid) as stopped:
        assert "stopped" in codes(survey(stopped))


def test_a_real_traced_process_is_seen(tree: ProcessTree) -> None:
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(tree.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert tracer.stdout is not None
    assert tracer.stdout.read(5) == b"ready"
    with ProcessTree(tree.pid) as traced:
        assert str(tracer.pid) in next(one.reason for one in survey(traced) if one.code == "traced")
    tracer.communicate()


def test_a_child_of_process_2_is_an_ordinary_one_where_2_is_a_containers_own(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    tree.processes[0] = replace(tree.processes[0], parent_pid=2)
    assert "kernel_thread" not in codes(survey(tree))


def test_a_gpu_process_without_interposer_beside_one_with_it_is_refused_by_its_number(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    child = replace(tree.processes[0], pid=tree.pid + 1, parent_pid=tree.pid)
    tree.processes.append(child)
    assert codes(survey(tree, is_cuda_process=lambda pid: True), Scope.ALL) == set()
    tree.processes[0] = replace(tree.processes[0], agent_tid=tree.pid, interposed=True)
    found = survey(tree, is_cuda_process=lambda pid: True)
    assert "without_interposer" in codes(found, Scope.ALL)
    assert str(child.pid) in next(one.reason for one in found if one.code == "without_interposer")
    # A forked child has the library mapped but is unknown to the driver.
    as_gpu_process(tree)
    assert [one.pid for one in gpu_processes(tree, lambda pid: pid == tree.pid)] == [tree.pid]


def test_a_forked_helper_of_an_interposed_process_is_no_gpu_process_and_the_driver_is_not_asked_about_it(
    tree: ProcessTree,
) -> None:
    as_gpu_process(tree, agent_tid=tree.pid, interposed=True)
    tree.processes.append(replace(tree.processes[0], pid=tree.pid + 1, parent_pid=tree.pid, agent_tid=None))
    asked: list[int] = []

    def ask(pid: int) -> bool:
        asked.append(pid)
        return True

    assert [process.pid for process in gpu_processes(tree, ask)] == [tree.pid]
    assert asked == []


def test_a_helper_that_inherited_the_gpus_files_is_in_the_way_of_an_image_only(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    nvidia = (OpenDescriptor(5, FileKind.NVIDIA, "/dev/nvidia0"),)
    child = replace(tree.processes[0], pid=tree.pid + 1, parent_pid=tree.pid, descriptors=nvidia)
    tree.processes.append(child)
    found = survey(tree, is_cuda_process=lambda pid: pid == tree.pid)
    assert codes(found, Scope.IMAGE) == {"inherited_gpu_files"}


@pytest.mark.parametrize("name", ["managed_memory", "imported_memory", "legacy_ipc", "multicast", "mig_or_mps"])
def test_what_the_interposer_reports_is_refused_with_a_reason(tree: ProcessTree, name: str) -> None:
    as_gpu_process(tree)
    found = survey(tree, agent_survey=replace(NOTHING, obstacles=(name,)))
    assert codes(found, Scope.ALL) == {name}
    assert found[0].advice
    with pytest.raises(RefusedError):
        refuse(found, image=False)


def test_an_obstacle_that_this_version_does_not_know_is_still_in_the_way(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    assert codes(survey(tree, agent_survey=replace(NOTHING, obstacles=("novelty",))), Scope.ALL) == {"novelty"}


def test_a_capture_is_a_note_and_refuses_nothing(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    found = survey(tree, agent_survey=replace(NOTHING, obstacles=("capture_active",)))
    assert codes(found, Scope.NOTE) == {"capture_active"}
    refuse(found, image=True)


def test_every_obstacle_of_the_wire_has_words(tree: ProcessTree) -> None:
    from woodfrog._native import wire

    as_gpu_process(tree)
    for name in wire.OBSTACLES:
        (found,) = survey(tree, agent_survey=replace(NOTHING, obstacles=(name,)))
        assert not found.reason.startswith("The interposer reports an obstacle"), name


def test_a_split_gpu_is_refused(tree: ProcessTree) -> None:
    as_gpu_process(tree)
    assert codes(survey(tree, mig_enabled=True), Scope.ALL) == {"mig_or_mps"}


def test_another_container_is_refused(tree: ProcessTree) -> None:
    spaces = dict(tree.root.namespaces)
    as_gpu_process(tree, namespaces={**spaces, "net": "net:[1]"})
    assert codes(survey(tree), Scope.IMAGE) == {"namespaces"}
    as_gpu_process(tree, namespaces={**spaces, "pid": "pid:[1]"})
    assert codes(survey(tree), Scope.ALL) == {"namespaces"}


def test_all_reasons_are_given_at_once(tree: ProcessTree) -> None:
    as_gpu_process(tree, state="T", tracer_pid=77)
    with pytest.raises(RefusedError, match=r"stopped.*traced") as caught:
        refuse(survey(tree), image=True)
    assert len(caught.value.details["obstacles"]) == 2


def test_output_into_a_pipe_of_an_outsider_is_in_the_way_of_an_image() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; print('ready', end='', flush=True); signal.pause()"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(5) == b"ready"
        with ProcessTree(process.pid) as piped:
            found = [one for one in survey(piped) if one.code == "outside_pipe"]
            assert [one.scope for one in found] == [Scope.IMAGE]
            assert str(os.getpid()) in found[0].reason
    finally:
        process.kill()
        process.communicate()


def test_a_pipe_within_the_target_is_not_in_the_way(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(w)\n"
        "    os.read(r, 1)\n"
        "    os._exit(0)\n"
        "os.close(r)\n"
        "open('fifo', 'w').write('ready')\n"
        "signal.pause()"
    )
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert (tmp_path / "fifo").read_text() == "ready"
        with ProcessTree(process.pid) as found:
            assert len(found.processes) == 2
            assert not {"outside_pipe", "outside_input"} & codes(survey(found))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_namespaces_of_this_process_are_readable() -> None:
    assert {"pid", "mnt", "net"} <= procfs.namespaces(os.getpid()).keys()


def test_a_process_info_knows_its_identity(tree: ProcessTree) -> None:
    root: ProcessInfo = tree.root
    assert root.identity.is_alive()


_TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()  # PTRACE_SEIZE
os.write(1, b"ready")
os.read(0, 1)
"""
