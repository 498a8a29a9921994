"""What CRIU cannot save is named twice: by the survey before anything is touched, and by the dump from CRIU's log."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from woodfrog.cpu.criu import Criu
from woodfrog.errors import RefusedError
from woodfrog.target.preconditions import Scope, survey
from woodfrog.target.process import ProcessTree

from .programs import COUNTER, Start

IO_URING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, (ctypes.c_uint32 * 30)())  # io_uring_setup, struct io_uring_params
assert ring >= 0, ctypes.get_errno()
"""
USERFAULTFD = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(323, 1) >= 0, ctypes.get_errno()  # userfaultfd(UFFD_USER_MODE_ONLY)
"""


def obstacles(pid: int) -> dict[str, Scope]:
    with ProcessTree(pid) as tree:
        return {one.code: one.scope for one in survey(tree) if one.code != "no_gpu_process"}


def test_io_uring_is_seen_by_the_survey_and_named_by_the_dump(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start(IO_URING + COUNTER)
    assert obstacles(program.pid) == {"io_uring": Scope.IMAGE}
    with pytest.raises(RefusedError, match="io_uring") as caught:
        criu.dump(program.pid, tmp_path / "image", leave_running=False, log_directory=tmp_path / "logs")
    assert caught.value.target_state == "running"
    assert (tmp_path / "logs" / "dump.log").exists()
    program.wait_for_more(program.numbers()[-1] + 10)


def test_a_kind_of_file_that_the_survey_does_not_know_is_named_by_the_dump(
    criu: Criu, start: Start, tmp_path: Path
) -> None:
    program = start(USERFAULTFD + COUNTER)
    with pytest.raises(RefusedError, match="userfaultfd"):
        criu.dump(program.pid, tmp_path / "image", leave_running=False)
    program.wait_for_more(program.numbers()[-1] + 10)


@pytest.fixture
def on_a_terminal(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose input and output is a terminal that this test holds the other end of."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    assert os.read(ours, 5) == b"ready"
    yield process
    process.kill()
    process.wait()
    os.close(ours)


def test_a_terminal_is_seen_by_the_survey_and_named_by_the_dump(
    criu: Criu, on_a_terminal: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert obstacles(on_a_terminal.pid) == {"terminal": Scope.IMAGE}
    with pytest.raises(RefusedError, match="terminal"):
        criu.dump(on_a_terminal.pid, tmp_path / "image", leave_running=False)
    assert on_a_terminal.poll() is None


def test_a_debugger_is_seen_by_the_survey_and_named_by_the_dump(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    tracer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import ctypes, os, sys\n"
            "assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0\n"  # PTRACE_SEIZE
            "os.write(1, b'ready')\nos.read(0, 1)",
            str(program.pid),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert tracer.stdout is not None
        assert tracer.stdout.read(5) == b"ready"
        assert obstacles(program.pid) == {"traced": Scope.ALL}
        with pytest.raises(RefusedError, match=f"Process {program.pid} is being traced"):
            criu.dump(program.pid, tmp_path / "image", leave_running=False)
    finally:
        tracer.communicate()
    program.wait_for_more(program.numbers()[-1] + 10)


def test_a_connection_to_an_outsider_is_named_by_the_dump(criu: Criu, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNTER],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
        )
    theirs.close()
    try:
        with pytest.raises(RefusedError, match="Unix socket to a process outside"):
            criu.dump(process.pid, tmp_path / "image", leave_running=False)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        ours.close()


def test_a_folder_that_is_not_empty_is_refused(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "other").touch()
    with pytest.raises(RefusedError, match="not empty"):
        criu.dump(program.pid, tmp_path / "image", leave_running=True)
    assert [path.name for path in (tmp_path / "image").iterdir()] == ["other"]
