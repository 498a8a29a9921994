"""`woodfrog.restore_news` and operations.telling, which know each other by a memfd only, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from woodfrog.errors import WoodfrogError
from woodfrog.operations import telling
from woodfrog.operations.notes import Notes

PROGRAM = """
import os, sys, woodfrog
print(woodfrog.restored(), flush=True)
woodfrog.on_restore(lambda news: print(news.name, news.ports, os.environ.get("COLOUR"), flush=True))
print("ready", flush=True)
sys.stdin.read()
print(woodfrog.restored().environment, flush=True)
"""
SEALED = """
import fcntl, os, sys
file = os.memfd_create("woodfrog-restored", os.MFD_ALLOW_SEALING)
os.write(file, b'{"signal": 9}')
fcntl.fcntl(file, 1033, 2 | 4 | 8)  # F_ADD_SEALS: shrink, grow, write
print("ready", flush=True)
sys.stdin.read()
"""


def notes(pid: int) -> Notes:
    return Notes(
        operation="restore",
        operation_id=1,
        name="frog-2",
        pid=pid,
        start_ticks=0,
        root_pid=pid,
        managed=True,
        tree=[pid],
        image="frog@1",
        ports={8000: 40000},
    )


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_program_that_asks_is_told_each_time() -> None:
    with started(PROGRAM) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(2)] == ["None", "ready"]
        for colour in ("green", "brown"):
            told = telling.tell(notes(process.pid), {"COLOUR": colour})
            assert told == [telling.Told(process.pid, int(signal.SIGRTMAX) - 5)]
            telling.call(told)
            assert process.stdout.readline().strip() == f"frog-2 {{8000: 40000}} {colour}"
        process.stdin.close()
        assert process.stdout.readline().strip() == "{'COLOUR': 'brown'}"
        assert process.wait() == 0


def test_who_does_not_ask_is_not_touched_and_who_takes_no_signal_gets_none() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert telling.tell(notes(process.pid), {}) == []
        telling.call([telling.Told(process.pid, int(signal.SIGTERM)), telling.Told(process.pid, 0)])
        telling.call([telling.Told(process.pid, 1 << 40)])
        assert process.poll() is None
        process.kill()
    telling.call([telling.Told(process.pid, int(signal.SIGTERM))])  # it is gone


def test_a_file_that_cannot_be_written_is_an_error_and_no_signal_of_its_choice_is_sent() -> None:
    with started(SEALED) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        with pytest.raises(WoodfrogError, match="cannot be written"):
            telling.tell(notes(process.pid), {})
        telling.call([telling.Told(process.pid, 9)])
        assert process.poll() is None
        process.kill()


def test_what_the_file_says_is_not_believed() -> None:
    for text in (b"", b"[]", b"\xff" * 100, b'{"signal": "x"}', b'{"signal": []}', b'{"signal": -1}'):
        file = os.memfd_create("woodfrog-restored", os.MFD_CLOEXEC)
        try:
            os.write(file, text)
            (told,) = telling.tell(notes(os.getpid()), {})
            assert told.signal in (0, -1)
            telling.call([told])
        finally:
            os.close(file)
