"""What CRIU promises for the CPU side of a target, with real processes."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from woodfrog.cpu import run
from woodfrog.cpu.criu import Criu, Restored
from woodfrog.errors import BadImageError, NoSpaceError, RefusedError, TimeoutExceededError
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.target import discovery
from woodfrog.target.process import ProcessTree
from woodfrog.target.reaper import Reaper

from .programs import (
    COUNTER,
    Start,
    assert_gapless,
    counting,
    dump_and_end,
    end,
    outgrowing,
    time_out_anywhere,
    wait_until,
)

THREADS_AND_CHILD = """
import os, threading, time
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.close(write)
    n = 0
    while True:
        got = os.read(read, 4)
        assert int.from_bytes(got, "little") == n + 1
        n += 1
        print(n, flush=True)
os.close(read)
lock = threading.Lock()
shared = [0]
def work():
    while True:
        with lock:
            shared[0] += 1
            os.write(write, shared[0].to_bytes(4, "little"))
        time.sleep(0.002)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
threading.Event().wait()
"""


def test_threads_a_child_and_the_pipe_between_them_go_on_after_a_restore(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(THREADS_AND_CHILD)
    program.wait_for_more(20)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=False)
    assert len(dumped.tasks) == 2
    assert len(dumped.tasks[0].threads) == 5
    at_dump = program.numbers()
    program.kill_all()
    restored = restore(dumped.directory)
    assert restored.pid == program.pid
    program.wait_for_more(at_dump[-1] + 50)
    assert program.numbers()[: len(at_dump)] == at_dump
    assert_gapless(program)


def test_twenty_leave_running_dumps_do_not_disturb_the_target_and_each_can_be_restored(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(THREADS_AND_CHILD)
    for round_number in range(20):
        program.wait_for_more(program.numbers()[-1])
        criu.dump(program.pid, tmp_path / f"image{round_number}", leave_running=True)
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)
    program.kill_all()
    for round_number in (0, 7, 19):
        restored = restore(tmp_path / f"image{round_number}")
        lines = len(program.numbers())
        wait_until(lambda lines=lines: len(program.numbers()) > lines + 10, "ten more lines")  # type: ignore[misc]
        end(restored)


def test_one_image_is_restored_again_and_again_while_its_log_grows(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start()
    program.wait_for_more(10)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    program.wait_for_more(program.numbers()[-1] + 10)  # the log has grown since the dump
    program.kill_all()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in dumped.directory.iterdir())
    for _ in range(5):
        lines = program.log.read_bytes()
        restored = restore(dumped.directory)
        wait_until(lambda lines=lines: program.log.stat().st_size > len(lines) + 20, "more output")  # type: ignore[misc]
        assert program.log.read_bytes().startswith(lines)  # nothing that was written before is touched
        end(restored)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in dumped.directory.iterdir())
    assert before == after  # the image is only read


def test_an_output_file_that_is_not_appended_to_is_written_on_from_the_old_position(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(append=False)
    program.wait_for_more(10)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    program.wait_for_more(program.numbers()[-1] + 30)
    program.kill_all()
    size = program.log.stat().st_size
    restored = restore(dumped.directory)
    assert any("writes on in it" in note for note in restored.notes)
    wait_until(lambda: program.log.stat().st_size > size + 20, "output beyond the old end")
    # The same numbers were written over themselves: the file reads as if nothing had happened.
    assert_gapless(program)


def test_a_log_that_was_rotated_away_is_made_anew(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start()
    program.wait_for_more(10)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=False)
    last = program.numbers()[-1]
    program.kill_all()
    program.log.rename(tmp_path / "log.1")
    restore(dumped.directory)
    wait_until(lambda: program.log.exists() and len(program.numbers()) > 5, "output in the new log")
    assert program.numbers()[0] == last + 1


def test_without_leave_running_the_target_stands_still_until_it_is_continued(
    criu: Criu, start: Start, tmp_path: Path
) -> None:
    program = start(THREADS_AND_CHILD)
    with ProcessTree(program.pid) as tree:
        criu.dump(program.pid, tmp_path / "image", leave_running=False)
        assert {process.state for process in ProcessTree(program.pid).processes} == {"T"}
        last = program.numbers()[-1]
        tree.resume()
    program.wait_for_more(last + 20)
    assert_gapless(program)


def test_what_was_dumped_is_readable_by_its_owner_only(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    assert stat.S_IMODE(dumped.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in dumped.directory.iterdir()} == {0o600}
    assert (dumped.directory / "dump.log").stat().st_size > 0
    assert dumped.size_bytes == sum(path.stat().st_size for path in dumped.directory.iterdir())


def test_a_dump_that_times_out_leaves_the_target_running(criu: Criu, start: Start, tmp_path: Path) -> None:
    """Wherever it is. Killed at such moments, as it was once, 2 of 100 dumps cost the target a process."""
    program = start("x = bytearray(b'ab' * (50 << 20))\n" + THREADS_AND_CHILD)

    def dump(leave_running: bool, timeout_s: float) -> None:
        try:
            criu.dump(program.pid, tmp_path / "image", leave_running=leave_running, timeout_s=timeout_s)
        finally:
            shutil.rmtree(tmp_path / "image")

    time_out_anywhere(program, dump, seed=4, attempts=60, longest_s=0.3)


def test_a_dump_that_had_to_be_killed_is_told_as_such(
    criu: Criu, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never writes, as on a disk that hangs: it cannot take anything back."""
    monkeypatch.setattr(run, "TAKE_BACK_S", 0.3)
    program = start(THREADS_AND_CHILD)
    hanging = tmp_path / "criu"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    with pytest.raises(TimeoutExceededError, match="did not end within") as caught:
        Criu(hanging, criu.version).dump(program.pid, tmp_path / "image", leave_running=False, timeout_s=0.3)
    assert "was killed: see whether the target still works" in caught.value.advice
    program.wait_for_more(5)
    assert_gapless(program)


