"""A target that runs on while its snapshot drains: whatever it does then, the image is its memory when it came to rest.

The drain is held at its fault point until the target has written, so that both overlap for certain. More examples:
WOODFROG_CONCURRENT_EXAMPLES (default 3).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held import Holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product import DEADLINE_S, Product, new_root
from scribbler import Scribbler
from scribbling import CHUNK, STEPS, check_images, contents, do

from woodfrog.errors import NoSpaceError, UsageError
from woodfrog.image.repository import ImageRepository
from woodfrog.target import procfs

EXAMPLES = int(os.environ.get("WOODFROG_CONCURRENT_EXAMPLES", "3"))
MIB = 1 << 20
HASH, DRAIN, SNAPSHOT = "checkpoint.hash.before", "checkpoint.drain.before", "checkpoint.snapshot.before"
WRITTEN = "store.pack.written"  # by the first of the batches, the others are still to drain
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
LAUNCHES = st.one_of(
    st.tuples(st.sampled_from(["launch", "record"]), st.integers(0, 1 << 30), st.integers(1, 4096), st.integers(0, 99)),
    st.just(("replay",)),
)


class Bench:
    """One target whose checkpoints are held while they drain; `images`: what each must hold."""

    def __init__(self, product: Product, holds: Holds, hold: str = DRAIN) -> None:
        self.product = product
        self.hold = hold
        self.holds = holds
        self.target: Scribbler = product.scribbler()
        self.images: dict[str, dict[int, bytes]] = {}

    def checkpoint(self, meanwhile: Callable[[], None], **params: Any) -> dict[str, Any]:
        """One more image; `meanwhile` is done while it drains."""
        memory = {address: bytes(content) for address, content in self.target.memory.items()}
        with self.holds.at(
            self.hold, lambda: self.product.checkpoint(self.target.process, cpu=False, **params)
        ) as made:
            meanwhile()
        result: dict[str, Any] = made.result()
        self.images[result["image"]] = memory
        return result

    def check(self) -> None:
        """Every image is what the memory was at its time, and the target has what it wrote."""
        assert self.target.shown(self.product.root) == {
            address: bytes(content) for address, content in self.target.memory.items()
        }
        check_images(self.product, self.images)


def step(target: Scribbler, one: tuple[Any, ...]) -> None:
    """One step of a random program, launches among them."""
    if one[0] == "replay":
        target.replay()
    elif one[0] in ("launch", "record") and target.memory:
        addresses = sorted(target.memory)
        address = addresses[one[1] % len(addresses)]
        words = min(one[2], len(target.memory[address]) // 4)
        if words:
            (target.launch if one[0] == "launch" else target.record)(address, words, one[3])
    elif one[0] not in ("launch", "record"):
        do(target, one)


@pytest.fixture
def make_bench(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., Bench]:
    def make(memory: str = "", hold: str = DRAIN, **settings: Any) -> Bench:
        holds = Holds(tmp_path / "holds", hold)
        environment = holds.environment | ({"WOODFROG_SIMGPU_MEMORY": memory} if memory else {})
        return Bench(make_product(environment=environment, **settings), holds, hold)

    return make


@pytest.fixture(scope="module")
def shared(targets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    holds = Holds(tmp_path_factory.mktemp("holds"), DRAIN)
    product = Product(new_root(), targets, environment=holds.environment, daemon_arguments=["--arena", "128M"])
    yield Bench(product, holds)
    product.close()


@pytest.mark.parametrize("way", ["copy", "cow", "stop"])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    before=st.lists(STEPS | LAUNCHES, min_size=2, max_size=8),
    rounds=st.lists(st.lists(STEPS | LAUNCHES, min_size=1, max_size=6), min_size=1, max_size=2),
    full=st.booleans(),
)
def test_the_image_is_the_memory_at_rest_whatever_the_target_does_while_it_drains(
    shared: Bench, way: str, before: list[Any], rounds: list[list[Any]], full: bool
) -> None:
    for address in list(shared.target.memory):
        shared.target.free(address)
    shared.images.clear()
    for one in before:
        step(shared.target, one)
    for steps in rounds:

        def meanwhile(steps: list[Any] = steps) -> None:
            for one in steps:
                step(shared.target, one)

        result = shared.checkpoint(meanwhile, concurrent=way, incremental=not full)
        moved = result["new_chunks"] or (full and result["chunks"])
        assert {one["way"] for one in result["concurrent"]} <= {way if moved else "stop"}
    shared.check()


def filled(target: Scribbler, sizes: list[int], seed: int = 1) -> list[int]:
    addresses = [target.alloc(size) for size in sizes]
    for number, address in enumerate(addresses):
        target.write(address, 0, sizes[number], seed=seed + number)
    return addresses


def test_everything_is_overwritten_while_a_copy_of_it_drains(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    addresses = filled(bench.target, [6 * MIB, CHUNK + 100, 64])
    free = bench.product.gpu_free_bytes()

    def overwrite() -> None:
        assert bench.product.gpu_free_bytes() < free  # the copy's
        for address in addresses:
            bench.target.fill(address, 0, len(bench.target.memory[address]), 0xEE)

    result = bench.checkpoint(overwrite)
    [device] = result["concurrent"]
    assert (device["way"], device["drained_bytes"]) == ("copy", 0)
    assert device["copied_bytes"] == result["gpu_new_bytes"]
    assert result["stall_parts"].keys() == {"quiesce", "handover", "control", "restore", "return", "data"}
    commands = {"quiesce", "export_memory", "release_memory", "return_batch", "resume"}
    detail = result["stall_detail"]
    assert detail["daemon"].keys() == commands | {"keeper", "dirty", "guard"} | (
        {"detach"} if result["cpu_bytes"] else set()
    )
    assert sum(detail["daemon"].values()) < result["stall_s"] - result["driver_s"]
    [agent] = detail["agents"]
    assert agent.keys() == commands
    assert agent["return_batch"]["import_call"][1] == result["gpu_handles"]
    assert "properties_call" not in agent["return_batch"]  # it is what was released
    assert device["snapshot_bytes"] == result["gpu_bytes"]
    assert bench.product.gpu_free_bytes() == free
    bench.check()


def test_nothing_is_hashed_before_the_target_runs_on_where_all_of_it_fits(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(hold=HASH)
    addresses = filled(bench.target, [6 * MIB, 3 * CHUNK + 100])

    def overwrite() -> None:
        for address in addresses:
            bench.target.fill(address, 0, len(bench.target.memory[address]), 0x77)

    bench.checkpoint(overwrite)
    bench.target.write(addresses[0], 5 * CHUNK, 100, seed=7)
    result = bench.checkpoint(overwrite)  # of what is known already nothing is drained, and all of it was copied
    [device] = result["concurrent"]
    assert device["copied_bytes"] == result["gpu_new_bytes"] < device["snapshot_bytes"] == result["gpu_bytes"]
    bench.check()


def test_a_target_that_frees_its_memory_while_it_drains_has_it_at_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    addresses = filled(bench.target, [10 * MIB, 12 * MIB])  # the interposer keeps small ones for the next allocation

    def free_all() -> None:
        before = bench.product.gpu_free_bytes()
        for address in addresses:
            bench.target.free(address)
        assert bench.product.gpu_free_bytes() == before + 22 * MIB

    bench.checkpoint(free_all, concurrent="copy")
    assert bench.product.gpu_free_bytes() == bench.product.gpu_total_bytes()
    bench.check()


def test_a_target_that_dies_while_a_copy_drains_leaves_a_complete_image(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    filled(bench.target, [4 * MIB])

    def die() -> None:
        bench.target.order("alloc", 64)  # it runs again
        os.kill(bench.target.process.pid, signal.SIGKILL)
        assert bench.target.process.process is not None
        bench.target.process.process.wait(DEADLINE_S)

    result = bench.checkpoint(die, concurrent="copy")
    assert result["state"] == "gone"
    [(reference, memory)] = bench.images.items()
    with ImageRepository(bench.product.store_path) as images, images.open(reference) as image:
        assert contents(image, bench.product.root) == memory
    assert bench.product.gpu_free_bytes() == bench.product.gpu_total_bytes()
    bench.product.call("stop")  # refused if anything were still held


def test_what_fits_neither_gpu_nor_arena_drains_first_and_is_told(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(memory="64MiB", daemon_arguments=["--arena", "32M"])  # too small for copy-on-write
    addresses = filled(bench.target, [20 * MIB, 22 * MIB])

    def work() -> None:
        for address in addresses:
            bench.target.fill(address, 0, len(bench.target.memory[address]), 0x11)

    result = bench.checkpoint(work)
    [device] = result["concurrent"]
    assert device["way"] == "copy and stop"
    assert device["copied_bytes"] + device["drained_bytes"] == result["gpu_new_bytes"]
    assert device["copied_bytes"] <= device["allowed_bytes"] < device["free_bytes"]
    bench.check()


def test_a_copy_that_does_not_fit_is_refused_with_the_figures_and_the_target_runs_on(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(memory="64MiB")
    filled(bench.target, [20 * MIB, 22 * MIB])
    with pytest.raises(NoSpaceError, match="MiB may hold copies") as refused:
        bench.checkpoint(lambda: None, concurrent="copy")
    assert refused.value.target_state == "running"
    assert "--concurrent auto" in refused.value.advice
    assert bench.product.images() == []
    bench.check()


def test_the_target_can_allocate_its_reserve_while_a_copy_drains(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(memory="128MiB", daemon_arguments=["--arena", "128M"])
    filled(bench.target, [56 * MIB])
    result = bench.checkpoint(lambda: bench.target.alloc(4 * MIB) and None, concurrent="auto")
    assert result["concurrent"][0]["copied_bytes"] > 0
    bench.check()


def test_copies_that_the_arena_cannot_hold_go_to_the_store_in_batches(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(daemon_arguments=["--arena", "64M"])
    addresses = filled(bench.target, [24 * MIB] * 4)

    def work() -> None:
        for address in addresses:
            bench.target.fill(address, 0, 24 * MIB, 0x22)

    result = bench.checkpoint(work, concurrent="copy")
    assert (result["ring"], result["concurrent"][0]["way"]) == (True, "copy")
    bench.check()


def test_what_goes_to_the_store_beside_a_running_target_lets_it_go_first(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(daemon_arguments=["--arena", "64M"], hold=WRITTEN)
    filled(bench.target, [24 * MIB] * 4)
    priorities: set[int] = set()

    def look() -> None:
        bench.target.fill(next(iter(bench.target.memory)), 0, MIB, 0x22)  # it runs
        daemon = bench.product.daemon_pid()
        priorities.update(os.getpriority(os.PRIO_PROCESS, thread) for thread in procfs.threads(daemon))

    assert bench.checkpoint(look, concurrent="copy")["ring"] is True
    assert max(priorities) == max(5, os.getpriority(os.PRIO_PROCESS, 0))  # background.give_way
    bench.check()


def test_both_a_part_that_drains_first_and_copies_go_through_an_arena_too_small_for_them_together(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(memory="160MiB", daemon_arguments=["--arena", "64M"])
    filled(bench.target, [24 * MIB] * 4)
    result = bench.checkpoint(lambda: None)
    assert (result["ring"], result["concurrent"][0]["way"]) == (True, "copy and stop")
    bench.check()


def test_a_drain_beside_a_target_that_runs_takes_no_more_than_it_may(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_BACKGROUND_RATE": "32M"})
    target = product.scribbler()
    filled(target, [8 * MIB] * 2)
    memory = {address: bytes(content) for address, content in target.memory.items()}
    result = product.checkpoint(target.process, cpu=False, concurrent="copy")
    assert result["phases"]["drain"] >= 0.5
    assert result["stall_parts"].get("data", 0.0) < 0.5, "the target waits for none of that"
    check_images(product, {result["image"]: memory})


@pytest.mark.parametrize("way", ["auto", "copy"])
def test_memory_that_is_gone_after_all_makes_the_target_wait_or_the_checkpoint_fail(
    make_product: Callable[..., Product], tmp_path: Path, way: str
) -> None:
    failing = tmp_path / "failing"
    failing.touch()
    holds = Holds(tmp_path / "holds", SNAPSHOT)
    product = make_product(environment=holds.environment | {"WOODFROG_SIMGPU_FAIL": f"@{failing}"})
    target = product.run("--idle-kib", "4096")
    try:
        with holds.at(SNAPSHOT, lambda: product.checkpoint(target, cpu=False, concurrent=way)) as made:
            failing.write_text(f"cuMemCreate:{OUT_OF_MEMORY}")
    except NoSpaceError as failure:
        told = failure.target_state
    else:
        told = made.result()["concurrent"][0]["way"]
    assert told == ("stop" if way == "auto" else "running")
    failing.write_text("")
    target.check_runs_right()


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"concurrent": "fast"}, UsageError, "no way"),
        ({"concurrent": "copy", "stop": True}, UsageError, "does not run on"),
    ],
)
def test_ways_that_there_are_not_are_refused_by_name(
    product: Product, params: dict[str, Any], error: type[Exception], words: str
) -> None:
    target = product.run()
    with pytest.raises(error, match=words):
        product.checkpoint(target, **params)
    target.check_runs_right()
