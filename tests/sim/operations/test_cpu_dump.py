"""CRIU's part of a checkpoint: begun early, its pages copied by threads; nothing to be seen of either in an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product

from woodfrog.cpu.options import DUMP_LOG
from woodfrog.cpu.pages_by import VARIABLE
from woodfrog.errors import WoodfrogError
from woodfrog.image.repository import ImageRepository

LEFT_OUT = "Lazy pages transfer finished successfully"  # criu/cr-dump.c
WAITED = "woodfrog-gate: waited"


def dump_log(product: Product, image: str, folder: Path) -> str:
    """CRIU's."""
    folder.mkdir()
    with ImageRepository(product.store_path) as store, store.open(image) as opened:
        opened.extract_cpu(folder, only=[DUMP_LOG])
    return (folder / DUMP_LOG).read_text()


@pytest.mark.parametrize("by", ["threads", "criu"])
def test_images_of_both_ways_are_restored(make_product: Callable[..., Product], tmp_path: Path, by: str) -> None:
    product = make_product(environment={VARIABLE: by})
    target = product.run("--idle-kib", "3000")
    for number in range(2):
        image = product.checkpoint(target)["image"]
        log = dump_log(product, image, tmp_path / str(number))
        assert (LEFT_OUT in log) == (by == "threads")
        assert WAITED in log
        target.wait_steps(2)
    image = product.checkpoint(target, stop=True)["image"]
    restored = product.restore(image, target.log, verify=True)
    restored.wait_steps(2)
    product.checkpoint(restored)
    restored.check_runs_right()
    assert len(product.images()) == 4


def test_a_dump_that_was_begun_and_is_not_wanted_any_more_leaves_nothing(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    """The driver's checkpoint fails while CRIU waits at its gate."""
    state = tmp_path / "faults"
    state.mkdir()
    product = make_product(
        environment={"WOODFROG_FAULTS": "checkpoint.control.after:error", "WOODFROG_FAULTS_STATE": str(state)}
    )
    target = product.run()
    with pytest.raises(WoodfrogError):
        product.checkpoint(target)
    assert criu_folders(product) == []
    assert not (product.runtime / "criu-dump.log").exists(), "no dump has failed"
    target.wait_steps(2)
    product.checkpoint(target)
    target.check_runs_right()


def criu_folders(product: Product) -> list[Path]:
    return list(product.runtime.glob("checkpoint-*"))
