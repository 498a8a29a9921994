"""What launches name while a target is promoted: by every call, in every way to pass arguments, beside following."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held import Holds
from launcher import Launcher
from mapped import MADE, MIB, Mapped
from product import Product

from woodfrog.image.profile import read_profile
from woodfrog.image.repository import ImageRepository

HOWS = ("params", "extra", "ex", "cooperative")


def put(address: int, count: int, value: int) -> bytes:
    """Parameters of launcher_kernels.cu's `put`: word i of the first `count` becomes more by value + i."""
    return struct.pack("<QIII", address, 0, count, value)


def words(target: Launcher, address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}I", target.get(address, 4 * count)))


@pytest.mark.parametrize(("code", "track"), [("module", False), ("library", False), ("library", True)])
def test_every_launch_names_the_memory_that_its_arguments_point_to(
    make_product: Callable[..., Product], tmp_path: Path, code: str, track: bool
) -> None:
    holds = Holds(tmp_path / "holds", MADE)
    product = make_product(environment=Mapped.environment(holds))
    target: Launcher = product.launcher(track=track)
    kernels = target.load(product.build / "launcher.ptx", code)
    addresses = [target.alloc(4 * MIB) for _ in range(6)]
    for number, address in enumerate(addresses):
        target.order("put", f"{address:x}", struct.pack("<4I", *[number] * 4).hex())
    image = product.checkpoint(target.process, stop=True)["image"]
    store = str(product.store_path)

    def restore() -> dict[str, Any]:
        result: dict[str, Any] = product.call("restore", image=image, store=store, mode="ordered", wait=True)
        return result

    used = [addresses[number] for number in (4, 2, 5, 1)]
    with holds.at(MADE, restore) as restored:
        for address, how in zip(used, HOWS, strict=True):
            target.launch(kernels, "put", put(address, 4, 10), block=(4, 1, 1), how=how)
        # By a struct among the arguments nothing is named here: its words are no addresses.
        target.launch(kernels, "large", struct.pack("<Q960I", used[0], *range(960)), block=(4, 1, 1))
    assert restored.result()["promotion"]["state"] == "complete"
    target.process = product.restored(restored.result(), target.process.log)
    with ImageRepository(store) as images:
        manifest = images.manifest(image)
        handle_at = {row.address: row.handle for row in manifest.allocations.rows()}
        assert read_profile(images.store, image, manifest.operation) == [handle_at[address] for address in used]
    for address in used[1:]:
        number = addresses.index(address)
        assert words(target, address, 4) == [number + 10 + at for at in range(4)]
    # The table is as it was: what is launched now is followed as ever, and checked.
    target.launch(kernels, "put", put(used[1], 4, 1), block=(4, 1, 1))
    result = product.checkpoint(target.process, check_clean=True)
    assert result["tracked"] == track
    assert words(target, used[1], 4) == [addresses.index(used[1]) + 11 + 2 * at for at in range(4)]


def test_the_ranks_of_a_job_are_promoted_between_their_collectives(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_PAUSE_BYTES": str(4 * MIB)})
    job = product.collective(2)
    image = product.checkpoint(job, stop=True)["image"]
    result = product.call("restore", image=image, store=str(product.store_path), mode="ordered", wait=True)
    job = product.restored(result, job.log)
    assert result["promotion"]["state"] == "complete", result["promotion"]
    assert result["promotion"]["moved_bytes"] > 0
    job.wait_steps(3)
    product.checkpoint(job)
    job.check_runs_right()
