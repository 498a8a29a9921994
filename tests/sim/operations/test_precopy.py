"""Rounds of copies before a target comes to rest: they spare it time, and never change what the image holds.

The rounds are held at fault points until the target has written. More examples: WOODFROG_CONCURRENT_EXAMPLES
(default 3).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held import Holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product import Product, new_root
from scribbler import Scribbler
from scribbling import CHUNK, STEPS, check_images, do

from woodfrog.errors import NoDaemonError, RefusedError, UsageError, WoodfrogError

EXAMPLES = int(os.environ.get("WOODFROG_CONCURRENT_EXAMPLES", "3"))
MIB = 1 << 20
HASHED, QUIESCE = "precopy.round.hashed", "checkpoint.quiesce.before"


class Bench:
    """One target, and what every image of it must hold."""

    def __init__(self, product: Product, holds: Holds) -> None:
        self.product = product
        self.holds = holds
        self.target: Scribbler = product.scribbler()
        self.images: dict[str, dict[int, bytes]] = {}

    def checkpoint(self, at: str, meanwhile: Callable[[], None], **params: Any) -> dict[str, Any]:
        """One more image; `meanwhile` is done at that point, before the target comes to rest."""
        params = {"cpu": False, **params}
        with self.holds.at(at, lambda: self.product.checkpoint(self.target.process, precopy=True, **params)) as made:
            meanwhile()
            memory = {address: bytes(content) for address, content in self.target.memory.items()}
        result: dict[str, Any] = made.result()
        self.images[result["image"]] = memory
        return result

    def check(self) -> None:
        check_images(self.product, self.images)

    def written(self, size_bytes: int, seed: int) -> int:
        address = self.target.alloc(size_bytes)
        self.target.write(address, 0, size_bytes, seed=seed)
        return address


@pytest.fixture
def make_bench(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., Bench]:
    def make(**settings: Any) -> Bench:
        holds = Holds(tmp_path / "holds", HASHED, QUIESCE)
        return Bench(make_product(environment=holds.environment, **settings), holds)

    return make


@pytest.fixture(scope="module")
def shared(targets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    holds = Holds(tmp_path_factory.mktemp("holds"), HASHED, QUIESCE)
    product = Product(new_root(), targets, environment=holds.environment, daemon_arguments=["--arena", "128M"])
    yield Bench(product, holds)
    product.close()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    before=st.lists(STEPS, min_size=2, max_size=8),
    rounds=st.lists(
        st.tuples(st.sampled_from([HASHED, QUIESCE]), st.lists(STEPS, min_size=1, max_size=6)), min_size=1, max_size=2
    ),
    way=st.sampled_from(["copy", "stop"]),
)
def test_the_image_is_the_memory_at_rest_whatever_the_target_does_during_the_rounds(
    shared: Bench, before: list[Any], rounds: list[Any], way: str
) -> None:
    for address in list(shared.target.memory):
        shared.target.free(address)
    shared.images.clear()
    for one in before:
        do(shared.target, one)
    for point, steps in rounds:

        def meanwhile(steps: list[Any] = steps) -> None:
            for one in steps:
                do(shared.target, one)

        shared.checkpoint(point, meanwhile, concurrent=way)
    shared.check()


def test_what_the_rounds_have_copied_does_not_move_while_the_target_waits(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    address = bench.written(8 * MIB, seed=1)
    result = bench.checkpoint(QUIESCE, lambda: bench.target.write(address, 5 * CHUNK, CHUNK, seed=2))
    [device] = result["concurrent"]
    assert device["copied_bytes"] == CHUNK
    assert result["precopy"]["used_bytes"] == 8 * MIB - CHUNK == result["gpu_new_bytes"] - CHUNK
    assert result["precopy"]["rounds"][0] == 8 * MIB
    assert result["stall_s"] > result["stall_parts"]["precopy"] == result["precopy"]["pause_s"] > 0
    bench.check()


def test_memory_that_changed_between_hash_and_copy_and_changed_back_is_right(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    address = bench.written(2 * MIB, seed=1)
    with_other = []

    def change() -> None:
        bench.target.write(address, 0, 2 * MIB, seed=7)
        with_other.append(True)

    # The copies hold what was written after the hash; at rest the memory is what was hashed.
    with bench.holds.at(QUIESCE, lambda: bench.checkpoint(HASHED, change)):
        assert with_other
        bench.target.write(address, 0, 2 * MIB, seed=1)
    [reference] = bench.images
    bench.images[reference] = {address: bytes(bench.target.memory[address])}
    bench.check()


def test_a_target_that_is_to_end_has_what_is_settled_stored_before_it_waits(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    address = bench.written(6 * MIB, seed=1)
    changing = bench.written(2 * MIB, seed=2)
    result = bench.checkpoint(QUIESCE, lambda: bench.target.write(changing, 0, CHUNK, seed=3), stop=True, cpu=True)
    assert result["precopy"]["stored_bytes"] == 8 * MIB
    assert result["gpu_new_bytes"] == 8 * MIB  # the chunk that changed after all counts once
    bench.check()
    bench.target.process = bench.product.restore(result["image"], bench.target.process.log, verify=True)
    assert bench.target.shown(bench.product.root).keys() == {address, changing}
    assert bench.target.shown(bench.product.root) == bench.target.memory


def test_a_small_arena_holds_a_part_and_the_rest_moves_in_the_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(daemon_arguments=["--arena", "64M"])
    for seed in range(4):
        bench.written(24 * MIB, seed=seed)
    result = bench.checkpoint(QUIESCE, lambda: None, concurrent="stop")
    assert 0 < result["precopy"]["used_bytes"] < 96 * MIB
    assert result["ring"] is True
    bench.check()


def test_memory_that_is_freed_during_the_rounds_is_no_obstacle(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    first, second = bench.written(10 * MIB, seed=1), bench.written(10 * MIB, seed=2)

    def free() -> None:
        bench.target.free(first)
        bench.target.write(second, 0, MIB, seed=3)

    bench.checkpoint(HASHED, free)
    bench.check()
    assert bench.product.gpu_free_bytes() == bench.product.gpu_total_bytes() - 10 * MIB


def test_precopy_is_refused_where_it_makes_no_sense(product: Product) -> None:
    managed, other = product.run(), product.run(managed=False)
    with pytest.raises(UsageError, match="--full"):
        product.checkpoint(managed, precopy=True, incremental=False)
    with pytest.raises(RefusedError, match="driver keeps"):
        product.checkpoint(other, precopy=True)
    managed.check_runs_right()
    other.check_runs_right()


@pytest.mark.parametrize("point", ["precopy.peek.exported", HASHED])
def test_a_failure_or_a_killed_daemon_within_a_round_leaves_the_target_running_right(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    state = tmp_path / "fired"
    state.mkdir()
    faults = {"WOODFROG_FAULTS": f"{point}:error,{point}:kill:2", "WOODFROG_FAULTS_STATE": str(state)}
    product = make_product(environment=faults)
    target = product.run("--idle-kib", "2048")
    with pytest.raises(WoodfrogError, match="injected") as failed:
        product.checkpoint(target, cpu=False, precopy=True)
    assert failed.value.target_state == "running"
    target.wait_steps(2)
    daemon = product.daemon_pid()
    with pytest.raises(NoDaemonError):
        product.checkpoint(target, cpu=False, precopy=True)
    product.wait_for_new_daemon(daemon)
    target.wait_steps(2)
    product.checkpoint(target, cpu=False, precopy=True)
    target.check_runs_right()
