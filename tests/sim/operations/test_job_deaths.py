"""Processes of a job that die at a bad moment: the others run on, or the whole job comes back from an image."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from product import Product
from sharer import check, fill, kill

from woodfrog.errors import TargetLostError, TargetState, WoodfrogError


@contextmanager
def held(folder: Path, point: str, work: Callable[[], Any]) -> Iterator[list[WoodfrogError]]:
    """`work` on a thread; the block runs while the daemon waits at `point`. What it failed with is there afterwards."""
    failures: list[WoodfrogError] = []

    def run() -> None:
        try:
            work()
        except WoodfrogError as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    with (folder / point).open("w"):  # opens once the daemon waits there
        yield failures
    thread.join()


def holding(make_product: Callable[..., Product], folder: Path, point: str) -> Product:
    os.mkfifo(folder / point)
    return make_product(environment={"WOODFROG_FAULTS": f"{point}:hold", "WOODFROG_FAULTS_STATE": str(folder)})


@pytest.mark.parametrize("stop", [False, True], ids=["leave-running", "stop"])
@pytest.mark.parametrize("phase", ["quiesce.after", "handover.after", "control.before", "control.after", "cpu.before"])
def test_a_process_killed_in_the_middle_leaves_the_others_running(
    make_product: Callable[..., Product], tmp_path: Path, phase: str, stop: bool
) -> None:
    point = f"checkpoint.{phase}"
    product = holding(make_product, tmp_path, point)
    job = product.sharer(2)
    fill(job)
    with held(tmp_path, point, lambda: product.checkpoint(job.process, stop=stop)) as failures:
        kill(job.pids[1])
    (failure,) = failures
    assert failure.pid == job.pids[1]
    assert isinstance(failure, TargetLostError)
    assert failure.target_state == TargetState.RUNNING
    check(job, 0)


def test_the_whole_job_comes_back_from_its_image_after_one_was_killed(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    point = "checkpoint.control.after"
    product = holding(make_product, tmp_path, point)
    job = product.sharer(2)
    fill(job)
    job.share("common", 0, 1)
    job.require_shared("common", 0, 1, value=5)
    (tmp_path / point).rename(tmp_path / "aside")  # where there is no pipe, nobody waits
    image = product.checkpoint(job.process)["image"]
    (tmp_path / "aside").rename(tmp_path / point)
    with held(tmp_path, point, lambda: product.checkpoint(job.process)) as failures:
        kill(job.pids[1])
    assert failures[0].target_state == TargetState.RUNNING
    kill(job.pids[0])
    assert job.process.process is not None
    job.process.process.kill()
    job.process.process.wait()
    job.process = product.restore(image, job.process.log, verify=True)
    check(job)
    for worker in (0, 1):
        assert job.order(worker, "check", "common", 6) == "ok"
    job.require_shared("common", 1, 0, value=70)


@pytest.mark.parametrize("killed_daemon", [False, True], ids=["same-daemon", "new-daemon"])
@pytest.mark.parametrize("level", ["cold", "warm"])
def test_a_process_that_dies_while_its_job_is_suspended_is_left_out(
    product: Product, level: str, killed_daemon: bool
) -> None:
    job = product.sharer(3)
    fill(job)
    job.share("common", 1, 0, 2)
    job.require_shared("common", 0, 2, value=40)
    product.call("suspend", target=job.process.pid, level=level)
    kill(job.pids[1])  # it made what the others share
    if killed_daemon:
        product.kill_daemon()
    (row,) = product.call("ps")
    assert row["state"] == TargetState.SUSPENDED
    result = product.call("resume", target=job.process.pid)
    assert result["gpu_pids"] == [job.pids[0], job.pids[2]]
    check(job, 0, 2)
    job.require_shared("common", 2, 0, value=50)


def test_a_suspended_job_whose_processes_all_die_leaves_nothing(product: Product) -> None:
    job = product.sharer(2)
    fill(job)
    free_bytes = product.call("arena")["free_bytes"]
    product.call("suspend", target=job.process.pid)
    assert product.call("arena")["free_bytes"] < free_bytes
    for pid in job.pids:
        kill(pid)
    with pytest.raises(WoodfrogError):
        product.call("resume", target=job.pids[0])
    assert product.call("ps") == []
    assert product.call("arena")["free_bytes"] == free_bytes


def test_a_process_that_dies_while_its_job_migrates_leaves_the_others_running(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    point = "migrate.restore.after"
    os.mkfifo(tmp_path / point)
    faults = {"WOODFROG_FAULTS": f"{point}:hold", "WOODFROG_FAULTS_STATE": str(tmp_path)}
    product = make_product(environment={**faults, "WOODFROG_SIMGPU_DEVICES": "2"})
    job = product.sharer(2)
    fill(job)
    migrate = {"target": job.process.pid, "gpu_map": {"0": "1"}}
    with held(tmp_path, point, lambda: product.call("migrate", **migrate)):
        kill(job.pids[1])
    check(job, 0)
