"""CRIU's part of a checkpoint: begun early, its pages copied by threads; nothing to be seen of either in an image."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from copier import wait_until
from held import Holds
from product import Product

from woodfrog.cpu.criu import find
from woodfrog.cpu.options import DUMP_LOG
from woodfrog.cpu.pages_by import VARIABLE
from woodfrog.cpu.run import still_running
from woodfrog.errors import NoDaemonError, WoodfrogError
from woodfrog.image.repository import ImageRepository
from woodfrog.target.process import ProcessTree

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


def unwilling_criu(folder: Path, dumps: str) -> Path:
    """CRIU, but for its dumps: these are that shell command."""
    program = folder / "criu"
    program.write_text(f'#!/bin/sh\ncase " $* " in *" dump "*) {dumps};; esac\nexec "{find().path}" "$@"\n')
    program.chmod(0o755)
    return program


def test_criu_that_ends_before_its_gate_fails_the_checkpoint_and_the_target_runs_on(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    criu = unwilling_criu(tmp_path, "echo it does not like this machine; exit 3")
    product = make_product(environment={"WOODFROG_CRIU": str(criu)})
    target = product.run()
    with pytest.raises(WoodfrogError, match="CRIU failed: it does not like this machine"):
        product.checkpoint(target)
    assert criu_folders(product) == []
    target.check_runs_right()


def test_a_checkpoint_that_fails_does_not_wait_for_criu_that_hangs_before_its_gate(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    criu = unwilling_criu(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 6000")
    state = tmp_path / "faults"
    state.mkdir()
    product = make_product(
        environment={
            "WOODFROG_CRIU": str(criu),
            "WOODFROG_FAULTS": "checkpoint.control.after:error",
            "WOODFROG_FAULTS_STATE": str(state),
        }
    )
    target = product.run()
    with pytest.raises(WoodfrogError, match=r"checkpoint\.control\.after"):
        product.checkpoint(target)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert criu_folders(product) == []
    target.check_runs_right()


def test_criu_at_its_gate_ends_with_a_killed_daemon_and_the_target_runs_on(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    holds = Holds(tmp_path / "faults", "checkpoint.control.after")
    product = make_product(environment=holds.environment)
    target = product.run()
    criu: list[int] = []

    def kill_the_daemon() -> None:
        with holds.at("checkpoint.control.after", lambda: product.checkpoint(target)):
            wait_until(lambda: bool(at_gate(product)), "CRIU at its gate")
            criu.append(os.pidfd_open(at_gate(product)))
            product.kill_daemon()

    with pytest.raises(NoDaemonError):
        kill_the_daemon()
    (ended,) = criu
    assert select.select([ended], [], [], 60)[0], "CRIU ends by itself"
    os.close(ended)
    with ProcessTree(target.pid) as tree:
        assert tree.root.tracer_pid == 0
    target.wait_steps(2)
    product.checkpoint(target)
    target.check_runs_right()


def at_gate(product: Product) -> int:
    """CRIU that waits there for a dump; 0: none."""
    for work in product.runtime.glob("checkpoint-*/criu-*"):
        with suppress(psutil.NoSuchProcess):  # a child that CRIU has only for a moment
            criu = still_running(work)
            if criu and any(child.name() == "woodfrog-gate" for child in psutil.Process(criu).children()):
                return criu
    return 0


def criu_folders(product: Product) -> list[Path]:
    return list(product.runtime.glob("checkpoint-*"))
