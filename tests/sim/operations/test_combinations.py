"""What is rarely asked for together: modes of a restore with namespaces, other GPUs and jobs, and operations on targets
of which the promotion is under way or has stopped. In each the memory is right, and where it should be."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpus import gpus_of, ranks_of, uuids
from held import Holds
from instances import nothing_is_left, wait_until_ended
from mapped import MADE, MIB, POINTS, Mapped
from product import Product, Stepper
from scribbling import check_images
from sharer import kill

from woodfrog.errors import WoodfrogError

MODES = ("mapped", "ordered")
SWAP = {"0": "1", "1": "0"}
SIZES = [64, 3 * MIB, 4 * MIB, 4 * MIB]


@pytest.fixture
def make_mapped(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., Mapped]:
    def make(*points: str, **environment: str) -> Mapped:
        holds = Holds(tmp_path / "holds", *points)
        environment = {"WOODFROG_SIMGPU_DEVICES": "2", **environment}
        return Mapped(make_product(environment=Mapped.environment(holds, **environment)), holds)

    return make


def gpus(mapped: Mapped) -> set[str]:
    """Those that the target's memory is on."""
    return {gpu for one in gpus_of(mapped.product, mapped.target.process) for gpu in one}


def stopped_promotion(make_mapped: Callable[..., Mapped], mode: str = "mapped") -> Mapped:
    """A target that runs with a part of its memory on the host, since its promotion has failed."""
    mapped = make_mapped(WOODFROG_FAULTS=f"{MADE}:error:2")
    mapped.filled(SIZES)
    mapped.stop()
    promotion = mapped.restore(mode, wait=True)["promotion"]
    assert promotion["state"] == "stopped"
    assert 0 < promotion["left_bytes"] < promotion["total_bytes"]
    return mapped


# ── restore modes with namespaces and other GPUs ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
def test_one_in_a_pid_namespace_runs_on_host_memory_and_ends_up_on_the_gpu(
    make_mapped: Callable[..., Mapped], mode: str
) -> None:
    mapped = make_mapped(MADE)
    small, *_ = mapped.filled(SIZES)
    mapped.stop()

    def restore_and_wait() -> Any:
        return mapped.restore(mode, new_pid_namespace=True, gpu_map={"0": "1"}, verify=True) and mapped.ended()

    with mapped.holds.at(MADE, restore_and_wait) as ended:
        mapped.target.process = Stepper(mapped.row()["pid"], mapped.target.process.log)
        mapped.target.fill(small, 0, 64, 9)
        mapped.check()
    assert (ended.result()["state"], ended.result()["left_bytes"]) == ("complete", 0)
    mapped.check()
    assert gpus(mapped) == {uuids(mapped.product)[1]}
    assert mapped.product.gpu_free_bytes() == mapped.product.gpu_total_bytes(), "nothing is on the first GPU"
    mapped.stop_here()
    nothing_is_left(mapped.product)
    mapped.restore("eager", verify=True)
    mapped.check()


