"""Starting a target: its name, its environment, its log, and following it; without a GPU and without a daemon."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from woodfrog import launch
from woodfrog.errors import NotFoundError, RefusedError, UsageError
from woodfrog.logtail import LogTail
from woodfrog.store import names


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["./a.out"], "a.out"),
        (["/usr/bin/python3.11", "/x/train.py", "--lr", "1"], "train"),
        (["python", "-m", "vllm.server"], "vllm"),
        (["python", "-c", "print(1)"], "python"),
        (["./ä b"], "b"),
        (["..."], "target"),
        (["x" * 200], "x" * 48),
    ],
)
def test_a_target_is_named_after_its_program(argv: list[str], name: str) -> None:
    assert launch.default_name(argv, []) == name
    assert names.check_name(name) == name


def test_a_name_that_is_taken_gets_a_number() -> None:
    assert launch.default_name(["a"], ["a"]) == "a-2"
    assert launch.default_name(["a"], ["a", "a-2"]) == "a-3"


def test_the_interposer_comes_first_and_only_once() -> None:
    base = {"LD_PRELOAD": "/lib/x.so /w/i.so", "KEPT": "1"}
    made = launch.target_environment("t", Path("/run/w"), base, Path("/w/i.so"))
    assert made == {
        "LD_PRELOAD": "/w/i.so:/lib/x.so",
        "KEPT": "1",
        "WOODFROG_NAME": "t",
        "WOODFROG_RUNTIME_DIR": "/run/w",
    }
    assert base["LD_PRELOAD"] == "/lib/x.so /w/i.so"


def test_a_path_that_ld_preload_cannot_hold_is_refused() -> None:
    with pytest.raises(RefusedError, match="LD_PRELOAD"):
        launch.target_environment("t", Path("/run"), {}, Path("/with space/i.so"))


def start(tmp_path: Path, code: str) -> subprocess.Popen[bytes]:
    return launch.start(
        [sys.executable, "-c", code],
        name="t",
        log=tmp_path / "logs" / "t.log",
        env={"PATH": "/usr/bin"},
        cwd=str(tmp_path),
    )


def test_a_target_has_a_session_of_its_own_no_terminal_and_appends_to_its_log(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', os.getcwd());"
        "print('err', file=sys.stderr)"
    )
    for _ in range(2):
        assert start(tmp_path, code).wait(30) == 0
    log = tmp_path / "logs" / "t.log"
    assert sorted(log.read_text().splitlines()) == sorted([f"True True {tmp_path}", "err"] * 2)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.parametrize("io_uring", [None, False, True])
def test_a_program_that_cannot_be_started_is_told_by_its_reason(tmp_path: Path, io_uring: bool | None) -> None:
    def attempt(argv: list[str], cwd: Path) -> None:
        launch.start(argv, name="t", log=tmp_path / "t.log", env={}, cwd=str(cwd), io_uring=io_uring)

    with pytest.raises(NotFoundError, match="no program"):
        attempt([str(tmp_path / "nothing")], tmp_path)
    with pytest.raises(NotFoundError, match="no program"):
        attempt(["no-such-program"], tmp_path)
    with pytest.raises(NotFoundError, match="working directory"):
        attempt([sys.executable], tmp_path / "nowhere")
    (tmp_path / "data").write_text("x")
    with pytest.raises(UsageError, match="executed"):
        attempt([str(tmp_path / "data")], tmp_path)
    with pytest.raises(UsageError, match="log file"):
        launch.start([sys.executable], name="t", log=tmp_path, env={}, cwd=None)


def test_following_a_log_sees_every_byte_and_the_end(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "t.log"
    log.parent.mkdir()
    log.write_text("from before\n")
    process = start(tmp_path, "import sys\nfor i in range(20000): print(i)\nsys.stdout.write('no newline')")
    with LogTail(log, len("from before\n"), process.pid) as tail:
        lines = list(tail.lines(60))
    assert lines == [*map(str, range(20000)), "no newline"]
    assert process.wait(30) == 0


def test_following_ends_with_the_deadline_and_the_process_runs_on(tmp_path: Path) -> None:
    process = start(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    try:
        with LogTail(tmp_path / "logs" / "t.log", 0, process.pid) as tail:
            lines = tail.lines(20)
            assert next(lines) == "up"
        with LogTail(tmp_path / "logs" / "t.log", 0, process.pid) as tail, pytest.raises(TimeoutError):
            list(tail.lines(0.05))
        assert process.poll() is None
    finally:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_a_process_that_has_ended_is_followed_to_its_last_byte(tmp_path: Path) -> None:
    process = start(tmp_path, "print('done')")
    process.wait(30)
    with LogTail(tmp_path / "logs" / "t.log", 0, process.pid) as tail:
        assert list(tail.lines(30)) == ["done"]


def test_every_public_name_is_there_and_documented() -> None:
    import woodfrog

    for name in woodfrog.__all__:
        assert name == "__version__" or getattr(woodfrog, name).__doc__
    with pytest.raises(AttributeError):
        _ = woodfrog.nonsense
