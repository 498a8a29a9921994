"""The driver finds memory for its control state ready; what it saves there, and gives back, is as without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper

from woodfrog.faults import InjectedFaultError

MIB = 1 << 20
CYCLES = int(os.environ.get("WOODFROG_IMAGE_CYCLES", "2"))
STATE_BYTES = 48 * MIB + 4096 * 3  # no whole huge page


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES)})


def resident_bytes(target: Stepper) -> int:
    with open(f"/proc/{target.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_from_the_second_checkpoint_on_the_driver_gets_what_it_took_in_the_first(product: Product) -> None:
    # The simulated GPU's control state is expected to be nothing, so the first one shows how large it is.
    target = product.run("--idle-kib", "3000")
    taken = [product.checkpoint(target, cpu=False)["control_memory_bytes"] for _ in range(4)]
    assert taken == [0, STATE_BYTES, STATE_BYTES, STATE_BYTES]
    target.check_runs_right()


def test_suspend_and_resume_leave_no_memory_behind(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    for _ in range(2):
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    settled = resident_bytes(target)
    for _ in range(6):
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    # It is unmapped once the target runs, which is when it answers.
    target.wait_for(lambda _: resident_bytes(target) < settled + STATE_BYTES // 2, "that the memory is given back")
    target.check_runs_right()


def test_an_image_with_the_control_state_in_it_restores(product: Product) -> None:
    target = product.run("--threads", "2", "--idle-kib", "3000")
    product.checkpoint(target, cpu=False)
    result = product.checkpoint(target, stop=True)
    restored = product.restore(result["image"], target.log)
    restored.wait_steps(1)
    # And again, from the memory that came out of the image.
    again = product.checkpoint(restored)
    assert again["control_memory_bytes"] == STATE_BYTES
    restored.check_runs_right()


def test_what_a_failed_operation_has_offered_is_taken_back(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    (tmp_path / "fired").mkdir()
    product = make_product(
        environment={
            "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES),
            "WOODFROG_FAULTS": "checkpoint.quiesce.before:error:2,checkpoint.handover.before:error:2",
            "WOODFROG_FAULTS_STATE": str(tmp_path / "fired"),
        }
    )
    target = product.run("--idle-kib", "3000")
    product.checkpoint(target, cpu=False)
    before = resident_bytes(target)
    for phase in ("quiesce", "handover"):
        with pytest.raises(InjectedFaultError, match=phase):
            product.checkpoint(target, cpu=False)
        target.wait_for(lambda _: resident_bytes(target) < before + STATE_BYTES // 2, "that the offer is taken back")
    assert product.checkpoint(target, cpu=False)["control_memory_bytes"] == STATE_BYTES
    target.check_runs_right()


def test_a_target_can_decline(make_product: Callable[..., Product]) -> None:
    environment = {"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES), "WOODFROG_CONTROL_MEMORY": "0"}
    product = make_product(environment=environment)
    target = product.run("--idle-kib", "3000")
    assert [product.checkpoint(target, cpu=False)["control_memory_bytes"] for _ in range(2)] == [0, 0]
    target.check_runs_right()


@pytest.mark.parametrize("managed", [True, False])
def test_work_goes_on_right_through_many_images_and_new_processes(
    make_product: Callable[..., Product], managed: bool
) -> None:
    """`managed` False: nothing of ours is in the target, and its driver is helped from outside (test_entering.py)."""
    product = make_product(environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES + 32 * MIB)})
    target = product.run("--threads", "2", "--idle-kib", "3000", managed=managed)
    for _ in range(CYCLES):
        result = product.checkpoint(target, stop=True)
        target = product.restore(result["image"], target.log)
        target.wait_steps(1)
    target.check_runs_right()
