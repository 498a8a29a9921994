"""Targets in which several processes use the GPU: each operation takes all of them, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product
from sharer import Sharer, check, fill

from woodfrog.errors import TargetState, WoodfrogError
from woodfrog.image.repository import ImageRepository


def restored(product: Product, job: Sharer, image: str) -> Sharer:
    process = product.restore(image, job.process.log)
    job.process = process
    assert [int(job.order(worker, "pid")) for worker in range(len(job.pids))] == job.pids
    return job


def test_ps_shows_one_job_with_its_processes(product: Product) -> None:
    job = product.sharer(2)
    fill(job)
    product.call("suspend", target=job.process.pid)
    product.call("resume", target=job.process.pid)  # both agents are connected now: `ps` waits for none
    (row,) = product.call("ps")
    assert row["root_pid"] == job.process.pid
    assert [one["pid"] for one in row["gpu_processes"]] == job.pids
    assert row["gpu_pids"] == job.pids
    assert row["devices"] == [0]
    assert all(len(one["gpus"]) == 1 for one in row["gpu_processes"])
    assert row["gpu_bytes"] >= 8 << 20
    job.end()


@pytest.mark.parametrize("concurrent", ["auto", "stop"])
def test_a_job_runs_on_after_a_checkpoint_and_comes_back_from_its_image(product: Product, concurrent: str) -> None:
    job = product.sharer(3)
    fill(job)
    job.share("common", 0, 1, 2)
    job.require_shared("common", 0, 1, 2, value=100)
    # One process of the job stands for all of it.
    result = product.call("checkpoint", target=job.pids[1], store=str(product.store_path), concurrent=concurrent)
    assert result["gpu_pids"] == job.pids
    check(job)
    job.require_shared("common", 0, 1, 2, value=200)
    with ImageRepository(product.store_path) as store, store.open(result["image"]) as image:
        manifest = image.manifest
        assert [one.pid for one in manifest.gpu_processes] == job.pids
        assert len(manifest.handles) == 4  # three of their own, and one that all share
        assert len(manifest.shared) == 2
    second = product.checkpoint(job.process, stop=True)
    assert second["parent"] == result["image"]
    again = restored(product, job, second["image"])
    check(again)
    for worker in range(3):
        assert again.order(worker, "check", "common", 202) == "ok"
    again.require_shared("common", 2, 1, 0, value=300)


@pytest.mark.parametrize("level", ["cold", "warm"])
def test_a_job_is_suspended_and_resumed(product: Product, level: str) -> None:
    job = product.sharer(2)
    fill(job)
    job.share("common", 1, 0)
    job.require_shared("common", 0, 1, value=7)
    suspended = product.call("suspend", target=job.pids[1], level=level)
    assert suspended["gpu_pids"] == job.pids
    (row,) = product.call("ps")
    assert row["state"] == TargetState.SUSPENDED
    assert product.call("resume", target=job.pids[1])["state"] == TargetState.RUNNING
    check(job)
    job.require_shared("common", 1, 0, value=50)
    job.end()


def test_a_suspended_job_survives_its_daemon(product: Product) -> None:
    job = product.sharer(2)
    fill(job)
    product.call("suspend", target=job.process.pid)
    product.kill_daemon()
    product.call("resume", target=job.process.pid)
    check(job)
    job.end()


@pytest.mark.parametrize("point", ["handover.after", "control.after", "return.before"])
def test_a_daemon_killed_in_the_middle_brings_all_processes_back(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    faults = {"WOODFROG_FAULTS": f"checkpoint.{point}:kill", "WOODFROG_FAULTS_STATE": str(tmp_path)}
    product = make_product(environment=faults)
    job = product.sharer(2)
    fill(job)
    job.share("common", 0, 1)
    job.require_shared("common", 0, 1, value=3)
    old = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.checkpoint(job.process)
    product.wait_for_new_daemon(old)
    check(job)
    job.require_shared("common", 1, 0, value=60)
    assert [row["state"] for row in product.call("ps")] == [TargetState.RUNNING]
    job.end()


@pytest.mark.parametrize(("ranks", "options"), [(2, ()), (3, ("graph",))], ids=["two", "three-graph"])
def test_ranks_in_the_middle_of_collectives_lose_nothing(
    product: Product, ranks: int, options: tuple[str, ...]
) -> None:
    job = product.collective(ranks, *options)
    for _ in range(2):
        result = product.checkpoint(job)
        assert len(result["gpu_pids"]) == ranks
        job.wait_steps(4)
    product.call("suspend", target=job.pid)
    product.call("resume", target=job.pid)
    job.wait_steps(4)
    image = product.checkpoint(job, stop=True)["image"]
    product.restore(image, job.log, verify=True).check_runs_right()