def test_a_killed_daemon_goes_on_with_a_promotion_in_a_pid_namespace(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped(WOODFROG_FAULTS=f"{MADE}:kill:2")
    mapped.filled(SIZES)
    mapped.stop()
    old = mapped.product.daemon_pid()
    mapped.restore("mapped", new_pid_namespace=True)
    mapped.product.wait_for_new_daemon(old)
    assert (mapped.ended()["state"], mapped.ended()["left_bytes"]) == ("complete", 0)
    mapped.check()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_is_restored_twice_in_pid_namespaces_on_other_gpus_before_its_data_is_there(
    make_product: Callable[..., Product], mode: str
) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "2"})
    job = product.collective(2)
    here = uuids(product)
    image = product.checkpoint(job, stop=True)["image"]
    jobs = []
    for gpu_map in (SWAP, {}):
        result = product.call(
            "restore", image=image, store=str(product.store_path), mode=mode, new_pid_namespace=True, gpu_map=gpu_map,
            wait=True,
        )  # fmt: skip
        assert result["promotion"]["state"] == "complete"
        assert result["promotion"]["moved_bytes"] > 0
        jobs.append((result["name"], product.restored(result, Path(result["log"]))))
    (_, first), (second_name, second) = jobs
    assert ranks_of(first) == here[::-1]
    product.call("suspend", target=second_name)
    first.wait_steps(4)
    product.call("resume", target=second_name)
    product.call("migrate", target=first.pid, gpu_map={"0": "0", "1": "1"}, precopy=True)
    assert ranks_of(first) == here
    product.checkpoint(second, precopy=True)
    second.wait_steps(4)
    again = product.checkpoint(second, stop=True)["image"]
    wait_until_ended(second.pid)
    third = product.restore(again, second.log, gpu_map=SWAP, verify=True)
    assert ranks_of(third) == here[::-1], "where the second one was not"
    for one in (first, third):
        one.check_runs_right()
        wait_until_ended(one.pid)
    nothing_is_left(product)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_restored_on_exchanged_gpus_is_promoted_there(make_product: Callable[..., Product], mode: str) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "2"})
    job = product.collective(2)
    image = product.checkpoint(job, stop=True)["image"]
    result = product.call(
        "restore", image=image, store=str(product.store_path), mode=mode, gpu_map=SWAP, wait=True, verify=True
    )
    assert (result["promotion"]["state"], result["promotion"]["left_bytes"]) == ("complete", 0)
    job = product.restored(result, job.log)
    assert ranks_of(job) == uuids(product)[::-1]
    job.check_runs_right()


