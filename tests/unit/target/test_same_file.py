"""Copies of a descriptor are one open file; another file opened alike is not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from woodfrog.target import same_file


@pytest.fixture
def files(tmp_path: Path) -> list[int]:
    """Twelve descriptors of one path: each fourth one is a copy of the one before."""
    path = tmp_path / "file"
    path.touch()
    opened: list[int] = []
    for number in range(12):
        opened.append(os.dup(opened[-1]) if number % 4 == 3 else os.open(path, os.O_RDONLY))
    return opened


def test_copies_are_found_among_files_that_look_alike(files: list[int]) -> None:
    shuffled = list(files)
    random.Random(5).shuffle(shuffled)
    groups = same_file.groups(shuffled)
    assert sorted(position for group in groups for position in group) == list(range(12))
    copies = {frozenset(shuffled[position] for position in group) for group in groups if len(group) > 1}
    assert copies == {frozenset((files[number - 1], files[number])) for number in (3, 7, 11)}


def test_another_process_that_holds_one_is_found(files: list[int]) -> None:
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[files[5]]
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        distinct = [files[group[0]] for group in same_file.groups(files)]
        [holder] = same_file.holders(distinct, [child.pid])
        assert (holder.ours, holder.pid, holder.descriptor) == (files[5], child.pid, files[5])
        assert list(same_file.holders([files[0]], [child.pid])) == []


def test_a_process_that_has_ended_holds_nothing(files: list[int]) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert list(same_file.holders(files[:1], [done.pid])) == []
