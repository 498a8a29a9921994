"""Checkpoint and restore of real processes on the simulated GPU, with real CRIU: what runs on is right to the byte."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from product import DEADLINE_S, Product

from woodfrog.cpu import criu
from woodfrog.errors import (
    BadImageError,
    NoSpaceError,
    RefusedError,
    TimeoutExceededError,
    UsageError,
    WoodfrogError,
)

SHAPES = {
    "one thread": [],
    "several threads": ["--threads", "3"],
    "a forked child": ["--child"],
    "many small launches": ["--tiny", "200", "--pace-us", "0"],
    "large buffers beside slabs": ["--kib", "4", "--buffers", "20", "--idle-kib", "6144"],
}


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "driver only"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_left_running_runs_on_right_and_its_image_is_whole(
    product: Product, shape: str, managed: bool
) -> None:
    target = product.run(*SHAPES[shape], managed=managed)
    result = product.checkpoint(target)
    assert result["image"] in product.images()
    assert result["stall_s"] > 0
    target.check_runs_right()


@pytest.mark.parametrize("managed", [True, False], ids=["managed", "driver only"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stopped_target_is_gone_and_its_image_brings_it_back(product: Product, shape: str, managed: bool) -> None:
    target = product.run(*SHAPES[shape], managed=managed)
    result = product.checkpoint(target, stop=True)
    assert not target.alive
    before = target.steps()
    restored = product.restore(result["image"], target.log, verify=True)
    restored.wait_for(lambda _: restored.steps() > before, "a step after the restore")
    restored.check_runs_right()


def test_one_image_can_be_restored_again_and_again(product: Product) -> None:
    target = product.run()
    image = product.checkpoint(target, stop=True)["image"]
    for _ in range(3):
        restored = product.restore(image, target.log)
        restored.wait_steps()
        product.end(restored)


def test_a_restored_target_can_be_checkpointed_and_restored_again(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    log = target.log
    for _ in range(3):
        image = product.checkpoint(target, stop=True)["image"]
        target = product.restore(image, log)
        target.wait_steps()
    target.check_runs_right()


def test_large_allocations_that_share_blocks_are_few_handles_here_and_in_images(
    make_product: Callable[..., Product],
) -> None:
    shape = ["--kib", "3072", "--buffers", "12", "--idle-kib", "6144"]
    product = make_product(environment={"WOODFROG_POOL_MIB": "64"})
    target = product.run(*shape)
    assert product.checkpoint(target, cpu=False)["gpu_handles"] <= 3
    target.wait_steps()
    image = product.checkpoint(target, stop=True)["image"]
    restored = product.restore(image, target.log, verify=True)
    restored.check_runs_right()


def test_checkpoints_of_one_name_are_numbered_and_each_is_its_own_moment(product: Product) -> None:
    target = product.run(name="counted")
    images = []
    for _ in range(3):
        target.wait_steps()
        images.append(product.checkpoint(target)["image"])
    assert images == ["counted@1", "counted@2", "counted@3"]
    assert product.images() == images
    target.check_runs_right()


def test_data_that_does_not_fit_the_arena_streams_through_a_ring(make_product: Callable[..., Product]) -> None:
    product = make_product(daemon_arguments=["--arena", "64M"])
    target = product.run("--idle-kib", str(96 << 10))
    result = product.checkpoint(target)
    assert result["ring"] is True
    target.wait_steps()
    image = product.checkpoint(target, stop=True)["image"]
    assert image in product.images()
    restored = product.restore(image, target.log, verify=True)
    restored.check_runs_right()


def test_an_image_without_a_cpu_side_is_whole_and_says_what_it_cannot_do(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    image = product.checkpoint(target, cpu=False)["image"]
    assert product.images() == [image]
    with pytest.raises(RefusedError, match="no CPU side"):
        product.call("restore", image=image, store=str(product.store_path))
    with pytest.raises(UsageError):
        product.checkpoint(target, cpu=False, stop=True)
    target.check_runs_right()


def test_a_target_moves_to_another_gpu(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "2"})
    target = product.run("--idle-kib", "4096")
    image = product.checkpoint(target, stop=True)["image"]
    restored = product.restore(image, target.log, gpu_map={"0": "1"}, verify=True)
    restored.wait_steps()
    devices = product.call("doctor")["devices"]
    [row] = product.call("ps")
    assert len(devices) == 2
    assert row["state"] == "running"
    restored.check_runs_right()


@pytest.mark.parametrize("arena", ["64M", "256M"], ids=["ring", "arena"])
def test_a_process_on_several_gpus_keeps_the_data_of_each(make_product: Callable[..., Product], arena: str) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "3"}, daemon_arguments=["--arena", arena])
    target = product.run("--threads", "2", "--spread", "--idle-kib", str(70 << 10))
    result = product.checkpoint(target)
    assert result["ring"] is (arena == "64M")
    target.wait_steps()
    image = product.checkpoint(target, stop=True)["image"]
    restored = product.restore(image, target.log, gpu_map={"0": "1", "1": "2", "2": "0"}, verify=True)
    restored.wait_steps()
    restored.check_runs_right()


def test_a_process_on_several_gpus_is_suspended_and_resumed(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "3"})
    target = product.run("--threads", "2", "--spread", "--idle-kib", "4096")
    for _ in range(3):
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        target.wait_steps()
    target.check_runs_right()


def test_work_that_does_not_come_to_rest_times_out_and_the_target_runs_on(product: Product) -> None:
    hold = product.root / "hold"
    target = product.run("--hold", str(hold))
    hold.touch()
    target.wait_for(lambda _: True, "anything")
    with pytest.raises(TimeoutExceededError):
        # The host function spins while the file is there; the next launch of it is what keeps the stream busy.
        product.checkpoint(target, timeout_s=0.5)
    hold.unlink()
    target.check_runs_right()
    assert product.images() == []


def test_a_store_without_room_is_refused_before_the_target_is_touched(product: Product) -> None:
    target = product.run()
    with pytest.raises((NoSpaceError, RefusedError)) as raised:
        product.call("checkpoint", target=target.pid, store="/proc/woodfrog")
    assert raised.value.target_state == "untouched"
    target.check_runs_right()


def test_a_target_that_has_begun_to_exit_is_refused_and_ends_as_it_would_have(product: Product) -> None:
    linger = product.root / "linger"
    linger.touch()
    target = product.run("--linger", str(linger))
    os.kill(target.pid, signal.SIGTERM)
    target.wait_for(lambda lines: "lingering" in lines, "exit handler")
    for verb in ("checkpoint", "suspend"):
        with pytest.raises(RefusedError, match="ending") as raised:
            product.call(verb, target=target.pid)
        assert raised.value.target_state == "untouched"
    assert product.images() == []
    linger.unlink()
    assert target.process is not None
    assert target.process.wait(DEADLINE_S) == 0


def test_damaged_data_is_refused_by_the_restore_that_meets_it_and_nothing_is_left(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    image = product.checkpoint(target, stop=True)["image"]
    product.damage_gpu_chunk(image)
    with pytest.raises(BadImageError):
        product.restore(image, target.log)
    assert not target.alive
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    assert list(product.runtime.glob("restore-*")) == []


def test_damaged_pages_end_the_restore_that_meets_them_before_a_process_is_there(product: Product) -> None:
    target = product.run()
    image = product.checkpoint(target, stop=True)["image"]
    product.damage_cpu_page(image)
    with pytest.raises(BadImageError, match="not what its manifest says"):
        product.restore(image, target.log)
    assert not target.alive
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    assert list(product.runtime.glob("restore-*")) == []
    assert "pie" not in (product.runtime / "criu-restore.log").read_text()


def test_an_image_that_lacks_chunks_is_refused_before_anything_starts(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    image = product.checkpoint(target, stop=True)["image"]
    for index in (product.store_path / "index").iterdir():
        index.unlink()
    product.kill_daemon()  # the one that wrote it knows its index by heart
    with pytest.raises(BadImageError, match=rf"{image}.*[0-9]+ of [0-9]+ chunks"):
        product.restore(image, target.log)
    assert not (product.runtime / "criu-restore.log").exists()
    assert product.gpu_free_bytes() == product.gpu_total_bytes()


def test_an_error_of_criu_names_its_log_where_that_is_afterwards(make_product: Callable[..., Product]) -> None:
    product = make_product()
    failing = product.root / "criu"
    failing.write_text(
        "#!/bin/bash\n"
        f'[ "$1" = restore ] || exec {criu.find().path} "$@"\n'
        'while [ "$1" != --work-dir ]; do shift; done\n'
        'echo "(00.1) Error (criu/cr-restore.c:1): it failed for the test" > "$2/restore.log"\n'
        "exit 1\n"
    )
    failing.chmod(0o700)
    product.environment["WOODFROG_CRIU"] = str(failing)
    target = product.run()
    image = product.checkpoint(target, stop=True)["image"]
    with pytest.raises(WoodfrogError) as raised:
        product.restore(image, target.log)
    log = product.runtime / "criu-restore.log"
    assert raised.value.details["log"] == str(log)
    assert str(log) in raised.value.advice
    assert "restore-" not in raised.value.advice
    assert "it failed for the test" in log.read_text()
    assert list(product.runtime.glob("restore-*")) == []


def test_restoring_beside_the_living_original_is_refused(product: Product) -> None:
    target = product.run()
    image = product.checkpoint(target)["image"]
    with pytest.raises(RefusedError, match=str(target.pid)):
        product.call("restore", image=image, store=str(product.store_path))
    target.check_runs_right()


def test_a_full_gpu_is_refused_before_a_restore_begins(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_MEMORY": "256MiB"}, daemon_arguments=["--arena", "256M"])
    target = product.run("--idle-kib", str(96 << 10))
    image = product.checkpoint(target, stop=True)["image"]
    other = product.run("--idle-kib", str(160 << 10))
    with pytest.raises(NoSpaceError) as raised:
        product.call("restore", image=image, store=str(product.store_path))
    assert raised.value.device == 0
    other.finish()
    product.restore(image, target.log).check_runs_right()


def test_events_tell_every_phase_and_the_bytes(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    events: list[dict[str, object]] = []
    with product.client() as client:
        result = client.call("checkpoint", {"target": target.pid, "store": str(product.store_path)}, events.append)
    ended = [event["phase"] for event in events if event["event"] == "end"]
    assert set(ended) == set(result["phases"])
    drained = [event for event in events if event["event"] == "progress" and event["phase"] == "drain"]
    assert drained[-1]["bytes_done"] == drained[-1]["bytes_total"] == result["gpu_new_bytes"] > 0


def test_the_process_that_uses_the_gpu_may_be_a_child_of_what_was_started(product: Product) -> None:
    target = product.run_script('"$@" & wait')
    result = product.checkpoint(target, stop=True)
    restored = product.restore(result["image"], target.log)
    restored.wait_steps()
    assert result["pid"] != restored.pid  # the shell is the root, its child has the GPU
    product.end(restored)


def test_criu_works_in_memory_where_that_can_be_had(product: Product) -> None:
    target = product.run()
    restored = product.restore(product.checkpoint(target, stop=True)["image"], target.log)
    folder = f"/proc/{product.daemon_pid()}/fd/"
    assert f"CRIU's files go to {folder}" in product.daemon_log()
    assert f"CRIU's files are read in {folder}" in product.daemon_log()
    restored.check_runs_right()
