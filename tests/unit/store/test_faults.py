"""Fault points: they do what the environment says, once, and nothing when it says nothing."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from woodfrog import faults
from woodfrog.errors import TimeoutExceededError, UsageError
from woodfrog.faults import InjectedFaultError, fault_point


def test_without_the_environment_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WOODFROG_FAULTS", raising=False)
    fault_point("a.b")


def test_each_action_does_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_FAULTS", "t.error:error, t.full:enospc,t.late:timeout")
    with pytest.raises(InjectedFaultError, match=r"t[.]error"):
        fault_point("t.error")
    with pytest.raises(OSError, match="injected") as raised:
        fault_point("t.full")
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(TimeoutExceededError):
        fault_point("t.late")
    fault_point("t.other")


def test_only_the_nth_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_FAULTS", "n.th:error:3")
    fault_point("n.th")
    fault_point("n.th")
    with pytest.raises(InjectedFaultError):
        fault_point("n.th")
    fault_point("n.th")


def test_a_hang_ends_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_FAULTS", "h.ang:hang")
    cancel = threading.Event()
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            fault_point("h.ang", cancel)
        except TimeoutExceededError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    cancel.set()
    thread.join(30)
    assert len(ended) == 1


def test_a_fault_that_fired_is_remembered_across_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WOODFROG_FAULTS_STATE", str(tmp_path))
    monkeypatch.setenv("WOODFROG_FAULTS", "o.nce:error")
    with pytest.raises(InjectedFaultError):
        fault_point("o.nce")
    # What a new process knows: the same environment, no memory.
    monkeypatch.setattr(faults, "_parsed", ("", {}))
    monkeypatch.setattr(faults, "_passes", {})
    fault_point("o.nce")


def test_the_trace_names_each_point_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WOODFROG_FAULTS_TRACE", str(tmp_path / "trace"))
    for name in ("one", "two", "one"):
        fault_point(name)
    assert (tmp_path / "trace").read_text().split() == ["one", "two", "one"]


@pytest.mark.parametrize("text", ["a", "a:explode", ":kill", "a:kill:0", "a:kill:x", "a:kill:1:2"])
def test_a_misspelt_fault_is_refused_instead_of_ignored(text: str) -> None:
    with pytest.raises(UsageError, match="WOODFROG_FAULTS"):
        faults.parse(text)
