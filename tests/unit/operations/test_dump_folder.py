"""CRIU's folder of a dump: nothing of it is left, but the log of the last one that failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from woodfrog.errors import WoodfrogError
from woodfrog.operations.dump_folder import dump_folder, remove_abandoned
from woodfrog.operations.notes import Notes

NOTES = Notes(operation="checkpoint", operation_id=1, name="t", pid=70, start_ticks=9, root_pid=70, managed=True)


def fail_with_log(folder: Path, text: str) -> None:
    """As Criu.dump does."""
    folder.mkdir()
    log = folder / "dump.log"
    log.write_text(text)
    raise WoodfrogError("no", advice=f"CRIU's log: {log}", details={"log": str(log)})


def test_nothing_is_left_of_a_dump_that_worked(tmp_path: Path) -> None:
    with dump_folder(tmp_path, NOTES) as folder:
        (folder / "criu-x").mkdir(parents=True)
        (folder / "dump.log").write_text("fine")
    assert list(tmp_path.iterdir()) == []


def test_the_log_of_a_dump_that_failed_is_kept_where_the_error_says(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with pytest.raises(WoodfrogError) as raised, dump_folder(tmp_path, NOTES) as folder:
            fail_with_log(folder, text)
        kept = Path(raised.value.details["log"])
        assert kept.read_text() == text
        assert raised.value.advice == f"CRIU's log: {kept}"
        assert list(tmp_path.iterdir()) == [kept]


def test_a_failure_without_a_log_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(WoodfrogError) as raised, dump_folder(tmp_path, NOTES):
        raise WoodfrogError("refused before CRIU was called", advice="a")
    assert (raised.value.advice, raised.value.details) == ("a", {})


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_what_a_killed_daemon_left_is_removed_unless_criu_is_at_work_in_it(tmp_path: Path, operation: str) -> None:
    abandoned, busy = tmp_path / f"{operation}-70-9" / "criu-x", tmp_path / f"{operation}-71-9" / "criu-y"
    for folder in (abandoned, busy):
        folder.mkdir(parents=True)
    # What `still_running` looks for: a program called criu with the folder among its arguments.
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\necho here\nread _\n")
    program.chmod(0o755)
    running = subprocess.Popen([program, "dump", "--work-dir", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == b"here\n"
        remove_abandoned(tmp_path)
        assert not abandoned.parent.exists()
        assert busy.exists()
    finally:
        running.communicate(b"\n", timeout=30)
    remove_abandoned(tmp_path)
    assert not busy.parent.exists()
