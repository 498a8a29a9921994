"""A folder in memory that is mounted nowhere: others use it by its owner's number, and it is gone with its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from woodfrog.operations import memory_folder, room
from woodfrog.operations.memory_folder import MemoryFolder

MIB = 1 << 20


@pytest.fixture
def folder() -> MemoryFolder:
    made = MemoryFolder.make(MIB)
    assert made is not None, "the tests run as root"
    return made


def test_another_process_reads_and_writes_there_and_no_mount_is_seen(folder: MemoryFolder) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    subprocess.run(["sh", "-c", f"echo here > {folder.path}/a; mkdir {folder.path}/cpu"], check=True)
    assert (folder.path / "a").read_text() == "here\n"
    assert sorted(one.name for one in folder.path.iterdir()) == ["a", "cpu"]
    assert Path("/proc/self/mountinfo").read_text() == before
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert not folder.path.exists()
    folder.close()


def test_it_takes_no_more_than_half_of_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "host_available_bytes", lambda: 2048 * MIB)
    for wanted, limit in ((MIB, 1024), (800 * MIB, 1024)):
        made = MemoryFolder.make(wanted)
        assert made is not None
        status = os.statvfs(made.path)
        assert status.f_blocks * status.f_frsize == limit * MIB
        made.close()
    assert MemoryFolder.make(1000 * MIB) is None


def test_there_is_none_without_memory_or_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    look = "from woodfrog.operations.memory_folder import MemoryFolder; print(MemoryFolder.make(4096))"
    # Imported before the privileges go: the nobody may not be able to read the checkout.
    code = f"import os, woodfrog.operations.memory_folder; os.setgid(65534); os.setuid(65534); {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    monkeypatch.setattr(room, "host_available_bytes", lambda: MIB)
    assert memory_folder.MemoryFolder.make(MIB) is None
