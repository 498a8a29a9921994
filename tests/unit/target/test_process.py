"""A process tree is seen as it is, and only exactly these processes are ever signalled."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from woodfrog.errors import NotFoundError, RefusedError, TargetLostError
from woodfrog.target import procfs
from woodfrog.target.identity import Identity, ProcessHandle
from woodfrog.target.process import FileKind, ProcessTree, classify, read

Spawn = Callable[..., subprocess.Popen[bytes]]

# Says "ready" when everything is set up, and ends when its input does.
TREE = """
import os, sys, threading
if os.fork() == 0:
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    os.wait()
    os._exit(0)
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
os.write(1, b"ready")
os.wait()
"""


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """spawn(code) runs a Python program up to its "ready"."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str, **options: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **options,
        )  # type: ignore[call-overload]
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        return process

    yield run
    for process in started:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended, as some tests want it
            os.killpg(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_tree_has_every_descendant_root_first_with_its_threads(spawn: Spawn) -> None:
    process = spawn(TREE)
    with ProcessTree(process.pid) as tree:
        assert tree.root.pid == process.pid
        assert len(tree.processes) == 3
        assert tree.processes[2].parent_pid == tree.processes[1].pid
        assert len(tree.root.threads) == 4
        assert tree.root.command_line[0] == sys.executable
        assert tree.root.session_id == process.pid
        assert tree.root.uid == os.geteuid()
        assert tree.root.libcuda is None
        assert not tree.root.interposed
        assert tree.resident_bytes > 1 << 20
        assert {info.pid for info in tree.processes} == tree.handles.keys()
        tree.require_unchanged()


def test_stop_continue_and_kill_reach_the_whole_tree(spawn: Spawn) -> None:
    process = spawn(TREE)
    with ProcessTree(process.pid) as tree:
        tree.stop()
        pids = [info.pid for info in tree.processes]
        deadline = time.monotonic() + 30
        while {found.state for pid in pids if (found := procfs.stat(pid))} != {"T"}:
            assert time.monotonic() < deadline
        tree.resume()
        while "T" in {found.state for pid in pids if (found := procfs.stat(pid))}:
            assert time.monotonic() < deadline
        tree.kill()
        assert not any(info.identity.is_alive() for info in tree.processes)
        with pytest.raises(TargetLostError):
            tree.require_unchanged()
    process.wait()


def test_a_new_child_is_noticed(spawn: Spawn) -> None:
    process = spawn(
        "import os\n"
        "os.write(1, b'ready')\n"
        "os.read(0, 1)\n"
        "if os.fork() == 0:\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "os.write(1, b'x')\n"
        "os.wait()"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with ProcessTree(process.pid) as tree:
        os.write(process.stdin.fileno(), b"x")
        assert os.read(process.stdout.fileno(), 1) == b"x"
        with pytest.raises(RefusedError, match="started another process"):
            tree.require_unchanged()


def test_a_threads_number_is_refused_with_its_process(spawn: Spawn) -> None:
    process = spawn(TREE)
    thread = procfs.threads(process.pid)[-1]
    assert thread != process.pid
    with pytest.raises(RefusedError, match=f"{thread} is the number of a thread of process {process.pid}"):
        ProcessTree(thread)


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_a_number_that_is_no_process_is_not_found(pid: int) -> None:
    with pytest.raises(NotFoundError):
        ProcessTree(pid)


def test_a_handle_never_signals_a_process_that_took_the_number(spawn: Spawn) -> None:
    process = spawn(TREE)
    with pytest.raises(TargetLostError, match="another one than before"):
        ProcessHandle(process.pid, start_ticks=1)
    with ProcessHandle(process.pid) as handle:
        assert handle.is_alive()
        assert Identity(process.pid, handle.identity.start_ticks).is_alive()
        assert not Identity(process.pid, handle.identity.start_ticks + 1).is_alive()
        assert not handle.wait(0)
        assert handle.kill()
        process.wait()
        with pytest.raises(TargetLostError):
            handle.signal(signal.SIGTERM)
        with pytest.raises(TargetLostError):
            handle.require_alive()
    with pytest.raises(NotFoundError):
        ProcessHandle(process.pid)


def test_a_zombie_does_not_count_as_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stat = procfs.stat(pid)
    assert stat is not None
    assert stat.state == "Z"
    assert not Identity(pid, stat.start_ticks).is_alive()
    info = read(pid)
    assert info is not None
    assert info.is_zombie
    os.waitpid(pid, 0)
    assert read(pid) is None


def test_names_with_spaces_and_parentheses_are_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "600"])
    try:
        deadline = time.monotonic() + 30
        while (found := procfs.stat(process.pid)) is None or found.name != "a) R (b":  # until it has exec'ed
            assert time.monotonic() < deadline
        assert found.parent_pid == os.getpid()
        assert found.state in "RSD"
    finally:
        process.kill()
        process.wait()


def test_open_files_are_told_apart_by_kind(spawn: Spawn, tmp_path: Path) -> None:
    _, terminal = pty.openpty()
    code = (
        "import os, socket\n"
        "s = socket.socket()\n"
        "e = os.eventfd(0)\n"
        "f = open('x', 'w'); os.unlink('x')\n"
        "os.write(1, b'ready')\n"
        "os.read(0, 1)"
    )
    process = spawn(code, cwd=tmp_path, pass_fds=(terminal,))
    with ProcessTree(process.pid) as tree:
        kinds = {descriptor.number: descriptor.kind for descriptor in tree.root.descriptors}
        assert kinds[0] is FileKind.PIPE
        assert kinds[terminal] is FileKind.TERMINAL
        found = set(kinds.values())
        assert {FileKind.SOCKET, FileKind.ANONYMOUS, FileKind.DELETED} <= found
        assert FileKind.NVIDIA not in found
    os.close(terminal)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dev/nvidia0", FileKind.NVIDIA),
        ("/dev/nvidia-uvm", FileKind.NVIDIA),
        ("anon_inode:[io_uring]", FileKind.IO_URING),
        ("anon_inode:[eventfd]", FileKind.ANONYMOUS),
        ("/memfd:x (deleted)", FileKind.OTHER),
        ("/tmp/x (deleted)", FileKind.DELETED),
        ("/dev/pts/3", FileKind.TERMINAL),
        ("/dev/null", FileKind.OTHER),
        ("/home/dev/nvidia0", FileKind.OTHER),
    ],
)
def test_kinds_of_files(path: str, kind: FileKind) -> None:
    assert classify(path) is kind


def test_a_mapped_driver_library_is_seen_and_told_from_the_simulated_one(tmp_path: Path) -> None:
    for folder, simulated in (("real", False), ("simgpu", True)):
        library = tmp_path / folder / "libcuda.so.1"
        library.parent.mkdir()
        library.write_bytes(b"\x7fELF" + b"\0" * 4096)
        code = (
            "import mmap, os, sys\n"
            "m = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, prot=mmap.PROT_READ)\n"
            "os.write(1, b'ready'); os.read(0, 1)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        info = read(process.pid)
        process.kill()
        process.communicate()
        assert info is not None
        assert info.libcuda == str(library)
        assert info.is_simulated is simulated
