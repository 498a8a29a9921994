"""Whole jobs in the standby pool: all processes wait, are taken together, and are let go together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpus import ranks_of, uuids
from instances import nothing_is_left, wait_until_ended
from product import DEADLINE_S, Product, Stepper
from sharer import Sharer, check, fill, kill

from woodfrog.errors import RefusedError

HOLDS = ("host", "device", "mapped")
SWAP = {"0": "1", "1": "0"}


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(environment={"WOODFROG_SIMGPU_DEVICES": "2"})


def stopped_sharer(product: Product) -> tuple[str, Sharer]:
    """Memory of their own, some that may be promoted, and some that all share."""
    job = product.sharer(3)
    fill(job)
    job.share("common", 0, 1, 2)
    job.require_shared("common", 0, 1, 2, value=100)
    for worker in range(3):
        job.order(worker, "alloc", "block", 4096)
        assert job.order(worker, "write", "block", 500 + worker) == "ok"
    image = str(product.checkpoint(job.process, stop=True)["image"])
    job.process = Stepper(job.process.pid, job.process.log)
    return image, job


def check_all(job: Sharer) -> None:
    check(job)
    for worker in range(3):
        assert job.order(worker, "check", "common", 102) == "ok"
        assert job.order(worker, "check", "block", 500 + worker) == "ok"
    job.require_shared("common", 2, 0, 1, value=100)


@pytest.mark.parametrize("hold", HOLDS)
def test_a_job_waits_and_is_taken_with_all_its_processes_and_what_they_share(product: Product, hold: str) -> None:
    image, job = stopped_sharer(product)
    (made,) = product.call("standby", image=image, store=str(product.store_path), hold=hold)
    assert (made["gpu_pids"], made["state"], made["new"]) == (job.pids, "standby", True)
    (row,) = product.call("ps")
    assert (row["state"], row["hold"], row["gpu_pids"]) == ("standby", hold, job.pids)
    with pytest.raises(RefusedError, match="standby"):
        product.call("checkpoint", target=job.pids[1], store=str(product.store_path))
    product.kill_daemon()
    result = product.call("restore", image=image, store=str(product.store_path), verify=True)
    assert (result["standby"], result["gpu_pids"], result["root_pid"]) == (hold, job.pids, job.process.pid)
    if hold == "mapped":
        told = product.call("promotion", target=job.process.pid, wait=True)["promotion"]
        assert (told["state"], told["moved_bytes"]) == ("complete", 3 * (4 << 20))
    check_all(job)
    again = product.checkpoint(job.process, stop=True)
    assert again["parent"] == image
    wait_until_ended(job.process.pid)
    job.process = product.restore(again["image"], job.process.log, verify=True)
    check_all(job)


@pytest.mark.parametrize("hold", HOLDS)
def test_several_of_a_job_wait_in_namespaces_on_exchanged_gpus_and_run_at_once(product: Product, hold: str) -> None:
    job = product.collective(2)
    here = uuids(product)
    image = product.checkpoint(job, stop=True)["image"]
    request = {"image": image, "store": str(product.store_path), "gpu_map": SWAP}
    made = product.call("standby", count=2, hold=hold, **request)
    assert [one["new"] for one in made] == [True, True]
    jobs = []
    for _ in made:
        result = product.call("restore", new_pid_namespace=True, wait=True, **request)
        assert result["standby"] == hold
        jobs.append(product.restored(result, Path(result["log"])))
    assert ranks_of(jobs[0]) == here[::-1]
    jobs[1].wait_steps(8)
    for one in jobs:
        one.check_runs_right()
        wait_until_ended(one.pid)
    nothing_is_left(product)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("killed_daemon", [False, True], ids=["same-daemon", "new-daemon"])
def test_a_job_of_which_a_process_dies_is_let_go_as_a_whole(product: Product, hold: str, killed_daemon: bool) -> None:
    image, job = stopped_sharer(product)
    free_arena = product.call("arena")["free_bytes"]
    product.call("standby", image=image, store=str(product.store_path), hold=hold)
    if killed_daemon:
        product.kill_daemon()
    kill(job.pids[2])
    wait_until_ended(job.process.pid)
    deadline = time.monotonic() + DEADLINE_S
    # It is no target any more as soon as its processes have ended; then its data is let go.
    while (
        product.call("ps")
        or product.gpu_free_bytes() < product.gpu_total_bytes()
        or product.call("arena")["free_bytes"] < free_arena
    ):
        assert time.monotonic() < deadline, product.daemon_log()[-2000:]
    assert f"process {job.pids[2]} of {image} has ended" in product.daemon_log()
    result = product.call("restore", image=image, store=str(product.store_path))
    assert not result.get("standby")
    check_all(job)


def test_a_waiting_job_comes_back_by_its_pid_and_takes_the_place_of_another(product: Product) -> None:
    image, job = stopped_sharer(product)
    product.call("standby", image=image, store=str(product.store_path))
    other = product.collective(2)
    product.call("switch", **{"out": other.pid, "in": job.pids[1]})
    check_all(job)
    product.call("resume", target=other.pid)
    other.check_runs_right()
