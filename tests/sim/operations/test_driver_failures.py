"""The driver refuses: whatever call it is, the target comes back, or waits where it is until it can."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from held import Holds
from product import Product, Stepper

from woodfrog.errors import NoSpaceError, WoodfrogError

OUT_OF_MEMORY, UNKNOWN = 2, 999  # CUresult, cuda.h
AT_WORK_S = 0.5  # of SLOW_MS
SLOW_MS = 3000


class Driver:
    """The simulated driver of one product's targets, told to fail through a file that it reads at each call."""

    def __init__(self, make_product: Callable[..., Product], tmp_path: Path) -> None:
        self._file = tmp_path / "failures"
        self.recover()
        self.product = make_product(
            environment={"WOODFROG_SIMGPU_FAIL": f"@{self._file}", "WOODFROG_SIMGPU_MEMORY": "64MiB"}
        )

    def fail(self, action: str, result: int, times: int = 1_000_000) -> None:
        self._file.write_text(f"{action}:{result}:{times}")

    def recover(self) -> None:
        self._file.write_text("")


@pytest.fixture
def driver(make_product: Callable[..., Product], tmp_path: Path) -> Driver:
    return Driver(make_product, tmp_path)


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "driver only"])
@pytest.mark.parametrize("action", ["lock", "checkpoint"])
@pytest.mark.parametrize("verb", ["checkpoint", "suspend"])
def test_a_driver_call_that_fails_on_the_way_in_leaves_the_target_running(
    driver: Driver, verb: str, action: str, managed: bool
) -> None:
    target = driver.product.run("--idle-kib", "2048", managed=managed)
    driver.fail(action, UNKNOWN)
    with pytest.raises(WoodfrogError, match="UNKNOWN") as raised:
        driver.product.call(verb, target=target.pid)
    assert raised.value.target_state == "running"
    target.check_runs_right()


@pytest.mark.parametrize("verb", ["checkpoint", "suspend"])
def test_memory_that_cannot_be_exported_leaves_the_target_running(driver: Driver, verb: str) -> None:
    target = driver.product.run("--idle-kib", "2048")
    driver.fail("cuMemExportToShareableHandle", UNKNOWN)
    with pytest.raises(WoodfrogError, match="exporting") as raised:
        driver.product.call(verb, target=target.pid)
    assert raised.value.target_state == "running"
    target.check_runs_right()


def test_the_driver_exports_nothing_while_the_target_waits(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    """A descriptor takes the driver longer than anything else of a handover, the first one of a process by far."""
    holds = Holds(tmp_path / "holds", "checkpoint.quiesce.before")
    failures = tmp_path / "failures"
    failures.touch()
    product = make_product(environment=holds.environment | {"WOODFROG_SIMGPU_FAIL": f"@{failures}"})
    target = product.run("--idle-kib", "2048", "--kib", "3072", "--buffers", "5")
    with holds.at("checkpoint.quiesce.before", lambda: product.checkpoint(target, cpu=False)) as checkpoint:
        failures.write_text(f"cuMemExportToShareableHandle:{UNKNOWN}")
    assert checkpoint.result()["gpu_handles"] >= 6
    target.check_runs_right()


def frozen(driver: Driver) -> Stepper:
    """A target that could not be brought back: its control state does not fit the GPU any more."""
    target = driver.product.run("--idle-kib", "2048", name="stuck")
    driver.fail("restore", OUT_OF_MEMORY)
    with pytest.raises(NoSpaceError) as raised:
        driver.product.checkpoint(target, cpu=False)
    assert raised.value.target_state == "frozen"
    assert "resume stuck" in raised.value.advice
    [row] = driver.product.call("ps")
    assert row["state"] == "frozen"
    return target


def test_a_target_that_does_not_fit_back_waits_until_resume_finds_room(driver: Driver) -> None:
    target = frozen(driver)
    with pytest.raises(NoSpaceError):
        driver.product.call("resume", target="stuck")
    driver.recover()
    driver.product.call("resume", target="stuck")
    target.check_runs_right()


def test_a_target_that_does_not_fit_back_is_brought_back_by_the_next_daemon(driver: Driver) -> None:
    target = frozen(driver)
    driver.recover()
    driver.product.kill_daemon()
    target.check_runs_right()


def test_a_single_failure_of_the_drivers_restore_is_made_up_for(driver: Driver) -> None:
    target = driver.product.run("--idle-kib", "2048")
    driver.fail("restore", OUT_OF_MEMORY, times=1)
    with pytest.raises(NoSpaceError) as raised:
        driver.product.checkpoint(target)
    assert raised.value.target_state == "running"
    target.check_runs_right()


def test_a_resume_that_the_driver_refuses_leaves_the_target_suspended(driver: Driver) -> None:
    target = driver.product.run("--idle-kib", "2048", name="sleeper")
    driver.product.call("suspend", target="sleeper")
    driver.fail("restore", OUT_OF_MEMORY)
    with pytest.raises(NoSpaceError) as raised:
        driver.product.call("resume", target="sleeper")
    assert raised.value.target_state == "suspended"
    driver.recover()
    driver.product.call("resume", target="sleeper")
    target.check_runs_right()


def test_a_restore_that_the_driver_refuses_leaves_nothing_and_can_be_tried_again(driver: Driver) -> None:
    target = driver.product.run("--idle-kib", "2048")
    image = driver.product.checkpoint(target, stop=True)["image"]
    driver.fail("restore", OUT_OF_MEMORY)
    with pytest.raises(NoSpaceError):
        driver.product.restore(image, target.log)
    assert not target.alive
    assert driver.product.gpu_free_bytes() == driver.product.gpu_total_bytes()
    driver.recover()
    driver.product.restore(image, target.log, verify=True).check_runs_right()


def test_memory_that_cannot_be_had_for_a_resume_leaves_the_target_suspended(driver: Driver) -> None:
    target = driver.product.run("--idle-kib", "2048", name="sleeper")
    driver.product.call("suspend", target="sleeper")
    hog = driver.product.run("--idle-kib", str(56 << 10))  # of the GPU's 64 MiB
    with pytest.raises(NoSpaceError):
        driver.product.call("resume", target="sleeper")
    hog.finish()
    driver.product.call("resume", target="sleeper")
    target.check_runs_right()


def wait_until_at_work(pid: int) -> None:
    """Until the driver has been at one request for so long that it is the slow one: all others take milliseconds."""
    since: dict[str, float] = {}
    deadline = time.monotonic() + 60
    while not any(time.monotonic() - begin > AT_WORK_S for begin in since.values()):
        assert time.monotonic() < deadline, "the driver was not asked for anything"
        asked = set()
        for comm in Path(f"/proc/{pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has ended since
                if comm.read_text() == "simgpu-request\n":
                    asked.add(comm.parent.name)
        since = {tid: since.get(tid, time.monotonic()) for tid in asked}
        os.sched_yield()


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "driver only"])
@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
def test_a_daemon_that_dies_while_the_driver_is_at_work(
    make_product: Callable[..., Product], step: str, managed: bool
) -> None:
    """The driver goes on with what the dead one had asked for, and tells the state from before until it is done."""
    product = make_product(environment={"WOODFROG_SIMGPU_LATENCY_MS": f"{step}:{SLOW_MS}"})
    target = product.run("--idle-kib", "3000", managed=managed)
    with product.client() as client, ThreadPoolExecutor(1) as pool:
        client.call("ps")
        pool.submit(lambda: product.call("checkpoint", target=target.pid, store=str(product.store_path), cpu=False))
        wait_until_at_work(target.pid)
        product.kill_daemon()
    target.wait_steps(2)
    target.check_runs_right()
