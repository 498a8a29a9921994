"""Suspend and resume: off the GPU and back, as often as one likes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from product import Product

from woodfrog.errors import NoSpaceError, RefusedError


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "driver only"])
def test_a_target_survives_twenty_suspends_and_resumes_in_a_row(product: Product, managed: bool) -> None:
    target = product.run("--threads", "1", "--idle-kib", "3000", "--pace-us", "500", managed=managed)
    for _ in range(20):
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    target.check_runs_right()


def test_a_suspended_target_leaves_the_gpu_empty_and_stands_still(product: Product) -> None:
    target = product.run("--idle-kib", "8192", name="sleeper")
    product.call("suspend", target="sleeper")
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    [row] = product.call("ps")
    assert (row["name"], row["state"]) == ("sleeper", "suspended")
    assert target.alive
    standing = target.steps()
    product.call("ping")
    assert target.steps() == standing
    product.call("resume", target="sleeper")
    target.check_runs_right()


def test_suspended_data_outlives_a_killed_daemon(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    product.call("suspend", target=target.pid)
    product.kill_daemon()
    [row] = product.call("ps")
    assert row["state"] == "suspended"
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_one_gpu_serves_two_targets_in_turn(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MEMORY": "128MiB"}, daemon_arguments=["--arena", "256M"])
    first = product.run("--idle-kib", str(72 << 10), name="first")
    product.call("suspend", target="first")
    second = product.run("--idle-kib", str(72 << 10), name="second")
    with pytest.raises(NoSpaceError) as raised:
        product.call("resume", target="first")
    assert raised.value.target_state in ("suspended", "untouched")
    product.call("suspend", target="second")
    product.call("resume", target="first")
    first.check_runs_right()
    product.call("resume", target="second")
    second.check_runs_right()


def test_what_the_arena_cannot_hold_is_refused_untouched(make_product: Callable[..., Product]) -> None:
    product = make_product(daemon_arguments=["--arena", "64M"])
    target = product.run("--idle-kib", str(96 << 10))
    with pytest.raises(NoSpaceError) as raised:
        product.call("suspend", target=target.pid)
    assert raised.value.target_state == "untouched"
    target.check_runs_right()


def test_a_suspended_target_is_not_checkpointed_or_suspended_again(product: Product) -> None:
    target = product.run()
    product.call("suspend", target=target.pid)
    for verb in ("checkpoint", "suspend"):
        with pytest.raises(RefusedError, match="suspended"):
            product.call(verb, target=target.pid)
    with pytest.raises(RefusedError, match="needed"):
        product.call("stop")
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_the_data_of_a_suspended_target_that_was_killed_is_given_back(product: Product) -> None:
    free = product.call("arena")["free_bytes"]
    target = product.run("--idle-kib", "8192")
    product.call("suspend", target=target.pid)
    assert product.call("arena")["free_bytes"] < free
    os.kill(target.pid, signal.SIGKILL)
    assert target.process is not None
    target.process.wait(30)
    assert product.call("ps") == []
    assert product.call("arena")["free_bytes"] == free
