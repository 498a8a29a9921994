"""A restore that begins before its files of pages are whole: CRIU makes nothing, and reads none of them, before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from woodfrog.cpu import images
from woodfrog.cpu.criu import Criu
from woodfrog.cpu.gate import Gate
from woodfrog.errors import WoodfrogError
from woodfrog.target.reaper import Reaper

from .programs import COUNTER, Program, Start, assert_gapless, dump_and_end, end, wait_until

# Memory of every kind that CRIU keeps in files of pages: the process's own, shared without a name, of a memfd.
SHARED = """
import mmap, os, time
size = 4 << 20
memory = os.memfd_create("held")
os.truncate(memory, size)
maps = [mmap.mmap(-1, size), mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(memory, size)]
pattern = os.urandom(4096)
for one in maps:
    one[:] = pattern * (size // 4096)
n = 0
while True:
    assert all(one[:] == pattern * (size // 4096) for one in maps)
    n += 1
    print(n, flush=True)
    time.sleep(0.01)
"""


def dump_without_pages(criu: Criu, program: Program, directory: Path) -> Path:
    """The image in `directory`, its program ended and its files of pages empty; the folder that has them instead."""
    dumped = dump_and_end(criu, program, directory)
    aside = directory.with_name("aside")
    aside.mkdir()
    for path in list(dumped.directory.iterdir()):
        if images.is_pages(path.name):
            shutil.copyfile(path, aside / path.name)
            os.truncate(path, 0)
    assert sum(path.stat().st_size for path in aside.iterdir()) > 0
    return aside


def gates(image: Path) -> list[int]:
    """Processes that wait at the gate of a restore of that image; other tests have gates of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text() != "woodfrog-gate\n":
                    continue
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if os.fsencode(image) in Path("/proc", parent, "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.mark.parametrize("code", [COUNTER, SHARED], ids=["counter", "kinds of memory"])
def test_pages_that_come_while_criu_waits_are_what_is_restored(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path, code: str
) -> None:
    program = start(code)
    program.wait_for_more(5)
    aside = dump_without_pages(criu, program, tmp_path / "image")
    gate = Gate()
    before = []

    def fill() -> None:
        wait_until(lambda: bool(gates(tmp_path / "image")), "CRIU at its gate")
        before.extend(path for path in Path("/proc").iterdir() if path.name == str(program.pid))
        for path in aside.iterdir():
            with (tmp_path / "image" / path.name).open("r+b") as file:
                file.write(path.read_bytes())
        gate.open()

    filling = threading.Thread(target=fill)
    filling.start()
    restored = criu.restore(tmp_path / "image", log_directory=tmp_path / "logs", timeout_s=60, gate=gate)
    filling.join()
    gate.close()
    reaper.adopt([task.pid for task in restored.tasks])
    assert before == [], "nothing of the tree was there before the gate opened"
    assert 0 < restored.waited_s < restored.elapsed_s
    program.wait_for_more(program.numbers()[-1] + 20)
    assert_gapless(program)
    end(restored)


def test_a_gate_that_is_shut_ends_criu_with_nothing_restored(criu: Criu, start: Start, tmp_path: Path) -> None:
    program = start()
    program.wait_for_more(20)
    dump_without_pages(criu, program, tmp_path / "image")
    gate = Gate()
    gate.shut()
    with pytest.raises(WoodfrogError):
        criu.restore(tmp_path / "image", log_directory=tmp_path / "logs", timeout_s=60, gate=gate)
    gate.close()
    assert not Path(f"/proc/{program.pid}").exists()
    assert gates(tmp_path / "image") == []


RESTORES = """
import sys
from pathlib import Path
from woodfrog.cpu.criu import find
from woodfrog.cpu.gate import Gate
find().restore(Path(sys.argv[1]), log_directory=Path(sys.argv[2]), timeout_s=600, gate=Gate())
"""


def test_criu_ends_with_nothing_restored_when_who_fills_the_pages_is_killed(
    criu: Criu, start: Start, tmp_path: Path
) -> None:
    program = start()
    program.wait_for_more(20)
    dump_without_pages(criu, program, tmp_path / "image")
    filler = subprocess.Popen([sys.executable, "-c", RESTORES, str(tmp_path / "image"), str(tmp_path / "logs")])
    wait_until(lambda: bool(gates(tmp_path / "image")), "CRIU at its gate")
    filler.send_signal(signal.SIGKILL)
    filler.wait()
    wait_until(lambda: not gates(tmp_path / "image"), "the end of what waited at the gate")
    log = next((tmp_path / "logs").glob("*/restore.log"))
    wait_until(lambda: "Aborting restore due to pre-restore script" in log.read_text(), "CRIU's giving up")
    assert not Path(f"/proc/{program.pid}").exists()
