"""A disk that really fills up, in the middle of each phase that writes to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from product import Product

sys.path.insert(0, str(Path(__file__).resolve().parent))

from side_by_side import side_by_side

from woodfrog.errors import NoSpaceError
from woodfrog.store import space

DISK_BYTES = 256 << 20


@contextlib.contextmanager
def small_disk(mount: Path) -> Iterator[Path]:
    """A small file system of its own."""
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.fail("needs root to mount a small file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(disk: Path) -> None:
    """Take everything that is free."""
    block = bytes(1 << 20)
    with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(block)


CASES = {
    f"{arena} {phase} {'stop' if stop else 'leave running'}": (arena, phase, stop)
    for stop in (False, True)
    for arena, phases in (("16M", ("quiesce", "cpu")), ("64M", ("quiesce", "cpu", "write", "commit")))
    for phase in phases
}


@pytest.mark.parametrize("stop", [False, True], ids=["leave running", "stop"])
def test_a_disk_that_fills_up_costs_the_image_and_not_the_target(
    make_product: Callable[..., Product], tmp_path: Path, stop: bool
) -> None:
    side_by_side(
        {
            name: partial(fill_up, make_product, tmp_path / name.replace(" ", "-"), *case)
            for name, case in CASES.items()
            if case[2] is stop
        }
    )


def fill_up(make_product: Callable[..., Product], mount: Path, arena: str, phase: str, stop: bool) -> None:
    with small_disk(mount) as disk:
        product = make_product(daemon_arguments=["--arena", arena])
        try:
            _fill_up(product, disk, phase, stop)
        finally:
            product.close()


def _fill_up(product: Product, disk: Path, phase: str, stop: bool) -> None:
    product.store_path = disk / "images"
    target = product.run("--idle-kib", str(24 << 10))  # more than the smaller arena: it goes through a ring

    def fill_at_phase(event: dict[str, object]) -> None:
        if (event["event"], event["phase"]) == ("begin", phase) and not (disk / "filler").exists():
            fill(disk)

    params = {"target": target.pid, "store": str(product.store_path), "stop": stop}
    with product.client() as client:
        try:
            client.call("checkpoint", params, fill_at_phase)
        except NoSpaceError as failure:
            assert failure.target_state == "running"  # noqa: PT017 (both ends are right, each has its own promise)
            assert product.images() == []
            target.wait_steps(1)
        else:
            assert len(product.images()) == 1  # everything had been written already
    (disk / "filler").unlink()
    if target.alive:
        product.checkpoint(target, stop=True)
    image = product.images()[-1]
    product.restore(image, target.log).check_runs_right()


def test_a_disk_that_is_full_from_the_start_is_refused_untouched(product: Product, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        product.store_path = disk / "images"
        target = product.run("--idle-kib", "4096")
        fill(disk)
        with pytest.raises(NoSpaceError) as raised:
            product.checkpoint(target)
        assert raised.value.target_state == "untouched"
        target.check_runs_right()


def test_an_increment_is_refused_for_what_is_new_and_not_for_what_was_new_before(
    product: Product, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        product.store_path = disk / "images"
        target = product.run("--idle-kib", str(140 << 10))
        product.checkpoint(target, cpu=False)
        # As much again would not fit.
        second = product.checkpoint(target, cpu=False)
        assert second["gpu_new_bytes"] < 8 << 20
        with open(disk / "filler", "wb", buffering=0) as filler:
            status = os.statvfs(disk)
            filler.write(bytes(status.f_bavail * status.f_frsize - space.RESERVE_BYTES - (16 << 10)))
        with pytest.raises(NoSpaceError) as raised:
            product.checkpoint(target, cpu=False)
        assert raised.value.target_state == "running"
        assert len(product.images()) == 2
        target.check_runs_right()