def test_a_full_disk_is_told_as_such_and_leaves_the_target_running(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start("x = bytearray(b'ab' * (16 << 20))\n" + THREADS_AND_CHILD)
    small = tmp_path / "small"
    small.mkdir()
    assert os.system(f"mount -t tmpfs -o size=4m none {small}") == 0
    try:
        with pytest.raises(NoSpaceError, match="disk filled up") as caught:
            criu.dump(program.pid, small / "image", leave_running=False)
        assert caught.value.target_state == "running"
        program.wait_for_more(program.numbers()[-1] + 20)
    finally:
        assert os.system(f"umount {small}") == 0


def test_a_full_folder_in_memory_is_told_as_such(criu: Criu, start: Start, small_folder: MemoryFolder) -> None:
    program = start("x = bytearray(b'ab' * (60 << 20))\n" + THREADS_AND_CHILD)
    with outgrowing(small_folder, program) as caught:
        criu.dump(program.pid, small_folder.path / "image", leave_running=False)
    assert "disk is used" in caught.value.advice
    shutil.rmtree(small_folder.path / "image")
    with pytest.raises(NoSpaceError, match="another folder"), small_folder.told():
        raise NoSpaceError("another folder is full")


def test_a_restore_is_refused_while_the_original_lives(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start(THREADS_AND_CHILD)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    with pytest.raises(RefusedError, match=rf"needs number {program.pid}, which belongs to"):
        criu.restore(dumped.directory, log_directory=tmp_path / "logs")
    program.wait_for_more(program.numbers()[-1] + 10)


def test_a_restore_whose_data_file_changed_is_refused_with_both_sizes(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start("open('data', 'w').write('x' * 10)\nf = open('data')\n" + COUNTER)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    (program.directory / "data").write_text("x" * 12)
    with pytest.raises(RefusedError, match=r"data had 10 bytes at the checkpoint and has 12 now"):
        criu.restore(dumped.directory, log_directory=tmp_path / "logs")
    (program.directory / "data").unlink()
    with pytest.raises(RefusedError, match=r"data, which the target had open, does not exist here"):
        criu.restore(dumped.directory, log_directory=tmp_path / "logs")


def test_a_file_deleted_while_open_is_part_of_the_image(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(
        "import os\n"
        "f = open('scratch', 'w+b')\n"
        "f.write(b'q' * (3 << 20)); f.flush(); os.unlink('scratch')\n"
        + counting("os.pread(f.fileno(), 1, (3 << 20) - 1) == b'q'")
    )
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    program.kill_all()
    for _ in range(2):
        last = program.numbers()[-1]
        restored = restore(dumped.directory)
        wait_until(lambda last=last: program.numbers()[-1] != last, "more output")  # type: ignore[misc]
        end(restored)


def test_a_deleted_file_with_another_name_can_be_restored_more_than_once(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(
        "import os\n"
        "f = open('one', 'w+b'); f.write(b'q' * 100); f.flush(); os.link('one', 'two'); os.unlink('one')\n"
        + counting("os.pread(f.fileno(), 1, 99) == b'q'")
    )
    with pytest.raises(RefusedError, match="still exists under another name"):
        criu.dump(program.pid, tmp_path / "refused", leave_running=True)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    for _ in range(3):
        lines = len(program.numbers())
        restored = restore(dumped.directory)
        wait_until(lambda lines=lines: len(program.numbers()) > lines, "more output")  # type: ignore[misc]
        end(restored)


def test_a_network_connection_comes_back_closed_and_a_listener_listening(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(
        "import socket, time\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(listener.getsockname())\n"
        "server, _ = listener.accept()\n"
        "server.setblocking(False)\n"
        "print(1, flush=True)\n"
        "while True:\n"
        "    time.sleep(0.005)\n"
        "    try:\n"
        "        data = server.recv(1)\n"
        "    except BlockingIOError:\n"
        "        continue\n"
        "    except OSError:\n"
        "        data = b''\n"
        "    if not data:\n"
        "        break\n"
        "again = socket.create_connection(listener.getsockname())\n"
        "print(2, flush=True)\n"
        "time.sleep(600)\n"
    )
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=True)
    program.kill_all()
    assert program.numbers() == [1]
    restore(dumped.directory)
    wait_until(lambda: program.numbers() == [1, 2], "the program seeing its connection closed and making another")


def test_a_restored_process_is_reaped_and_its_exit_status_kept(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], reaper: Reaper, tmp_path: Path
) -> None:
    program = start(
        "import os, time\nprint(1, flush=True)\nwhile not os.path.exists('go'): time.sleep(0.005)\nos._exit(7)"
    )
    dumped = dump_and_end(criu, program, tmp_path / "image")
    restored = restore(dumped.directory)
    (identity,) = reaper.adopt([restored.pid])
    (program.directory / "go").touch()
    status = reaper.wait(identity, timeout_s=30)
    assert status is not None
    assert (status.exit_code, status.signal) == (7, 0)
    assert not Path(f"/proc/{restored.pid}").exists()


def test_children_that_a_restored_parent_leaves_behind_are_reaped_too(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(THREADS_AND_CHILD)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    for _ in range(3):
        restored = restore(dumped.directory)
        end(restored)  # waits until every number is free again; a zombie would keep one


def test_a_failed_restore_leaves_no_process_and_keeps_the_log(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start(THREADS_AND_CHILD)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    pages = dumped.directory / "pages-2.img"
    pages.unlink()
    with pytest.raises(BadImageError, match="damaged or incomplete") as caught:
        criu.restore(dumped.directory, log_directory=tmp_path / "logs", timeout_s=20)
    assert not any(Path(f"/proc/{task.pid}").exists() for task in dumped.tasks)
    assert (tmp_path / "logs" / "restore.log").stat().st_size > 0
    assert str(tmp_path / "logs" / "restore.log") in caught.value.advice


def test_a_restore_that_hangs_is_ended_and_leaves_no_process(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    dumped = dump_and_end(criu, program, tmp_path / "image")
    pages = dumped.directory / "pages-1.img"
    os.truncate(pages, pages.stat().st_size // 2)  # CRIU waits for the rest for ever
    with pytest.raises(TimeoutExceededError, match="restore did not end within"):
        criu.restore(dumped.directory, timeout_s=3)
    assert not any(Path(f"/proc/{task.pid}").exists() for task in dumped.tasks)


def test_a_target_started_from_a_shell_without_a_session_is_dumped_and_restored(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path
) -> None:
    program = start(session=False)
    program.wait_for_more(10)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=False)
    assert dumped.shell_job
    last = program.numbers()[-1]
    program.process.kill()
    program.process.wait()
    restored = criu.restore(dumped.directory, shell_job=dumped.shell_job)
    reaper.adopt([restored.pid])
    program.wait_for_more(last + 10)
    os.kill(restored.pid, 9)
    wait_until(lambda: not Path(f"/proc/{restored.pid}").exists(), "the end of the restored process")


def test_an_agent_that_sleeps_is_found_and_woken_after_a_restore(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(SLEEPING_AGENT)
    for n in (2, 3):
        agent = discovery.agent_of(program.pid)
        assert agent is not None
        discovery.wake(agent)
        program.wait_for_more(n - 1)
    dumped = dump_and_end(criu, program, tmp_path / "image")
    restore(dumped.directory)
    for n in (4, 5):
        wait_until(lambda: discovery.agent_of(program.pid) is not None, "the agent waiting for its signal again")
        agent = discovery.agent_of(program.pid)
        assert agent is not None
        discovery.wake(agent)
        program.wait_for_more(n - 1)
    assert program.numbers() == [1, 2, 3, 4, 5]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_the_privileges_is_told_which_they_are(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            criu.dump(program.pid, Path(tempfile.mkdtemp()) / "image", leave_running=True)
        except RefusedError as error:
            os.write(write, f"{error.reason} {error.advice}".encode())
        os._exit(0)
    os.close(write)
    with open(read) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    assert "CAP_CHECKPOINT_RESTORE" in said
    assert "suspend and resume work without" in said
    program.wait_for_more(program.numbers()[-1] + 5)


def test_check_finds_nothing_missing_here(criu: Criu) -> None:
    assert criu.check() is None


# The name, the mask and the wait of the interposer's agent thread.
SLEEPING_AGENT = """
import ctypes, signal, threading
wake = signal.SIGRTMAX - 3
def agent():
    ctypes.CDLL(None).prctl(15, b"woodfrog-agent", 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    n = 1
    while True:
        print(n, flush=True)
        signal.sigwait({wake})
        n += 1
threading.Thread(target=agent, daemon=True).start()
threading.Event().wait()
"""
