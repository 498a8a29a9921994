"""Targets that see some GPUs only, in an order of their own: what counts is what they are on, not how it was spelt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpus import gpus_of, ranks_of, uuids
from product import Product

from woodfrog.errors import RefusedError
from woodfrog.image.inspect import gpu_uuid


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    made = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "3", "WOODFROG_SIMGPU_FASTEST": "last"})
    made.call("ping")  # the daemon sees everything; only what is started from here on is restricted
    return made


def shortest(uuid: str, others: list[str]) -> str:
    """The shortest beginning of a UUID that no other has."""
    text = gpu_uuid(uuid)
    return next(text[:end] for end in range(5, 41) if not any(gpu_uuid(one).startswith(text[:end]) for one in others))


@pytest.mark.parametrize(
    ("spelling", "order", "wanted"),
    [
        ("1", "", 1),
        ("0", "", 0),
        ("0", "PCI_BUS_ID", 2),  # the daemon counts in the default order, from the last one
        ("2,0,1", "", 2),
        ("1,-1,0", "", 1),
        ("uuid", "", 1),
        ("short", "PCI_BUS_ID", 1),
    ],
)
def test_a_device_is_known_in_every_spelling(product: Product, spelling: str, order: str, wanted: int) -> None:
    here = uuids(product)
    wanted_uuid = here[wanted]
    others = [one for one in here if one != wanted_uuid]
    texts = {"uuid": gpu_uuid(wanted_uuid), "short": shortest(wanted_uuid, others)}
    product.environment["CUDA_VISIBLE_DEVICES"] = texts.get(spelling, spelling)
    if order:
        product.environment["CUDA_DEVICE_ORDER"] = order
    target = product.run("--idle-kib", "4096")
    image = product.checkpoint(target)["image"]
    assert gpus_of(product, target) == [[wanted_uuid]]
    product.call("migrate", target=target.pid, gpu_map={wanted_uuid: others[0]})
    target.wait_steps()
    assert gpus_of(product, target) == [[others[0]]]
    product.call("migrate", target=target.pid, gpu_map={"0": wanted_uuid})
    target.wait_steps()
    assert gpus_of(product, target) == [[wanted_uuid]]
    assert product.checkpoint(target, stop=True)["parent"] == image
    restored = product.restore(image, target.log, gpu_map={wanted_uuid: others[1]}, verify=True)
    restored.wait_steps()
    assert gpus_of(product, restored) == [[others[1]]]
    restored.check_runs_right()


def test_ranks_that_number_the_same_gpus_differently(product: Product) -> None:
    here = uuids(product)
    job = product.collective(3, "visible", "2,0,1/0,1,2/1,2,0")
    product.checkpoint(job)
    assert ranks_of(job) == [here[2], here[0], here[1]]
    for verb in ("suspend", "resume"):
        product.call(verb, target=job.pid)
    assert ranks_of(job) == [here[2], here[0], here[1]]
    # By UUID: everybody to the next one.
    product.call("migrate", target=job.pid, gpu_map=dict(zip(here, [*here[1:], here[0]], strict=True)))
    assert ranks_of(job) == [here[0], here[1], here[2]]
    image = product.checkpoint(job, stop=True)["image"]
    # By number, as the first rank counts: its first one is back where it began.
    job = product.restore(image, job.log, gpu_map={"0": here[2], "1": here[0], "2": here[1]}, verify=True)
    assert ranks_of(job) == [here[2], here[0], here[1]]
    job.check_runs_right()


def test_a_mig_instance_is_refused_by_name(product: Product) -> None:
    product.environment["CUDA_VISIBLE_DEVICES"] = f"MIG-{gpu_uuid(uuids(product)[0])}"
    target = product.run("--idle-kib", "4096")
    for verb in ("checkpoint", "suspend"):
        with pytest.raises(RefusedError, match="MIG") as raised:
            product.call(verb, target=target.pid)
        assert raised.value.target_state == "untouched"
    target.check_runs_right()


def test_a_target_on_a_gpu_that_the_daemon_does_not_see_is_refused_untouched(
    make_product: Callable[..., Product],
) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"})
    product.call("ping")
    product.environment["CUDA_VISIBLE_DEVICES"] = "1"
    target = product.run("--idle-kib", "4096")
    with pytest.raises(RefusedError, match="does not see"):
        product.call("suspend", target=target.pid)
    target.check_runs_right()
