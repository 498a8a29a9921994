"""CRIU runs bounded: whatever it does, it and its group have ended when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from woodfrog.cpu import run as run_module
from woodfrog.cpu.gate import Gate
from woodfrog.cpu.run import run, still_running


def python(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


def test_exit_code_and_output_come_back(tmp_path: Path) -> None:
    finished = run(python("print('said'); raise SystemExit(3)"), timeout_s=30, work_directory=tmp_path)
    assert finished.returncode == 3
    assert finished.output.strip() == "said"
    assert list(tmp_path.iterdir()) == []


def test_a_time_out_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    code = python(
        "import os, time",
        "child = os.fork()",
        "open('pids', 'a').write(f'{os.getpid()}\\n')",
        "os.close(1) if child == 0 else None",
        "time.sleep(600)",
    )
    finished = run(code, timeout_s=2, work_directory=tmp_path)
    assert finished.returncode is None
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        # Killed, the grandchild may take a moment to die; its pidfd says when, also while it is a zombie of init.
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], 30)[0], f"process {pid} is still alive"
            os.close(pidfd)


def test_what_takes_back_fails_at_its_next_write_and_is_not_killed(tmp_path: Path) -> None:
    code = python(
        "import os, time",
        "child = os.fork()",
        "file = os.open(f'file{child == 0}', os.O_CREAT | os.O_WRONLY)",
        "try:",
        "    while True:",
        "        os.write(file, b'x')",
        "        time.sleep(0.001)",
        "except OSError as failure:",
        "    if child: os.waitpid(child, 0)",
        "    os.symlink(str(failure.errno), f'taken-back{child == 0}')",
        "raise SystemExit(4)",
    )
    finished = run(code, timeout_s=2, work_directory=tmp_path, takes_back=True)
    assert (finished.returncode, finished.stopped) == (4, True)
    for name in ("taken-backTrue", "taken-backFalse"):
        assert (tmp_path / name).readlink() == Path(str(errno.EFBIG))


def test_what_takes_back_but_never_writes_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "TAKE_BACK_S", 0.5)
    finished = run(python("import time; time.sleep(600)"), timeout_s=0.5, work_directory=tmp_path, takes_back=True)
    assert (finished.returncode, finished.stopped) == (None, False)


def test_what_ends_well_after_the_time_out_has_ended_well(tmp_path: Path) -> None:
    code = python(
        "import resource",
        "while resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0: pass",
    )
    finished = run(code, timeout_s=0.5, work_directory=tmp_path, takes_back=True)
    assert (finished.returncode, finished.stopped) == (0, False)


def test_what_is_to_be_done_at_a_time_out_is_done_before_the_program_is_stopped(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = python(f"import os; os.read({read}, 1)")
    finished = run(
        code,
        timeout_s=0.5,
        work_directory=tmp_path,
        pass_fds=(read,),
        takes_back=True,
        at_timeout=lambda: os.close(write),
    )
    os.close(read)
    assert (finished.returncode, finished.stopped) == (0, False)
    assert finished.elapsed_s >= 0.5
    called: list[int] = []
    assert (
        run(python("pass"), timeout_s=30, work_directory=tmp_path, at_timeout=lambda: called.append(1)).returncode == 0
    )
    assert called == []


def at_gate(gate: Gate, then: str) -> list[str]:
    """What CRIU's action script does: waits for a byte, and goes on with `then` if there was one."""
    return python("import os, time", f"if not os.read({gate.fd}, 1): raise SystemExit(5)", then)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


def test_the_time_runs_from_when_the_gate_is_opened(tmp_path: Path, gate: Gate) -> None:
    opening = threading.Timer(1.5, gate.open)
    opening.start()
    finished = run(
        at_gate(gate, "time.sleep(600)"),
        timeout_s=0.5,
        work_directory=tmp_path,
        pass_fds=(gate.fd,),
        gate=gate,
        gate_s=60,
    )
    opening.join()
    assert finished.returncode is None
    assert finished.elapsed_s >= 2
    assert not gate.shut(), "it was opened"


