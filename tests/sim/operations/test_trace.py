"""`woodfrog trace` on the simulated GPU: a whole cycle, from outside, of processes that woodfrog did not start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from product import Product, Stepper

from woodfrog._native import paths

MIB = 1 << 20
CONTROL_BYTES = 40 * MIB
X86 = platform.machine() == "x86_64"


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(
        environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(CONTROL_BYTES), "WOODFROG_SIMGPU_ONE_MAPPING": "1"}
    )


def start_trace(product: Product, *arguments: object, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "woodfrog", "trace", "--json", *map(str, arguments)]
    env = {**os.environ, **product.environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(trace: subprocess.Popen[str], status: int = 0) -> dict[str, Any]:
    out, err = trace.communicate(timeout=120)
    assert trace.returncode == status, out + err
    found: dict[str, Any] = json.loads(out)
    return found


def wait_until_it_follows(trace: subprocess.Popen[str]) -> None:
    assert trace.stderr is not None
    line = trace.stderr.readline()
    assert "following what others do" in line, line


def wait_until_in_the_driver(pid: int) -> None:
    """Until a thread of the driver's that serves a request of somebody is traced."""
    deadline = time.monotonic() + 60
    while not any("simgpu-request" in status and "TracerPid:\t0\n" not in status for status in statuses(pid)):
        assert time.monotonic() < deadline, "it was not asked for anything"
        os.sched_yield()


def statuses(pid: int) -> list[str]:
    """Of the threads that are there."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended since
            found.append(path.read_text())
    return found


def check_whole(found: dict[str, Any]) -> None:
    """All four steps, the saved state and what is in it, the driver's files, its system calls."""
    assert [(step["name"], step["state"], step["error"]) for step in found["steps"]] == [
        ("lock", "locked", ""),
        ("checkpoint", "checkpointed", ""),
        ("restore", "locked", ""),
        ("unlock", "running", ""),
    ]
    saved = found["saved"]
    assert saved["size_bytes"] >= CONTROL_BYTES
    assert saved["filled_bytes_per_s"] > 0
    assert abs(sum(saved["contents"].values()) - 1) < 1e-6
    before, _, checkpointed, restored, _ = [
        sum(file["descriptors"] for file in holding["files"]) for holding in found["holdings"]
    ]
    assert before > 0
    assert checkpointed == 0
    assert restored > 0
    assert max(sample["anonymous_bytes"] for sample in found["samples"]) >= CONTROL_BYTES
    assert any("NVML" in sentence for sentence in found["unseen"])


def calls_of(found: dict[str, Any], step: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in found["calls"][step]}


@pytest.mark.parametrize("version", ["13000", "13040"])
def test_a_whole_cycle_of_a_process_that_runs(
    make_product: Callable[..., Product], tmp_path: Path, version: str
) -> None:
    """Both generations of the driver: the trace goes its own way, whether it could lend the memory or not."""
    product = make_product(
        environment={
            "WOODFROG_SIMGPU_CONTROL_STATE": str(CONTROL_BYTES),
            "WOODFROG_SIMGPU_ONE_MAPPING": "1",
            "WOODFROG_SIMGPU_DRIVER_VERSION": version,
        }
    )
    target = product.run("--idle-kib", "20000", managed=False)
    found = finished(start_trace(product, target.pid, "--html", tmp_path / "page.html"))
    check_whole(found)
    assert calls_of(found, "checkpoint")["mmap populated"]["count"] == 1
    assert "munmap" in calls_of(found, "restore")
    assert found["saved"]["copied_bytes_per_s"] > found["saved"]["filled_bytes_per_s"]
    assert 0 < found["stopped_s"] < 5
    assert "<svg" in (tmp_path / "page.html").read_text()
    target.check_runs_right()


def test_the_driver_is_helped_if_that_is_asked_for(product: Product) -> None:
    target = product.run("--idle-kib", "40000", managed=False)
    found = finished(start_trace(product, target.pid, "--help-driver"))
    check_whole(found)
    if X86 and "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert found["saved"]["huge_bytes"] >= CONTROL_BYTES
    target.check_runs_right()


@pytest.mark.skipif(not X86, reason="woodfrog-enter enters x86-64 processes only")
def test_its_copies_are_helped_with_if_that_is_set(product: Product) -> None:
    product.environment["WOODFROG_ENTER_COPIES"] = "2"
    target = product.run("--idle-kib", "3000", managed=False)
    assert finished(start_trace(product, target.pid))["copies"] == []
    found = finished(start_trace(product, target.pid, "--help-driver"))
    check_whole(found)
    (copies,) = found["copies"]
    assert copies["reason"] == ""
    assert copies["copied_bytes"] == 2 * CONTROL_BYTES or copies["slow_copies"] >= 4
    target.check_runs_right()


def test_without_system_calls_nothing_is_stopped_and_that_is_said(product: Product) -> None:
    target = product.run("--idle-kib", "3000", managed=False)
    found = finished(start_trace(product, target.pid, "--no-calls"))
    check_whole(found)
    assert found["stops"] == 0
    assert any("--no-calls" in sentence for sentence in found["unseen"])
    target.check_runs_right()


def test_a_program_is_started_for_it_and_ended(product: Product) -> None:
    program = [product.build / "stepper", "--ptx", product.build / "stepper.ptx", "--idle-kib", "3000"]
    found = finished(start_trace(product, "--after", "0.1s", "--", *program))
    check_whole(found)
    assert found["started_by_us"]
    assert not Path(f"/proc/{found['pid']}").exists()


