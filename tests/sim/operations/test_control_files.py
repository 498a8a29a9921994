"""The driver's saved state in a file of the daemon's: CRIU passes it over, the image has it, a restore maps it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper

from woodfrog.errors import WoodfrogError
from woodfrog.image.manifest import Feature, Manifest
from woodfrog.image.repository import ImageRepository
from woodfrog.image.writer import MappedFileChangedError
from woodfrog.operations import control_files

MIB = 1 << 20
CYCLES = int(os.environ.get("WOODFROG_CONTROL_CYCLES", "5"))
STATE_BYTES = 48 * MIB + 4096 * 3  # no whole huge page
FILE_BYTES = 50 * MIB


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES)})


def learned(product: Product, *arguments: str, **more: str) -> Stepper:
    """A target of whose control state the size is known: the simulated GPU's is expected to be nothing before."""
    target = product.run("--idle-kib", "3000", *arguments, **more)
    product.checkpoint(target, cpu=False)
    return target


def manifest_of(product: Product, image: str) -> Manifest:
    with ImageRepository(product.store_path) as store, store.open(image) as opened:
        return opened.manifest


def ended(product: Product, target: Stepper) -> None:
    if target.process is None:
        product.end(target)
    else:
        target.process.kill()
        target.process.wait(30)


