"""Targets that woodfrog did not start, on both generations of the driver: where it lends memory, that goes through the
transfer engine into the arena and into images; else the driver keeps it in the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper, damage_chunk, zero_digest

from woodfrog.errors import WoodfrogError
from woodfrog.image.repository import ImageRepository

MIB = 1 << 20
IDLE_KIB = 20000
NEWER = "13040"  # CUDA 13.4 lends memory
ENVIRONMENT = {
    "WOODFROG_SIMGPU_DRIVER_VERSION": NEWER,
    "WOODFROG_CUSTOM_STORAGE": "1",
    "WOODFROG_SIMGPU_CONTROL_STATE": str(24 * MIB),
}


def suspended(product: Product, target: Stepper) -> int:
    """How much of its memory is in the arena."""
    return int(product.call("suspend", target=target.pid)["bytes"])


def faulty(make_product: Callable[..., Product], folder: Path, fault: str) -> Product:
    (folder / "fired").mkdir()
    return make_product(
        environment={**ENVIRONMENT, "WOODFROG_FAULTS": fault, "WOODFROG_FAULTS_STATE": str(folder / "fired")}
    )


@pytest.mark.parametrize("version", ["13000", NEWER])
def test_both_generations_of_the_driver(make_product: Callable[..., Product], version: str) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_SIMGPU_DRIVER_VERSION": version})
    target = product.run("--idle-kib", str(IDLE_KIB), "--threads", "2", managed=False)
    for _ in range(3):
        in_arena = suspended(product, target)
        assert (in_arena >= IDLE_KIB * 1024) == (version == NEWER)
        assert in_arena == 0 or version == NEWER
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    target.check_runs_right()


def test_it_is_asked_for(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_CUSTOM_STORAGE": "0"})
    target = product.run(managed=False)
    assert suspended(product, target) == 0
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_without_room_in_the_arena_the_driver_keeps_it(make_product: Callable[..., Product]) -> None:
    product = make_product(environment=ENVIRONMENT, daemon_arguments=["--arena", "8M"])
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    assert suspended(product, target) == 0
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_a_process_on_several_gpus(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_SIMGPU_DEVICES": "3"})
    target = product.run("--threads", "2", "--spread", "--idle-kib", "3000", managed=False)
    for _ in range(2):
        assert suspended(product, target) > 0
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    target.check_runs_right()


def test_the_arena_has_what_was_taken_and_gets_it_back(make_product: Callable[..., Product]) -> None:
    product = make_product(environment=ENVIRONMENT)
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    for _ in range(6):  # 64 MiB of arena would be full after three
        in_arena = suspended(product, target)
        assert in_arena >= IDLE_KIB * 1024
        product.call("resume", target=target.pid)
        target.wait_steps(1)
    target.check_runs_right()


@pytest.mark.parametrize(
    "point",
    ["suspend.handover.after", "lent.copied", "lent.completed", "suspend.control.after", "suspend.commit.after"],
)
def test_a_suspend_that_fails_leaves_it_right(make_product: Callable[..., Product], tmp_path: Path, point: str) -> None:
    product = faulty(make_product, tmp_path, f"{point}:error")
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    with pytest.raises(WoodfrogError) as failed:
        product.call("suspend", target=target.pid)
    assert failed.value.target_state == ("suspended" if "commit" in point else "running")
    if failed.value.target_state == "suspended":
        product.call("resume", target=target.pid)
    target.wait_steps(1)
    assert suspended(product, target) > 0
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_what_the_driver_let_go_of_uncopied_is_said_to_be_lost(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    product = faulty(make_product, tmp_path, "lent.begun:error")
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    with pytest.raises(WoodfrogError, match="the driver has let go of it") as failed:
        product.call("suspend", target=target.pid)
    assert failed.value.target_state == "frozen"
    with pytest.raises(WoodfrogError):
        product.call("resume", target=target.pid)


@pytest.mark.parametrize(
    "point",
    ["suspend.handover.after", "lent.begun", "lent.copied", "lent.completed", "suspend.commit.before",
     "suspend.commit.after", "suspend.end.before"],
)  # fmt: skip
def test_a_daemon_that_is_killed_in_a_suspend(make_product: Callable[..., Product], tmp_path: Path, point: str) -> None:
    product = faulty(make_product, tmp_path, f"{point}:kill")
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.call("suspend", target=target.pid)
    product.wait_for_new_daemon(daemon)
    with contextlib.suppress(WoodfrogError):  # it runs, or it is suspended
        product.call("resume", target=target.pid)
    target.wait_steps(2)
    for _ in range(3):
        assert suspended(product, target) > 0
        product.call("resume", target=target.pid)
    target.check_runs_right()


@pytest.mark.parametrize("action", ["error", "kill"])
@pytest.mark.parametrize(
    "point", ["resume.control.before", "lent.refilled", "resume.control.after", "resume.return.before"]
)
def test_a_resume_that_is_cut_off(
    make_product: Callable[..., Product], tmp_path: Path, point: str, action: str
) -> None:
    product = faulty(make_product, tmp_path, f"{point}:{action}")
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    daemon = product.daemon_pid()
    assert suspended(product, target) > 0
    with contextlib.suppress(WoodfrogError):
        product.call("resume", target=target.pid)
    if action == "kill":
        product.wait_for_new_daemon(daemon)
    with contextlib.suppress(WoodfrogError):  # past the commit the daemon itself has finished it
        product.call("resume", target=target.pid)
    target.wait_steps(2)
    assert suspended(product, target) > 0
    product.call("resume", target=target.pid)
    target.check_runs_right()


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def damage(product: Product, image: str) -> None:
    with ImageRepository(product.store_path) as store, store.open(image) as opened:
        (file,) = opened.manifest.lent_files
        zero = zero_digest(store.chunk_bytes)
        found = (file.digests[at : at + 32] for at in range(0, len(file.digests), 32))
        damage_chunk(store, next(one for one in found if one != zero))


@pytest.mark.parametrize("version", ["13000", NEWER])
@pytest.mark.parametrize("stop", [True, False])
def test_images_on_both_generations_of_the_driver(
    make_product: Callable[..., Product], version: str, stop: bool
) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_SIMGPU_DRIVER_VERSION": version})
    target = product.run("--idle-kib", str(IDLE_KIB), "--threads", "2", managed=False)
    result = product.checkpoint(target)
    for _ in range(2):
        target.wait_steps(1)
        result = product.checkpoint(target, stop=stop)
        assert (result["lent_bytes"] >= IDLE_KIB * 1024) == (version == NEWER)
        if not stop:
            target.wait_steps(1)
            if target.process is not None:
                target.process.kill()
                target.process.wait(30)
            else:
                product.end(target)
        target = product.restore(result["image"], target.log)
        target.wait_steps(1)
    if version == NEWER:  # the idle memory was in the image before: it is hashed like any other
        assert result["cpu_new_bytes"] < IDLE_KIB * 1024
    assert product.images()
    target.check_runs_right()


@pytest.mark.parametrize(
    "fault",
    ["lent.copied:error", "checkpoint.control.after:error", "checkpoint.cpu.after:error",
     "checkpoint.commit.before:error", "lent.completed:kill", "checkpoint.cpu.before:kill",
     "checkpoint.commit.before:kill"],
)  # fmt: skip
@pytest.mark.parametrize("stop", [True, False])
def test_a_checkpoint_that_is_cut_off_leaves_it_running(
    make_product: Callable[..., Product], tmp_path: Path, fault: str, stop: bool
) -> None:
    product = faulty(make_product, tmp_path, fault)
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.checkpoint(target, stop=stop)
    if fault.endswith("kill"):
        product.wait_for_new_daemon(daemon)
    target.wait_steps(2)
    result = product.checkpoint(target, stop=True)
    assert result["lent_bytes"] >= IDLE_KIB * 1024
    product.restore(result["image"], target.log).check_runs_right()


@pytest.mark.parametrize("fault", ["lent.refilled:error", "restore.control.after:error", "restore.cpu.after:kill"])
def test_a_restore_that_is_cut_off_leaves_nothing(
    make_product: Callable[..., Product], tmp_path: Path, fault: str
) -> None:
    product = faulty(make_product, tmp_path, fault)
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    image = product.checkpoint(target, stop=True)["image"]
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.restore(image, target.log)
    if fault.endswith("kill"):
        product.wait_for_new_daemon(daemon)
    assert not target.alive
    product.restore(image, target.log).check_runs_right()


def test_damage_of_lent_memory_ends_the_restore(make_product: Callable[..., Product]) -> None:
    product = make_product(environment=ENVIRONMENT)
    target = product.run("--idle-kib", str(IDLE_KIB), managed=False)
    image = product.checkpoint(target, stop=True)["image"]
    damage(product, image)
    with pytest.raises(WoodfrogError):
        product.restore(image, target.log)
    assert not target.alive
