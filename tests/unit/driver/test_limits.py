"""Affinity, quotas and numbers of threads that limit how many help a driver."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from woodfrog.driver.entering import DEFAULT_COPY_THREADS, Helpers, wanted_copy_threads
from woodfrog.driver.limits import ThreadsLeft, processors_of, threads_left

ALL = float(len(os.sched_getaffinity(0)))


def machine(tmp_path: Path, groups: str, files: dict[str, str]) -> dict[str, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / str(os.getpid())).mkdir(parents=True)
    (proc / str(os.getpid()) / "cgroup").write_text(groups)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return {"proc": proc, "cgroups": cgroups}


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/pod/one\n", {}, ALL),
        ("0::/pod/one\n", {"pod/one/cpu.max": "max 100000\n"}, ALL),
        ("0::/pod/one\n", {"pod/one/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/one\n", {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "25000 50000\n"}, 0.5),
        ("0::/pod/one\n", {"pod/one/cpu.max": "70000 100000\n", "cpu.max": "60000 100000\n"}, 0.6),
        ("0::/\n", {"cpu.max": "40000 100000\n"}, 0.4),
        ("0::/pod/one\n", {"pod/one/cpu.max": "nothing\n"}, ALL),
        (
            "5:cpu,cpuacct:/pod\n1:memory:/else\n",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "30000\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"},
            0.3,
        ),
        (
            "5:cpu,cpuacct:/pod\n",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"},
            ALL,
        ),
        ("9:memory:/pod\n", {"memory/pod/cpu.max": "10000 100000\n"}, ALL),
    ],
)
def test_quotas_limit_what_the_affinity_allows(
    tmp_path: Path, groups: str, files: dict[str, str], limit: float
) -> None:
    assert processors_of(os.getpid(), **machine(tmp_path, groups, files)) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, math.inf),
        ({"pod/one/pids.max": "max\n", "pod/one/pids.current": "50\n"}, math.inf),
        ({"pod/one/pids.max": "100\n", "pod/one/pids.current": "30\n"}, 70),
        ({"pod/one/pids.max": "max\n", "pod/pids.max": "100\n", "pod/pids.current": "99\n"}, 1),
        ({"pod/one/pids.max": "100\n"}, math.inf),
    ],
)
def test_control_groups_limit_threads(tmp_path: Path, files: dict[str, str], left: float) -> None:
    found = threads_left(os.getpid(), **machine(tmp_path, "0::/pod/one\n", files))
    assert found == ThreadsLeft(left, "its control group's pids.max" if left != math.inf else "")


STATUS = "Name:\tone\nUid:\t{user}\t0\t0\t0\nThreads:\t{threads}\n"
LIMITS = "Limit             Soft Limit  Hard Limit  Units     \nMax processes     {}  9  processes \n"


@pytest.mark.parametrize(
    ("user", "limit", "everybody", "left"),
    [
        (1000, "100", "0.0 0.0 0.0 1/9000 5\n", 100 - 7 - 20),
        (1000, "10", "0.0 0.0 0.0 1/9000 5\n", 10 - 7 - 20),
        (1000, "10000", "0.0 0.0 0.0 1/9000 5\n", 1000),  # nobody is counted
        (1000, "9999", "0.0 0.0 0.0 1/9000 5\n", 9999 - 7 - 20),
        (1000, "100", "strange\n", 100 - 7 - 20),
        (1000, "100", "", 100 - 7 - 20),
        (1000, "unlimited", "0.0 0.0 0.0 1/9000 5\n", math.inf),
        (0, "100", "0.0 0.0 0.0 1/9000 5\n", math.inf),
    ],
)
def test_a_users_limit_counts_all_of_the_users_threads(
    tmp_path: Path, user: int, limit: str, everybody: str, left: float
) -> None:
    folders = machine(tmp_path, "0::/\n", {})
    proc = folders["proc"]
    (proc / "loadavg").write_text(everybody)
    for pid, one, threads in ((os.getpid(), user, 7), (77, user, 20), (78, user + 1, 500)):
        (proc / str(pid)).mkdir(exist_ok=True)
        (proc / str(pid) / "status").write_text(STATUS.format(user=one, threads=threads))
    (proc / "99").mkdir()  # it has ended meanwhile
    (proc / str(os.getpid()) / "limits").write_text(LIMITS.format(limit))
    assert threads_left(os.getpid(), **folders) == ThreadsLeft(left, "RLIMIT_NPROC" if left != math.inf else "")


@pytest.mark.parametrize(("left", "threads"), [(math.inf, 4), (68, 4), (67, 3), (65, 1), (64, 0), (0, 0), (-5, 0)])
def test_a_process_that_may_have_few_more_threads_gets_few_or_none(
    monkeypatch: pytest.MonkeyPatch, left: float, threads: int
) -> None:
    monkeypatch.delenv("WOODFROG_ENTER_COPIES", raising=False)
    monkeypatch.setattr("woodfrog.driver.entering.processors_of", lambda tid: 16.0)
    monkeypatch.setattr("woodfrog.driver.entering.threads_left", lambda tid: ThreadsLeft(left, "that limit"))
    wanted = wanted_copy_threads([os.getpid()])
    assert wanted.count == threads
    assert ("that limit" in wanted.reason) == (threads < 4)


def test_a_thread_that_is_not_there_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert processors_of(process.pid) == 0.0


@pytest.mark.parametrize(
    ("setting", "processors", "threads"),
    [
        (None, 1.0, 0), (None, 2.0, 1), (None, 3.0, 1), (None, 0.5, 0), (None, 7.9, 3), (None, 128.0, 4),
        ("", 128.0, 4), ("0", 128.0, 0), ("6", 1.0, 6), ("-3", 128.0, 0), ("99", 128.0, 16), ("many", 128.0, 0),
    ],
)  # fmt: skip
def test_at_most_half_of_the_processors_help_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, processors: float, threads: int
) -> None:
    monkeypatch.delenv("WOODFROG_ENTER_COPIES", raising=False)
    if setting is not None:
        monkeypatch.setenv("WOODFROG_ENTER_COPIES", setting)
    monkeypatch.setattr("woodfrog.driver.entering.processors_of", lambda tid: processors)
    monkeypatch.setattr("woodfrog.driver.entering.threads_left", lambda tid: ThreadsLeft(math.inf))
    assert DEFAULT_COPY_THREADS == 4
    assert wanted_copy_threads([os.getpid()]) == Helpers(threads)


def test_processes_that_are_entered_at_once_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WOODFROG_ENTER_COPIES", raising=False)
    monkeypatch.setattr("woodfrog.driver.entering.processors_of", lambda tid: 16.0)
    monkeypatch.setattr("woodfrog.driver.entering.threads_left", lambda tid: ThreadsLeft(math.inf))
    assert [wanted_copy_threads([os.getpid()], beside).count for beside in (1, 2, 3, 8, 9)] == [4, 4, 2, 1, 0]


def test_where_the_driver_names_no_thread_nobody_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_ENTER_COPIES", "4")
    assert wanted_copy_threads([]) == Helpers(0)