def state_mappings(pid: int) -> list[str]:
    """Of a file without a name on a tmpfs, or of what a restore made in its place."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if line.split()[1] == "rw-s" and ("/#" in line or "woodfrog-control" in line)]


def test_criu_saves_none_of_it_and_a_restore_brings_it_back(product: Product) -> None:
    target = learned(product)
    private = manifest_of(product, product.checkpoint(target)["image"])  # the first is as large as any
    assert private.mapped_files, "it went into CRIU's pages"
    result = product.checkpoint(target, stop=True)
    manifest = manifest_of(product, result["image"])
    assert result["control_memory_bytes"] == 0  # of a target that did not go on nothing is told
    assert result["control_file_bytes"] == FILE_BYTES
    (file,) = manifest.mapped_files
    assert (file.pid, file.size_bytes) == (target.pid, FILE_BYTES)
    assert Feature.MAPPED_FILES in manifest.features
    assert manifest.cpu_bytes - FILE_BYTES < STATE_BYTES, "it is in CRIU's files as well"
    restored = product.restore(result["image"], target.log)
    restored.wait_steps(1)
    restored.wait_for(lambda _: not state_mappings(restored.pid), "that the state's mapping is given back")
    assert product.images()
    restored.check_runs_right()


def test_a_target_that_runs_on_gives_its_file_back_and_its_image_restores(product: Product) -> None:
    target = learned(product)
    result = product.checkpoint(target)
    assert result["control_memory_bytes"] == STATE_BYTES
    assert result["control_file_bytes"] == FILE_BYTES
    target.wait_for(lambda _: not state_mappings(target.pid), "that the state's mapping is given back")
    target.wait_steps(1)
    ended(product, target)
    product.restore(result["image"], target.log, verify=True).check_runs_right()


@pytest.mark.parametrize("stop", [True, False])
def test_work_goes_on_right_through_many_processes(product: Product, stop: bool) -> None:
    target = learned(product, "--threads", "2")
    for _ in range(CYCLES):
        result = product.checkpoint(target, stop=stop)
        assert result["control_file_bytes"] == FILE_BYTES
        if not stop:
            ended(product, target)
        target = product.restore(result["image"], target.log)
        target.wait_steps(1)
    target.check_runs_right()


def test_a_target_can_keep_it_in_memory_of_its_own(make_product: Callable[..., Product]) -> None:
    product = make_product(
        environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES), "WOODFROG_CONTROL_MEMORY": "private"}
    )
    result = product.checkpoint(learned(product), stop=False)
    assert (result["control_memory_bytes"], result["control_file_bytes"]) == (STATE_BYTES, 0)


def test_what_the_driver_wants_more_of_is_in_criu_s_pages(make_product: Callable[..., Product]) -> None:
    """An image of a file that was offered and not taken: clear, and mapped until the target runs."""
    product = make_product(
        environment={"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES), "WOODFROG_SIMGPU_ONE_MAPPING": "1"}
    )
    target = learned(product)
    product.call("suspend", target=target.pid)
    product.call("resume", target=target.pid)
    result = product.checkpoint(target, stop=True)
    restored = product.restore(result["image"], target.log)
    restored.wait_steps(1)
    restored.check_runs_right()


def test_a_driver_that_changes_its_saved_state_is_seen_and_gets_no_file_again(
    make_product: Callable[..., Product],
) -> None:
    environment = {"WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES), "WOODFROG_SIMGPU_SCRIBBLES": "1"}
    product = make_product(environment=environment)
    target = learned(product)
    before = product.images()
    with pytest.raises(WoodfrogError, match="saved state of process") as failed:
        product.checkpoint(target)
    assert failed.value.target_state == "running"
    assert failed.type.__name__ in (MappedFileChangedError.__name__, WoodfrogError.__name__)
    assert product.images() == before
    target.wait_steps(1)
    result = product.checkpoint(target)
    assert (result["control_memory_bytes"], result["control_file_bytes"]) == (STATE_BYTES, 0)
    ended(product, target)
    product.restore(result["image"], target.log).check_runs_right()


@pytest.mark.parametrize("phase", ["prepare", "control", "cpu", "restore"])  # the first of cpu is of the second one
def test_a_daemon_that_is_killed_leaves_a_target_that_runs(
    make_product: Callable[..., Product], tmp_path: Path, phase: str
) -> None:
    (tmp_path / "fired").mkdir()
    product = make_product(
        environment={
            "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES),
            "WOODFROG_FAULTS": f"checkpoint.{phase}.after:kill:{1 if phase == 'cpu' else 2}",
            "WOODFROG_FAULTS_STATE": str(tmp_path / "fired"),
        }
    )
    target = learned(product)
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.checkpoint(target, cpu=True)
    product.wait_for_new_daemon(daemon)
    target.wait_steps(2)
    target.wait_for(lambda _: not state_mappings(target.pid), "that the state's mapping is given back")
    result = product.checkpoint(target, stop=True)
    assert result["control_file_bytes"] == FILE_BYTES
    product.restore(result["image"], target.log).check_runs_right()


@pytest.mark.parametrize("action", ["error", "kill"])
def test_a_restore_that_fails_behind_criu_leaves_nothing(
    make_product: Callable[..., Product], tmp_path: Path, action: str
) -> None:
    (tmp_path / "fired").mkdir()
    product = make_product(
        environment={
            "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES),
            "WOODFROG_FAULTS": f"restore.cpu.after:{action}",
            "WOODFROG_FAULTS_STATE": str(tmp_path / "fired"),
        }
    )
    target = learned(product)
    image = product.checkpoint(target, stop=True)["image"]
    daemon = product.daemon_pid()
    with pytest.raises(WoodfrogError):
        product.restore(image, target.log)
    if action == "kill":
        product.wait_for_new_daemon(daemon)
    assert not target.alive
    product.restore(image, target.log).check_runs_right()


def test_damage_of_it_ends_the_restore(product: Product) -> None:
    target = learned(product)
    image = product.checkpoint(target, stop=True)["image"]
    (file,) = manifest_of(product, image).mapped_files
    with ImageRepository(product.store_path) as store:
        from product import damage_chunk

        damage_chunk(store, file.digests[:32])
    with pytest.raises(WoodfrogError):
        product.restore(image, target.log)
    assert not target.alive


def test_every_process_of_a_job_has_its_own(product: Product) -> None:
    job = product.collective(2)
    product.checkpoint(job, cpu=False)
    result = product.checkpoint(job, stop=True)
    files = manifest_of(product, result["image"]).mapped_files
    assert len(files) == 2
    assert len({file.pid for file in files}) == len({file.mapped_as for file in files}) == 2
    restored = product.restore(result["image"], job.log)
    restored.wait_steps(2)
    os.kill(restored.pid, signal.SIGTERM)


def test_without_a_tmpfs_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_files, "SHARED_MEMORY", tmp_path)
    if control_files.files.is_in_memory(tmp_path):
        assert control_files.open_in_memory(tmp_path, 1 << 50) is None
    else:
        assert control_files.open_in_memory(tmp_path, MIB) is None
    assert control_files.open_in_memory(tmp_path / "gone", MIB) is None