@pytest.mark.parametrize("point", ["promote.survey.before", *POINTS, "promote.commit.before"])
def test_a_process_of_a_job_that_dies_while_it_is_promoted_leaves_the_others_running(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    holds = Holds(tmp_path / "holds", point)
    product = make_product(environment=Mapped.environment(holds))
    job = product.sharer(2)
    for worker in (0, 1):
        job.order(worker, "alloc", "own", 4096)
        job.order(worker, "alloc", "more", 4096)
        assert job.order(worker, "write", "own", 70 + worker) == "ok"
    image = product.checkpoint(job.process, stop=True)["image"]
    restore = {"image": image, "store": str(product.store_path), "mode": "mapped", "wait": True}
    with holds.at(point, lambda: product.call("restore", **restore)) as restored:
        kill(job.pids[1])
    promotion = restored.result()["promotion"]
    assert (promotion["state"], promotion["left_bytes"]) == ("complete", 0), promotion["reason"]
    job.process = product.restored(restored.result(), job.process.log)
    assert job.order(0, "check", "own", 70) == "ok"
    (row,) = product.call("ps")
    assert (row["hosted_bytes"], row["gpu_pids"]) == (0, [job.pids[0]])


# ── operations while memory moves, and when it has stopped to ────────────────────────────────────────────────────────


def operate(mapped: Mapped, what: str) -> None:
    """Do that to the target; it runs afterwards."""
    product, target = mapped.product, mapped.target.process
    if what.startswith("checkpoint"):
        way = what.split()[1]
        if way == "stop":
            mapped.stop_here()
            mapped.restore("eager", verify=True)
            return
        result = product.checkpoint(target, concurrent=way)
        memory = {address: bytes(content) for address, content in mapped.target.memory.items()}
        check_images(product, {result["image"]: memory})
    elif what.startswith("suspend"):
        _, level, gpu = what.split()
        product.call("suspend", target=target.pid, level=level)
        product.call("resume", target=target.pid, gpu_map={"0": gpu} if gpu != "0" else {}, wait=True)
    else:
        product.call("migrate", target=target.pid, gpu_map={"0": "1"}, precopy=what.endswith("precopy"))


OPERATIONS = (
    "checkpoint copy",
    "checkpoint cow",
    "checkpoint stop",
    "suspend cold 0",
    "suspend cold 1",
    "suspend warm 0",
    "migrate",
    "migrate precopy",
)


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_target_whose_promotion_has_stopped_is_taken_as_it_is_and_promoted_where_it_is_then(
    make_mapped: Callable[..., Mapped], what: str
) -> None:
    mapped = stopped_promotion(make_mapped)
    operate(mapped, what)
    mapped.check()
    stays = what in ("checkpoint copy", "checkpoint cow")  # else it was moved with the rest
    assert (mapped.row().get("hosted_bytes", 0) > 0) is stays
    goal = uuids(mapped.product)[1 if what.startswith("migrate") or what.endswith("1") else 0]
    # The next daemon goes on with what is left of the promotion, if anything is.
    mapped.product.kill_daemon()
    mapped.check()
    try:
        told = mapped.product.call("resume", target=mapped.target.process.pid, wait=True)["promotion"]
        assert (told["state"], told["left_bytes"]) == ("complete", 0)
    except WoodfrogError as refused:
        assert "all of its memory is on the GPU" in refused.reason  # noqa: PT017 - either is right
    mapped.check()
    assert gpus(mapped) == {goal}
    row = mapped.row()
    assert (row["state"], row["operation"]) == ("running", "")
    assert row.get("hosted_bytes", 0) == 0
    if goal == uuids(mapped.product)[1]:
        assert mapped.product.gpu_free_bytes() == mapped.product.gpu_total_bytes(), "nothing is left on the first GPU"
    mapped.stop_here()
    mapped.restore("eager", verify=True)
    mapped.check()


@pytest.mark.parametrize("what", ["checkpoint cow", "checkpoint stop", "suspend cold 1", "migrate precopy"])
def test_an_operation_asked_for_while_memory_moves_waits_for_that(
    make_mapped: Callable[..., Mapped], what: str
) -> None:
    mapped = make_mapped(MADE)
    mapped.filled(SIZES)
    mapped.stop()
    hooked = []

    def restore_and_operate() -> None:
        mapped.restore("ordered")
        hooked.append(True)
        operate(mapped, what)

    with mapped.holds.at(MADE, restore_and_operate):
        assert mapped.row()["operation"].startswith("migrating")
    assert hooked
    mapped.check()
    assert mapped.row().get("hosted_bytes", 0) == 0


def test_a_promotion_that_is_to_go_on_waits_for_a_snapshot_that_drains_by_copy_on_write(
    make_mapped: Callable[..., Mapped],
) -> None:
    drain = "checkpoint.drain.before"
    mapped = make_mapped(drain, WOODFROG_FAULTS=f"{MADE}:error:2,{drain}:hold")
    first, *_, last = mapped.filled(SIZES)
    mapped.stop()
    assert mapped.restore(wait=True)["promotion"]["state"] == "stopped"
    pid, memory = mapped.target.process.pid, {at: bytes(content) for at, content in mapped.target.memory.items()}
    checkpoint = {"concurrent": "cow", "cpu": False}
    with mapped.holds.at(drain, lambda: mapped.product.checkpoint(mapped.target.process, **checkpoint)) as made:
        # A target that does not run yet is none whose promotion could go on: its resume would wait for the checkpoint.
        deadline = time.monotonic() + 60
        while mapped.row()["state"] != "running":
            assert time.monotonic() < deadline, mapped.row()
        told = mapped.product.call("resume", target=pid)["promotion"]
        assert (told["state"], told["moved_bytes"]) == ("running", 0)
    for address in (first, last):  # while it moves, or drains still
        mapped.target.fill(address, 0, 64, 9)
    assert (mapped.ended()["state"], mapped.ended()["left_bytes"]) == ("complete", 0)
    check_images(mapped.product, {made.result()["image"]: memory})
    mapped.check()


def test_one_taken_from_the_pool_is_checkpointed_and_migrated_while_its_memory_moves(
    make_mapped: Callable[..., Mapped],
) -> None:
    mapped = make_mapped(MADE)
    mapped.filled(SIZES)
    mapped.stop()
    mapped.product.call("standby", image=mapped.image, store=str(mapped.product.store_path), hold="mapped")

    def take_and_go_on() -> Any:
        assert mapped.restore()["standby"] == "mapped"
        return mapped.product.checkpoint(mapped.target.process)

    with mapped.holds.at(MADE, take_and_go_on) as made:
        pass
    assert made.result()["parent"] == mapped.image
    operate(mapped, "migrate")
    mapped.check()
    assert gpus(mapped) == {uuids(mapped.product)[1]}
    operate(mapped, "checkpoint stop")
    mapped.check()
