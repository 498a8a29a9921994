"""Targets on other GPUs than they were on: migrated as they run, resumed or restored there, alone and as jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpus import gpus_of, ranks_of, uuids
from product import Product, Stepper

from woodfrog.errors import NoSpaceError, NotFoundError, RefusedError, TargetState, UsageError, WoodfrogError

SWAP = {"0": "1", "1": "0"}


def make(make_product: Callable[..., Product], devices: int, **environment: str) -> Product:
    return make_product(environment={"WOODFROG_SIMGPU_DEVICES": str(devices), **environment})


@pytest.mark.parametrize("precopy", [False, True], ids=["plain", "precopy"])
def test_a_target_goes_to_another_gpu_in_the_same_process(make_product: Callable[..., Product], precopy: bool) -> None:
    product = make(make_product, 2)
    target = product.run("--idle-kib", str(24 << 10))
    product.checkpoint(target)
    first, second = uuids(product)
    assert gpus_of(product, target) == [[first]]
    result = product.call("migrate", target=target.pid, gpu_map={"0": "1"}, precopy=precopy)
    assert result["gpu_map"] == {first: second}
    assert result["bytes"] > 24 << 20
    assert (result["copied_bytes"] < result["bytes"]) is precopy, "precopied bytes that did not change move once"
    target.wait_steps()
    assert gpus_of(product, target) == [[second]]
    assert product.gpu_free_bytes() == product.gpu_total_bytes(), "nothing is left on the old one"
    product.call("migrate", target=target.pid, gpu_map={second: first})
    target.wait_steps()
    assert gpus_of(product, target) == [[first]]
    image = product.checkpoint(target, stop=True)["image"]
    product.restore(image, target.log, verify=True).check_runs_right()


def test_the_ranks_of_a_job_change_places(make_product: Callable[..., Product]) -> None:
    product = make(make_product, 2)
    job = product.collective(2)
    product.checkpoint(job)  # their agents are connected from here on
    before = ranks_of(job)
    assert before == uuids(product)
    result = product.call("migrate", target=job.pid, gpu_map=SWAP)
    assert len(result["gpu_pids"]) == 2
    assert ranks_of(job) == before[::-1]
    product.call("suspend", target=job.pid)
    product.call("resume", target=job.pid, gpu_map={"0": "0", "1": "1"})  # on the left the target's own numbers
    assert ranks_of(job) == before
    image = product.checkpoint(job, stop=True)["image"]
    job = product.restore(image, job.log, gpu_map=SWAP, verify=True)
    assert ranks_of(job) == before[::-1]
    image = product.checkpoint(job, stop=True)["image"]
    product.restore(image, job.log, verify=True).check_runs_right()


def test_memory_that_processes_share_stays_one_and_host_memory_stays_where_it_is(
    make_product: Callable[..., Product],
) -> None:
    product = make(make_product, 2)
    job = product.sharer(2)
    job.share("device", 0, 1, mib=4)
    job.share("host", 1, 0, where="host")
    for name in ("device", "host"):
        job.require_shared(name, 0, 1, value=10)
    result = product.call("migrate", target=job.process.pid, gpu_map={"0": "1"})
    assert result["bytes"] == 4 << 20, "one memory moves once, the host's not at all"
    for name in ("device", "host"):
        assert job.order(0, "check", name, 11) == "ok"
        job.require_shared(name, 1, 0, value=20)
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    job.end()


def test_a_job_goes_to_gpus_that_it_was_not_on(make_product: Callable[..., Product]) -> None:
    product = make(make_product, 4)
    job = product.collective(2)
    product.checkpoint(job)
    here = uuids(product)
    assert ranks_of(job) == [here[0], here[1]]
    product.call("migrate", target=job.pid, gpu_map={"1": "3"})  # one of them; the other stays
    assert ranks_of(job) == [here[0], here[3]]
    product.call("suspend", target=job.pid)
    product.call("resume", target=job.pid, gpu_map={"0": "2"})
    assert ranks_of(job) == [here[2], here[3]]
    image = product.checkpoint(job, stop=True)["image"]
    job = product.restore(image, job.log, gpu_map={"0": "0", "1": "1"}, verify=True)
    assert ranks_of(job) == [here[0], here[1]]
    job.check_runs_right()


@pytest.mark.parametrize("point", ["control.after", "refill.after", "commit.before"])
def test_a_resume_elsewhere_that_fails_leaves_the_way_home(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    faults = {"WOODFROG_FAULTS": f"resume.{point}:error", "WOODFROG_FAULTS_STATE": str(tmp_path)}
    product = make(make_product, 3, **faults)
    job = product.collective(2)
    product.checkpoint(job)
    here = uuids(product)
    product.call("suspend", target=job.pid)
    with pytest.raises(WoodfrogError) as raised:
        product.call("resume", target=job.pid, gpu_map={"0": "1", "1": "2"})
    assert raised.value.target_state == TargetState.SUSPENDED
    product.call("resume", target=job.pid)
    assert ranks_of(job) == [here[0], here[1]]
    job.check_runs_right()


@pytest.mark.parametrize("point", ["control.after", "refill.after", "commit.before", "return.before"])
def test_a_daemon_killed_in_a_resume_elsewhere_costs_nothing(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    faults = {"WOODFROG_FAULTS": f"resume.{point}:kill", "WOODFROG_FAULTS_STATE": str(tmp_path)}
    product = make(make_product, 3, **faults)
    job = product.collective(2)
    product.checkpoint(job)
    here = uuids(product)
    product.call("suspend", target=job.pid)
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.call("resume", target=job.pid, gpu_map={"0": "1", "1": "2"})
    product.wait_for_new_daemon(daemon)
    (row,) = product.call("ps")
    if row["state"] == TargetState.SUSPENDED:
        product.call("resume", target=job.pid)
        wanted = [here[0], here[1]]
    else:
        wanted = [here[1], here[2]]
    assert ranks_of(job) == wanted
    job.check_runs_right()


def test_what_cannot_be_moved_is_refused_and_runs_on(make_product: Callable[..., Product]) -> None:
    product = make(make_product, 2, WOODFROG_SIMGPU_MEMORY="96MiB")
    target = product.run("--idle-kib", str(40 << 10))
    wrong: list[tuple[dict[str, str], type[WoodfrogError], str]] = [
        ({"0": "0"}, RefusedError, "already"),
        ({"0": "7"}, NotFoundError, "no GPU number 7"),
        ({"1": "0"}, NotFoundError, "no GPU number 1"),
        ({"0": "nonsense"}, UsageError, "neither"),
        ({"00" * 16: "1"}, UsageError, "does not use"),
    ]
    for gpu_map, kind, message in wrong:
        with pytest.raises(kind, match=message):
            product.call("migrate", target=target.pid, gpu_map=gpu_map)
    other = product.run("--idle-kib", str(40 << 10))
    product.call("migrate", target=other.pid, gpu_map={"0": "1"})
    third = product.run("--idle-kib", str(30 << 10))
    product.call("migrate", target=third.pid, gpu_map={"0": "1"})
    with pytest.raises(NoSpaceError):
        product.call("migrate", target=target.pid, gpu_map={"0": "1"})
    for one in (other, third):
        one.check_runs_right()
    product.call("suspend", target=target.pid, level="warm")
    with pytest.raises(RefusedError, match="context") as raised:
        product.call("resume", target=target.pid, gpu_map={"0": "1"})
    assert raised.value.target_state == TargetState.SUSPENDED
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_two_jobs_are_checkpointed_at_the_same_time(make_product: Callable[..., Product]) -> None:
    product = make(make_product, 2)
    jobs = [product.collective(2), product.collective(2)]
    images: dict[int, Any] = {}
    failures: list[BaseException] = []

    def checkpoint(job: Stepper) -> None:
        try:
            for stop in (False, True):
                images[job.pid] = product.checkpoint(job, stop=stop)["image"]
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=checkpoint, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for job, gpu_map in zip(jobs, ({}, SWAP), strict=True):
        product.restore(images[job.pid], job.log, gpu_map=gpu_map, verify=True).check_runs_right()