def test_what_is_not_let_on_in_time_ends_by_itself(tmp_path: Path, gate: Gate) -> None:
    finished = run(
        at_gate(gate, "pass"), timeout_s=600, work_directory=tmp_path, pass_fds=(gate.fd,), gate=gate, gate_s=0.3
    )
    assert finished.returncode == 5
    assert gate.is_shut
    assert not gate.open(), "it is too late"


@pytest.mark.parametrize("takes_back", [True, False])
def test_what_hangs_before_a_gate_that_is_shut_is_killed_soon(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    monkeypatch.setattr(run_module, "SHUT_S", 0.5)
    gate.shut()
    finished = run(
        python("import time; time.sleep(600)"),
        timeout_s=600,
        work_directory=tmp_path,
        gate=gate,
        gate_s=600,
        takes_back=takes_back,
    )
    assert finished.returncode == -signal.SIGKILL
    assert finished.elapsed_s < 60


def test_what_ends_before_its_gate_is_opened_is_not_waited_for(tmp_path: Path, gate: Gate) -> None:
    finished = run(python("raise SystemExit(6)"), timeout_s=600, work_directory=tmp_path, gate=gate, gate_s=600)
    assert finished.returncode == 6
    assert gate.open(), "nobody has shut it"


def test_what_is_known_to_hang_is_killed_at_once(tmp_path: Path) -> None:
    hung, tell = os.pipe()
    os.write(tell, b"1")
    finished = run(python("import time; time.sleep(600)"), timeout_s=600, work_directory=tmp_path, hung=hung)
    os.close(hung)
    os.close(tell)
    assert finished.returncode == -signal.SIGKILL
    assert finished.elapsed_s < 60


def test_a_process_of_the_machine_that_the_kernel_ends_for_want_of_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_module._ended_for_memory() >= 0
    counted = iter([3, 4, 4, 4])
    monkeypatch.setattr(run_module, "_ended_for_memory", lambda: next(counted))
    assert run(python("pass"), timeout_s=60, work_directory=tmp_path).lacked_memory
    assert not run(python("pass"), timeout_s=60, work_directory=tmp_path).lacked_memory


def test_it_has_no_input_and_its_own_session(tmp_path: Path) -> None:
    finished = run(
        python("import os, sys; print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())"),
        timeout_s=30,
        work_directory=tmp_path,
    )
    assert finished.output.strip() == "'' True"


def test_descriptors_of_the_daemon_do_not_leak_into_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        finished = run(
            python("import os; print(sorted(os.listdir('/proc/self/fd')))"), timeout_s=30, work_directory=tmp_path
        )
    finally:
        os.close(read)
        os.close(write)
    assert finished.output.strip() == "['0', '1', '2', '3']"  # 3 is the listing's own


def test_a_program_that_cannot_start_raises_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(["/nonexistent/criu"], timeout_s=1, work_directory=tmp_path)
    assert still_running(tmp_path) is None


def test_a_run_that_outlives_its_daemon_is_found_by_the_next(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = tmp_path / "criu"
    program.write_text(f"#!/bin/sh\nread line < {fifo}\n")
    program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from woodfrog.cpu.run import run\n"
        "run([sys.argv[1], sys.argv[2]], timeout_s=600, work_directory=Path(sys.argv[2]))\n"
    )
    daemon = subprocess.Popen([sys.executable, "-c", code, str(program), str(work)])
    # Opening for writing returns once the program has opened its end, so both processes are up.
    gate = os.open(fifo, os.O_WRONLY)
    try:
        daemon.kill()
        daemon.wait()
        pid = still_running(work)
        assert pid is not None
        assert still_running(tmp_path) is None
        pidfd = os.pidfd_open(pid)
        os.write(gate, b"go\n")
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
    finally:
        os.close(gate)
        daemon.kill()
        daemon.wait()
    assert still_running(work) is None