def test_a_process_in_a_container_of_its_own(product: Product) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root for a PID namespace")
    log = product.root / "inside.log"
    command = ["unshare", "--pid", "--fork", "--kill-child", str(product.build / "stepper"), "--ptx"]
    with log.open("wb") as output:
        outer = subprocess.Popen(
            [*command, str(product.build / "stepper.ptx"), "--idle-kib", "3000"],
            env={**os.environ, **product.environment}, stdin=subprocess.DEVNULL, stdout=output,
        )  # fmt: skip
    try:
        target = Stepper(outer.pid, log)
        target.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        (pid,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        found = finished(start_trace(product, pid))
        check_whole(found)
        assert "mmap populated" in calls_of(found, "checkpoint")
        target.wait_steps(2)
    finally:
        outer.kill()
        outer.wait(30)


def test_a_process_that_dies_in_the_middle(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_LATENCY_MS": "checkpoint:5000"})
    target = product.run(managed=False)
    trace = start_trace(product, target.pid)
    wait_until_in_the_driver(target.pid)
    os.kill(target.pid, signal.SIGKILL)
    assert target.process is not None
    target.process.wait(30)
    found = finished(trace, status=1)
    last = found["steps"][-1]
    assert last["state"] == "gone"
    assert last["error"]


def test_a_user_who_may_not_look_is_told_so(product: Product) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, which may look at everybody, to give that up")
    target = product.run(managed=False)
    error = finished(start_trace(product, target.pid, before=["setpriv", "--bounding-set=-sys_ptrace"]), status=4)
    assert "may not" in error["reason"]
    assert "owner" in error["advice"]
    target.check_runs_right()


def test_somebody_else_s_tracer_is_no_obstacle_and_is_said(product: Product) -> None:
    """The kernel lets nobody trace twice, a debugger's process included."""
    target = product.run("--idle-kib", "20000", managed=False)
    other = subprocess.Popen(
        [str(paths.enter()), str(target.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert json.loads(other.stdout.readline())["event"] == "attached"
        found = finished(start_trace(product, target.pid))
        check_whole(found)
        assert not any(found["calls"].values())
        assert any("system calls" in sentence for sentence in found["unseen"])
    finally:
        other.stdin.close()
        other.wait(30)
        other.stdout.close()
    target.check_runs_right()


def test_a_step_that_fails_is_told_and_the_process_runs_on(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_FAIL": "checkpoint:2:1"})
    target = product.run(managed=False)
    found = finished(start_trace(product, target.pid), status=1)
    assert [(step["name"], bool(step["error"])) for step in found["steps"]] == [
        ("lock", False),
        ("checkpoint", True),
        ("unlock (bringing it back)", False),
    ]
    target.check_runs_right()


def test_the_state_that_the_daemon_has_saved_is_found(make_product: Callable[..., Product]) -> None:
    """In a file of the daemon's, or in the process's own memory where /dev/shm has no place for one."""
    product = make_product(
        environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(CONTROL_BYTES), "WOODFROG_SIMGPU_LATENCY_MS": "restore:3000"}
    )
    target = product.run("--idle-kib", "3000")
    product.checkpoint(target, cpu=False)  # from then on it is known how large it is
    trace = start_trace(product, target.pid, "--watch", "60s", "--no-calls")
    wait_until_it_follows(trace)
    product.checkpoint(target)
    found = finished(trace)
    assert "checkpointed" in [step["name"] for step in found["steps"]]
    assert found["saved"], found["unseen"]
    assert found["saved"]["size_bytes"] >= CONTROL_BYTES
    target.check_runs_right()


def test_following_what_the_daemon_does(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    trace = start_trace(product, target.pid, "--watch", "60s")
    wait_until_it_follows(trace)
    product.call("suspend", target=target.pid)
    time.sleep(0.3)  # of the state that is to be seen; it is looked at every 50 ms
    product.call("resume", target=target.pid)
    found = finished(trace)
    assert "checkpointed" in [step["name"] for step in found["steps"]]
    assert found["steps"][-1]["state"] == "running"
    target.check_runs_right()


def test_following_from_a_checkpointed_state_on_says_what_cannot_be_told(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(CONTROL_BYTES)})
    target = product.run("--idle-kib", "3000")
    product.call("suspend", target=target.pid)  # the first, whose size nobody knew: in memory of the process's own
    trace = start_trace(product, target.pid, "--watch", "60s", "--no-calls")
    wait_until_it_follows(trace)
    product.call("resume", target=target.pid)
    found = finished(trace)
    assert found["steps"][-1]["state"] == "running"
    assert found["saved"] is None
    assert any("could not be looked at before" in sentence for sentence in found["unseen"])
    target.check_runs_right()


def test_a_target_of_ours_is_not_taken_from_the_daemon(product: Product) -> None:
    target = product.run()
    error = finished(start_trace(product, target.pid), status=4)
    assert "woodfrog run" in error["reason"]
    target.check_runs_right()


def test_ctrl_c_brings_it_back(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_LATENCY_MS": "checkpoint:4000"})
    target = product.run(managed=False)
    trace = start_trace(product, target.pid)
    wait_until_in_the_driver(target.pid)
    trace.send_signal(signal.SIGINT)
    trace.communicate(timeout=60)
    assert trace.returncode == 130
    target.check_runs_right()
