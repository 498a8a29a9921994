"""Memory that is exported and imported comes back as one memory: after a checkpoint, a suspend, and a restore."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from product import Product

from woodfrog.errors import RefusedError

MIB = 1 << 20


def test_memory_imported_by_its_own_process_stays_one_memory(product: Product) -> None:
    target = product.sharer(1)
    target.share("a", 0, mib=4)
    target.pass_on("a", 0, 0, mib=4)
    address = target.order(0, "address", "a'")
    target.order(0, "write", "a", 7)
    result = product.checkpoint(target.process)
    assert result["gpu_bytes"] == 4 * MIB, "it is stored once"
    assert target.order(0, "check", "a'", 7) == "ok"
    product.call("suspend", target=target.process.pid)
    product.call("resume", target=target.process.pid)
    assert target.order(0, "check", "a'", 7) == "ok"
    assert target.order(0, "write", "a'", 8) == "ok"
    assert target.order(0, "check", "a", 8) == "ok"
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log, verify=True)
    assert target.order(0, "address", "a'") == address
    assert target.order(0, "check", "a'", 8) == "ok"
    assert target.order(0, "write", "a'", 9) == "ok"
    assert target.order(0, "check", "a", 9) == "ok"
    target.pass_on("a", 0, 0, mib=4)  # what came back can be shared again
    assert target.order(0, "check", "a'", 9) == "ok"
    target.end()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_host_memory_that_can_be_exported_survives(product: Product, shared: bool) -> None:
    target = product.sharer(1)
    target.share("h", 0, mib=2, where="host")
    if shared:
        target.pass_on("h", 0, 0, where="host")
    names = ["h", "h'"] if shared else ["h"]
    target.order(0, "write", "h", 11)
    for verb in ("suspend", "resume"):
        product.call(verb, target=target.process.pid)
    assert [target.order(0, "check", name, 11) for name in names] == ["ok"] * len(names)
    target.order(0, "write", names[-1], 12)
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log, verify=True)
    assert [target.order(0, "check", name, 12) for name in names] == ["ok"] * len(names)
    target.order(0, "write", names[-1], 13)
    assert target.order(0, "check", "h", 13) == "ok"
    target.end()


def test_what_is_shared_counts_as_written_and_is_precopied_as_one(product: Product) -> None:
    target = product.sharer(1, track=True)
    target.share("a", 0, mib=4)
    target.pass_on("a", 0, 0, mib=4)
    for value, options in ((1, {"precopy": True}), (2, {"check_clean": True}), (3, {"precopy": True, "stop": True})):
        target.order(0, "write", "a'", value)
        result = product.checkpoint(target.process, **options)
        assert result["gpu_bytes"] == 4 * MIB
    target.process = product.restore(result["image"], target.process.log, verify=True)
    assert target.order(0, "check", "a", 3) == "ok"
    assert target.order(0, "write", "a", 4) == "ok"
    assert target.order(0, "check", "a'", 4) == "ok"
    target.end()


def test_a_process_that_made_legacy_handles_survives(product: Product) -> None:
    target = product.sharer(1)
    target.order(0, "alloc", "a", 64)
    target.order(0, "ipc_send", "a", 0)
    target.order(0, "write", "a", 31)
    for verb in ("suspend", "resume"):
        product.call(verb, target=target.process.pid)
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log, verify=True)
    assert target.order(0, "check", "a", 31) == "ok"
    # The handle, read only now, is known to be its own: the process is the same one.
    assert target.try_order(0, "ipc_take", "x", 0) == "error cuIpcOpenMemHandle CUDA_ERROR_INVALID_CONTEXT"
    assert target.order(0, "ipc_send", "a", 0) == "ok"
    target.order("end")


def test_registered_shared_memory_is_registered_again(product: Product) -> None:
    target = product.sharer(1)
    target.order(0, "register", "r", 1)
    target.order(0, "write", "r", 21)  # by the GPU
    product.checkpoint(target.process)
    assert target.order(0, "check", "r", 21) == "ok"
    for verb in ("suspend", "resume"):
        product.call(verb, target=target.process.pid)
    target.order(0, "write", "r", 22)
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log)
    assert target.order(0, "check", "r", 22) == "ok"
    assert target.order(0, "write", "r", 23) == "ok"
    assert target.order(0, "check", "r", 23) == "ok"
    target.end()


def test_an_importer_that_knows_of_less_than_there_is_gets_the_rest_as_well(product: Product) -> None:
    target = product.sharer(1)
    target.share("a", 0, mib=6)
    target.order(0, "write", "a", 3)
    target.order(0, "send", "a", 0)
    target.order(0, "take", "b", 0)
    target.order(0, "map", "b", 2)
    target.order(0, "release", "a")
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log)
    assert target.order(0, "check", "b", 3) == "ok"
    target.end()


def test_a_multicast_object_is_refused_untouched_with_the_way_out(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MULTICAST": "1"})
    target = product.sharer(1)
    target.share("a", 0)
    assert target.order(0, "multicast", "m") == "ok"
    for verb in ("checkpoint", "suspend"):
        with pytest.raises(RefusedError, match="multicast") as raised:
            product.call(verb, target=target.process.pid)
        assert "NCCL_NVLS_ENABLE=0" in raised.value.advice
        assert raised.value.target_state == "untouched"
    assert target.order(0, "check", "a", 0) == "ok"
    target.end()


def test_a_descriptor_that_the_target_still_has_open_is_refused_by_name(product: Product) -> None:
    target = product.sharer(1)
    target.share("a", 0)
    target.order(0, "keep", "a", 0)
    target.order(0, "take", "b", 0)
    with pytest.raises(RefusedError, match="descriptor") as raised:
        product.checkpoint(target.process)
    assert raised.value.details["code"] == "shared_memory"
    assert target.order(0, "check", "a", 0) == "ok"
    target.end()
