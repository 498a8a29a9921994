"""Targets that woodfrog did not start: their driver's checkpoint is helped from outside, and is right all the same."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper

from woodfrog.errors import WoodfrogError

MIB = 1 << 20
CONTROL_BYTES = 72 * MIB
ENVIRONMENT = {"WOODFROG_SIMGPU_CONTROL_STATE": str(CONTROL_BYTES), "WOODFROG_SIMGPU_ONE_MAPPING": "1"}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="woodfrog-enter enters x86-64 processes only")


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(environment=dict(ENVIRONMENT))


def traced(target: Stepper) -> bool:
    """Whether a thread of it is; threads may end meanwhile."""
    found = False
    for path in Path(f"/proc/{target.pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            found |= "TracerPid:\t0\n" not in path.read_text()
    return found


def test_suspend_and_resume_of_a_target_that_we_did_not_start(product: Product) -> None:
    target = product.run("--idle-kib", "20000", managed=False)
    for _ in range(2):
        result = product.call("suspend", target=target.pid)
        assert result["visit"]["reason"] == ""
        (mapping,) = result["visit"]["mappings"]
        assert mapping["size_bytes"] >= CONTROL_BYTES + 20000 * 1024
        assert mapping["resident_bytes"] >= mapping["size_bytes"]
        assert not traced(target)
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    target.check_runs_right()


def test_an_image_of_it_restores(product: Product) -> None:
    target = product.run("--idle-kib", "3000", managed=False)
    result = product.checkpoint(target, stop=True)
    assert len(result["visit"]["mappings"]) == 1
    restored = product.restore(result["image"], target.log)
    assert len(product.checkpoint(restored)["visit"]["mappings"]) == 1
    restored.check_runs_right()


def test_a_target_of_ours_is_not_entered(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    visit = product.checkpoint(target, cpu=False)["visit"]
    assert (visit["threads"], visit["reason"]) == (0, "")
    target.check_runs_right()


def test_when_it_may_not_be_entered_the_driver_does_it_alone(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_ENTER": "0"})
    target = product.run("--idle-kib", "3000", managed=False)
    visit = product.checkpoint(target, cpu=False)["visit"]
    assert visit["mappings"] == []
    assert "WOODFROG_ENTER" in visit["reason"]
    target.check_runs_right()


def test_a_visitor_that_is_killed_in_the_middle_costs_time_only(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_ENTER_FAULT": "call_made"})
    target = product.run("--idle-kib", "3000", managed=False)
    result = product.checkpoint(target, cpu=False)
    assert result["visit"]["mappings"] == []
    assert not traced(target)
    target.check_runs_right()


def test_a_target_that_dies_in_the_middle_is_told_as_that(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_SIMGPU_LATENCY_MS": "checkpoint:3000"})
    target = product.run("--idle-kib", "3000", managed=False)
    with product.client() as client:
        # Once somebody traces it, it is in the driver's checkpoint, or just before.
        def kill_when_traced() -> None:
            deadline = time.monotonic() + 30
            while not traced(target) and time.monotonic() < deadline:
                os.sched_yield()
            os.kill(target.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_traced)
        killer.start()
        with pytest.raises(WoodfrogError) as failure:
            client.call("suspend", {"target": target.pid})
        killer.join()
    assert failure.value.target_state == "gone"
    other = product.run(managed=False)
    assert product.checkpoint(other, cpu=False)["visit"]["mappings"]
    other.check_runs_right()
