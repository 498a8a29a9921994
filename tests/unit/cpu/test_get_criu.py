"""scripts/get-criu.sh: does nothing where nothing is needed, and says what to do where nothing can be done."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from woodfrog.cpu.criu import version_of

SCRIPT = Path(__file__).parents[3] / "scripts" / "get-criu.sh"
TOOLS = """
bash sh env dirname readlink mktemp mkdir mv rm cat chmod id flock sort head tail sed awk grep uname find cp printf
basename
"""


def fake_criu(path: Path, version: str, check: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Version: {version}" && exit\necho "Looks good."\nexit {check}\n'
    )
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the ordinary tools, but without apt and without criu."""
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    for tool in TOOLS.split():
        if found := shutil.which(tool):
            (bin_directory / tool).symlink_to(found)
    return {"PATH": str(bin_directory), "HOME": str(tmp_path)}


def get_criu(prefix: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(prefix)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_new_enough_criu_of_the_system_is_used_as_it_is(tmp_path: Path, machine: dict[str, str]) -> None:
    fake_criu(tmp_path / "bin" / "criu", "4.2")
    prefix = tmp_path / "prefix"
    for _ in range(2):  # the second time finds the work done
        finished = get_criu(prefix, machine)
        assert finished.returncode == 0, finished.stderr
        assert "Looks good" in finished.stderr or os.geteuid() != 0
    assert version_of(prefix / "bin" / "criu") == (4, 2)
    assert sorted(path.name for path in tmp_path.glob("prefix*")) == ["prefix", "prefix.lock"]


def test_without_apt_an_older_criu_that_will_do_is_used_with_a_note(tmp_path: Path, machine: dict[str, str]) -> None:
    fake_criu(tmp_path / "bin" / "criu", "4.1.1")
    finished = get_criu(tmp_path / "prefix", machine)
    assert finished.returncode == 0, finished.stderr
    assert "network sockets" in finished.stderr
    assert version_of(tmp_path / "prefix" / "bin" / "criu") == (4, 1, 1)


def test_where_none_can_be_had_it_says_what_to_do_and_leaves_nothing(tmp_path: Path, machine: dict[str, str]) -> None:
    fake_criu(tmp_path / "bin" / "criu", "3.17.1")
    finished = get_criu(tmp_path / "prefix", machine)
    assert finished.returncode != 0
    assert "without apt-get this script cannot fetch one" in finished.stderr
    assert "WOODFROG_CRIU" in finished.stderr
    assert not (tmp_path / "prefix").exists()
    assert not list(tmp_path.glob("prefix.new.*"))


def test_a_kernel_that_lacks_something_fails_with_criu_s_own_words(tmp_path: Path, machine: dict[str, str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("the check itself is only run as root")
    fake_criu(tmp_path / "bin" / "criu", "4.2", check=1)
    finished = get_criu(tmp_path / "prefix", machine)
    assert finished.returncode != 0
    assert "'criu check' says that this kernel" in finished.stderr
