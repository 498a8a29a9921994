"""The standby pool: a process of an image waits with its data at hand, and is taken by a restore."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from product import DEADLINE_S, Product, Stepper

from woodfrog.errors import NoSpaceError, NotFoundError, RefusedError, UsageError

HOLDS = ("host", "device")


def stopped_image(product: Product, *arguments: str) -> tuple[str, Stepper]:
    target = product.run("--idle-kib", "4096", *arguments)
    image = str(product.checkpoint(target, stop=True)["image"])
    return image, target


def standby(product: Product, image: str, **params: object) -> dict[str, object]:
    [made] = product.call("standby", image=image, store=str(product.store_path), **params)
    return dict(made)


@pytest.mark.parametrize("hold", HOLDS)
def test_a_standby_process_stands_still_until_a_restore_takes_it(product: Product, hold: str) -> None:
    image, target = stopped_image(product)
    standing = target.steps()
    made = standby(product, image, hold=hold)
    assert (made["pid"], made["state"], made["hold"], made["new"]) == (target.pid, "standby", hold, True)
    [row] = product.call("ps")
    assert (row["state"], row["image"], row["hold"]) == ("standby", image, hold)
    free = product.gpu_total_bytes() - product.gpu_free_bytes()
    assert (free >= 4 << 20) == (hold == "device")
    assert target.steps() == standing
    result = product.call("restore", image=image, store=str(product.store_path), verify=True)
    assert (result["standby"], result["verified"], result["image"]) == (hold, True, image)
    assert not {"cpu", "extract"} & set(result["phases"])
    taken = product.restored(result, target.log)
    taken.wait_steps(3)
    again = product.checkpoint(taken, stop=True)
    assert again["parent"] == image
    product.restore(again["image"], target.log).check_runs_right()
    assert product.gpu_free_bytes() == product.gpu_total_bytes()


def test_a_restore_that_shall_not_take_it_says_who_has_the_number(product: Product) -> None:
    image, target = stopped_image(product)
    standby(product, image)
    with pytest.raises(RefusedError, match=str(target.pid)):
        product.restore(image, target.log, standby=False)
    assert product.call("standby_end", which=image) == [target.pid]
    taken = product.restore(image, target.log)
    taken.check_runs_right()


def test_the_same_one_is_told_of_and_what_makes_no_sense_is_refused(product: Product) -> None:
    image, target = stopped_image(product)
    assert standby(product, image)["new"]
    told = standby(product, image)
    assert (told["new"], told["pid"]) == (False, target.pid)
    with pytest.raises(UsageError, match="no sense"):
        standby(product, image, count=0)
    with pytest.raises(UsageError, match="held"):
        standby(product, image, hold="moon")
    for verb in ("checkpoint", "suspend"):
        with pytest.raises(RefusedError, match="standby"):
            product.call(verb, target=target.pid)
    with pytest.raises(RefusedError, match="needed"):
        product.call("stop")
    product.call("standby_end")
    with pytest.raises(NotFoundError):
        product.call("standby_end", which=image)


@pytest.mark.parametrize("hold", HOLDS)
def test_the_pool_outlives_a_killed_daemon(product: Product, hold: str) -> None:
    image, target = stopped_image(product)
    standby(product, image, hold=hold)
    product.kill_daemon()
    [row] = product.call("ps")
    assert (row["state"], row["hold"]) == ("standby", hold)
    result = product.call("restore", image=image, store=str(product.store_path))
    assert result["standby"] == hold
    product.restored(result, target.log).check_runs_right()
    assert product.gpu_free_bytes() == product.gpu_total_bytes()


@pytest.mark.parametrize("hold", HOLDS)
def test_one_that_dies_leaves_nothing_and_a_restore_makes_a_new_process(product: Product, hold: str) -> None:
    image, target = stopped_image(product)
    standby(product, image, hold=hold)
    free_arena = product.call("arena")["free_bytes"]
    os.kill(target.pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while "let go" not in product.daemon_log():
        assert time.monotonic() < deadline, product.daemon_log()[-2000:]
    assert f"standby process {target.pid} of {image} has ended" in product.daemon_log()
    assert product.call("ps") == []
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    assert product.call("arena")["free_bytes"] >= free_arena + ((4 << 20) if hold == "host" else 0)
    result = product.call("restore", image=image, store=str(product.store_path))
    assert not result.get("standby")
    product.restored(result, target.log).check_runs_right()


def test_taking_one_onto_a_full_gpu_leaves_it_waiting(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MEMORY": "128MiB"}, daemon_arguments=["--arena", "256M"])
    image, target = stopped_image(product, "--idle-kib", str(72 << 10))
    standby(product, image)
    other = product.run("--idle-kib", str(72 << 10))
    with pytest.raises(NoSpaceError) as raised:
        product.restore(image, target.log)
    assert raised.value.target_state == "standby"
    assert other.process is not None
    other.process.kill()
    other.process.wait(DEADLINE_S)
    product.restore(image, target.log).check_runs_right()


def test_what_the_driver_keeps_cannot_wait_apart(product: Product) -> None:
    target = product.run(managed=False)
    image = product.checkpoint(target, stop=True)["image"]
    with pytest.raises(RefusedError, match="driver's way"):
        standby(product, image)
    product.restore(image, target.log).check_runs_right()
