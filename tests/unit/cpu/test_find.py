"""Which CRIU is used, and what is said when there is none that will do."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from woodfrog.cpu import criu, processes
from woodfrog.cpu.images import Task
from woodfrog.errors import NotFoundError, RefusedError


def program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    path.chmod(0o755)
    return path


def test_an_explicit_program_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = program(tmp_path / "mine", "4.7.1")
    monkeypatch.setenv("WOODFROG_CRIU", str(chosen))
    assert criu.find() == criu.Criu(chosen, (4, 7, 1))


@pytest.mark.parametrize("version", ["3.17.1", "4.0", "nonsense"])
def test_an_explicit_program_that_will_not_do_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("WOODFROG_CRIU", str(program(tmp_path / "old", version)))
    with pytest.raises(NotFoundError, match="old") as caught:
        criu.find()
    assert "get-criu.sh" in caught.value.advice


def test_an_explicit_program_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_CRIU", "/nonexistent/criu")
    with pytest.raises(NotFoundError, match="/nonexistent/criu"):
        criu.find()


def test_a_taken_number_is_refused_with_who_has_it() -> None:
    own = os.getpid()
    with pytest.raises(RefusedError, match=f"number {own}, which belongs to") as caught:
        processes.refuse_taken_numbers([Task(own, 0, own, own, (own,))])
    assert caught.value.details["numbers"] == [own]


def test_a_zombie_that_has_a_number_is_named_with_its_parent() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(RefusedError, match=f"not waited for by its parent \\(process {os.getpid()}\\)"):
            processes.refuse_taken_numbers([Task(pid, 0, pid, pid, (pid,))])
    finally:
        os.waitpid(pid, 0)
    processes.refuse_taken_numbers([Task(pid, 0, pid, pid, (pid,))])


@pytest.mark.parametrize(
    ("version", "release", "limited"),
    [((4, 1, 1), "6.18.44-x", True), ((4, 2, 1), "6.18.44-x", False), ((4, 1), "6.8.0-45-generic", False)],
)
def test_what_this_criu_cannot_do_on_this_kernel_is_said(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], release: str, limited: bool
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert bool(criu.Criu(Path("/criu"), version).limitations()) is limited
