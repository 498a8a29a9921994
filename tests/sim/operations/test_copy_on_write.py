"""Copy-on-write: a target writes while its snapshot is captured from the very memory that it writes.

The drain is held at its fault point, so that whatever the target does has to be captured for it first: without that the
image would be wrong, or the checkpoint would say that it had to be taken again.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held import Holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher import Launcher
from product import DEADLINE_S, Product, new_root, wait_for_path
from scribbler import Scribbler
from scribbling import CHUNK, check_images, contents

from woodfrog.errors import NoSpaceError, UsageError, WoodfrogError
from woodfrog.image.repository import ImageRepository

EXAMPLES = int(os.environ.get("WOODFROG_CONCURRENT_EXAMPLES", "3"))
MIB = 1 << 20
DRAIN = "checkpoint.drain.before"
WANTED = "checkpoint.cow.wanted"
SEEDS = itertools.count(1000)


class Held:
    """A product whose checkpoints by copy-on-write are held while they drain."""

    def __init__(self, product: Product, holds: Holds) -> None:
        self.product = product
        self.holds = holds

    def checkpoint(self, target: Any, meanwhile: Callable[[], None], **params: Any) -> dict[str, Any]:
        params = {"cpu": False, "concurrent": "cow", **params}
        with self.holds.at(DRAIN, lambda: self.product.checkpoint(target.process, **params)) as made:
            meanwhile()
        result: dict[str, Any] = made.result()
        return result

    def contents(self, reference: str) -> dict[int, bytes]:
        with ImageRepository(self.product.store_path) as images, images.open(reference) as image:
            assert image.verify() == []
            return contents(image, self.product.root)


@pytest.fixture
def make_held(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., Held]:
    def make(
        memory: str = "", points: tuple[str, ...] = (DRAIN,), gpu: dict[str, str] | None = None, **settings: Any
    ) -> Held:
        holds = Holds(tmp_path / "holds", *points)
        environment = holds.environment | ({"WOODFROG_SIMGPU_MEMORY": memory} if memory else {}) | (gpu or {})
        return Held(make_product(environment=environment, **settings), holds)

    return make


@pytest.fixture(scope="module")
def shared(targets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    holds = Holds(tmp_path_factory.mktemp("holds"), DRAIN)
    product = Product(new_root(), targets, environment=holds.environment, daemon_arguments=["--arena", "128M"])
    yield Held(product, holds)
    product.close()


def memory_of(target: Scribbler) -> dict[int, bytes]:
    return {address: bytes(content) for address, content in target.memory.items()}


def filled(target: Scribbler, sizes: list[int], seed: int = 1) -> list[int]:
    addresses = [target.alloc(size) for size in sizes]
    for number, address in enumerate(addresses):
        target.write(address, 0, sizes[number], seed=seed + number)
    return addresses


# ── what is written is captured first ───────────────────────────────────────────────────────────────────────────────


def test_what_the_target_overwrites_is_captured_before_and_told(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.scribbler()
    addresses = filled(target, [6 * MIB, CHUNK + 100, 64])
    before = memory_of(target)

    def overwrite() -> None:
        for address in addresses:
            target.fill(address, 0, len(target.memory[address]), 0xEE)

    result = held.checkpoint(target, overwrite)
    [device] = result["concurrent"]
    assert (device["way"], device["drained_bytes"], device["copied_bytes"]) == ("cow", 0, 0)
    assert device["early_bytes"] == device["cow_bytes"] == result["gpu_new_bytes"]
    assert result["copy_on_write"]["waits"] > 0
    assert result["copy_on_write"]["waited_s"] > 0
    assert result["retaken"] == {}
    check_images(held.product, {result["image"]: before})
    assert target.shown(held.product.root) == memory_of(target)
    assert held.product.gpu_free_bytes() == held.product.gpu_total_bytes() - 8 * MIB  # its own: 6, and a slab


def test_only_what_a_copy_names_is_captured_for_it(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.scribbler()
    [large, other] = filled(target, [32 * MIB, 4 * MIB])
    before = memory_of(target)
    result = held.checkpoint(target, lambda: target.write(large, 9 * MIB + 5, 100, seed=9))
    assert result["concurrent"][0]["early_bytes"] == 2 * MIB  # the unit that it lies in
    assert result["copy_on_write"]["waits"] == 1
    check_images(held.product, {result["image"]: before})
    result = held.checkpoint(target, lambda: target.write(other, 0, 100, seed=8))
    assert result["concurrent"][0]["early_bytes"] == 0  # nothing is new there
    assert result["concurrent"][0]["cow_bytes"] == CHUNK


def test_memory_with_nothing_new_between_two_that_have_is_passed_over(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.scribbler()
    [low, _, high] = filled(target, [4 * MIB, 6 * MIB, 4 * MIB])
    held.checkpoint(target, lambda: None)
    for address in (low, high):
        target.write(address, 0, 4 * MIB, seed=20)
    before = memory_of(target)
    result = held.checkpoint(target, lambda: target.write(high, 0, 100, seed=21))  # the rest is drained in one batch
    assert result["gpu_new_bytes"] == 4 * MIB  # both the same
    target.write(low, 0, 4 * MIB, seed=22)
    target.write(high, 0, 4 * MIB, seed=23)
    after = memory_of(target)
    last = held.checkpoint(target, lambda: None)
    assert last["gpu_new_bytes"] == 8 * MIB
    check_images(held.product, {result["image"]: before, last["image"]: after})


def test_a_kernel_has_all_of_the_allocations_that_it_is_given_captured(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.scribbler()
    [large, other] = filled(target, [6 * MIB, 4 * MIB])
    before = memory_of(target)
    result = held.checkpoint(target, lambda: target.launch(large, 16, 3))
    assert result["concurrent"][0]["early_bytes"] == 6 * MIB
    check_images(held.product, {result["image"]: before})
    assert target.shown(held.product.root)[other] == before[other]


def test_a_ring_that_is_full_costs_waiting_and_nothing_else(make_held: Callable[..., Held]) -> None:
    held = make_held(memory="64MiB", daemon_arguments=["--arena", "128M"])
    target = held.product.scribbler()
    addresses = filled(target, [22 * MIB, 22 * MIB])
    before = memory_of(target)

    def overwrite() -> None:
        for address in addresses:
            target.fill(address, 0, len(target.memory[address]), 0x11)

    result = held.checkpoint(target, overwrite, concurrent="auto")
    [device] = result["concurrent"]
    assert device["way"] == "cow"  # by itself: what is new does not fit into the GPU's memory once more
    assert device["early_bytes"] == 44 * MIB > device["allowed_bytes"]
    check_images(held.product, {result["image"]: before})
    assert target.shown(held.product.root) == memory_of(target)


def test_memory_that_is_freed_stays_until_it_is_captured_and_no_longer(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.scribbler()
    addresses = filled(target, [10 * MIB, 12 * MIB, 64])
    before = memory_of(target)

    def free_all() -> None:
        free = held.product.gpu_free_bytes()
        for address in addresses:
            target.free(address)
        assert held.product.gpu_free_bytes() == free  # it is the daemon's still
        again = filled(target, [10 * MIB, 64], seed=50)  # the small one in the same slab
        assert addresses[2] in again

    result = held.checkpoint(target, free_all)
    check_images(held.product, {result["image"]: before})
    assert held.product.gpu_free_bytes() == held.product.gpu_total_bytes() - 12 * MIB
    assert target.shown(held.product.root) == memory_of(target)


def test_a_target_that_dies_leaves_a_complete_image(make_product: Callable[..., Product], tmp_path: Path) -> None:
    holds, trace = Holds(tmp_path / "holds", DRAIN), tmp_path / "trace"
    held = Held(make_product(environment={**holds.environment, "WOODFROG_FAULTS_TRACE": str(trace)}), holds)
    target = held.product.scribbler()
    [address] = filled(target, [4 * MIB])
    before = memory_of(target)

    def die() -> None:
        target.write(address, 0, 100, seed=4)
        wait_for_path(trace, "checkpoint.return.after")
        os.kill(target.process.pid, signal.SIGKILL)
        assert target.process.process is not None
        target.process.process.wait(DEADLINE_S)

    result = held.checkpoint(target, die)
    assert result["state"] == "gone"
    assert held.contents(result["image"]) == before
    assert held.product.gpu_free_bytes() == held.product.gpu_total_bytes()
    held.product.call("stop")  # refused if anything were still held


# ── every way to write ──────────────────────────────────────────────────────────────────────────────────────────────


def words(address: int, first: int = 0, count: int = 64, value: int = 7) -> bytes:
    return struct.pack("<QIII", address, first, count, value)


class Writers:
    """A launcher and what each way to write needs."""

    def __init__(self, held: Held, *, track: bool) -> None:
        self.target: Launcher = held.product.launcher(track=track)
        ptx = held.product.build / "launcher.ptx"
        self.module, self.library = self.target.load(ptx), self.target.load(ptx, "library")
        self.memory = [self.target.alloc(3 * MIB) for _ in range(2)]
        self.mapped = int(self.target.order("map", 4 * MIB), 16)
        for number, address in enumerate([*self.memory, self.mapped]):
            self.target.write(address, 3 * MIB, number + 1)
        self.graph = self.record()

    def record(self) -> int:
        """A graph with one launch on the first allocation."""
        self.target.order("capture")
        self.target.launch(self.module, "put", words(self.memory[0]))
        return int(self.target.order("captured"))

    def all(self) -> list[bytes]:
        return [self.target.get(address, 4096) for address in (*self.memory, self.mapped)]


def launches(how: str) -> Callable[[Writers], None]:
    return lambda w: w.target.launch(w.module, "put", words(w.memory[0]), how=how)


def copies(how: str) -> Callable[[Writers], object]:
    return lambda w: w.target.order("copy", how, f"{w.memory[0]:x}", f"{w.memory[1]:x}", 2048)


def fills(width: int) -> Callable[[Writers], object]:
    return lambda w: w.target.order("set", width, f"{w.memory[0]:x}", 64, 1)


def update(writers: Writers) -> None:
    """The graph writes the second allocation from now on."""
    writers.target.order("capture")
    writers.target.launch(writers.module, "put", words(writers.memory[1]))
    writers.target.order("update", writers.graph)
    writers.target.order("again", writers.graph)


def move(writers: Writers) -> None:
    """The same memory at another address is written there."""
    writers.mapped = int(writers.target.order("move", f"{writers.mapped:x}"), 16)
    writers.target.launch(writers.module, "put", words(writers.mapped))


def through_map(target: Launcher, module: int, address: int) -> None:
    """A kernel takes the address out of a tensor map that the driver has encoded."""
    stored = int(target.order("encode", f"{address:x}"), 16)
    parameters = struct.pack("<Q120xQI", stored, stored ^ address, 9)
    target.launch(module, "through_map", parameters, block=(64, 1, 1))


WAYS: dict[str, Callable[[Writers], object]] = {
    **{f"a launch, {how}": launches(how) for how in ("params", "extra", "ex", "cooperative")},
    "a library's kernel": lambda w: w.target.launch(w.library, "put", words(w.memory[0])),
    "a graph": lambda w: w.target.order("again", w.graph),
    "an updated graph": update,
    **{f"a copy, {how}": copies(how) for how in ("plain", "async", "peer", "2d", "3d")},
    **{f"a fill, {width} bits": fills(width) for width in (8, 16, 32)},
    "a box": lambda w: w.target.order("box", f"{w.memory[0]:x}", 64, 16, 4, 9),
    "a value": lambda w: w.target.order("value", f"{w.memory[0]:x}", 77),
    "a copy from the host": lambda w: w.target.put(w.memory[0], b"\x5a" * 300),
    "a launch, the application's own mapping": lambda w: w.target.launch(w.module, "put", words(w.mapped)),
    "a launch, mapped elsewhere": move,
    "a tensor map": lambda w: through_map(w.target, w.module, w.memory[0]),
}


@pytest.fixture(scope="module", params=[False, True], ids=["", "followed"])
def writers(request: pytest.FixtureRequest, shared: Held) -> Writers:
    return Writers(shared, track=request.param)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_waits_for_what_it_writes(shared: Held, writers: Writers, way: str) -> None:
    for address in (*writers.memory, writers.mapped):
        writers.target.write(address, 3 * MIB, next(SEEDS))  # new again
    before = writers.all()
    addresses = [*writers.memory, writers.mapped]
    result = shared.checkpoint(writers.target, lambda: WAYS[way](writers) and None)
    assert result["retaken"] == {}
    assert result["concurrent"][0]["early_bytes"] > 0
    image = shared.contents(result["image"])
    assert [image[address][:4096] for address in addresses] == before
    assert writers.all() != before  # it was written


def test_a_kernel_with_a_map_that_hides_its_address_waits_for_everything(make_held: Callable[..., Held]) -> None:
    held = make_held(gpu={"WOODFROG_SIMGPU_HIDDEN_MAPS": "1"})
    target = held.product.launcher(track=False)
    module = target.load(held.product.build / "launcher.ptx")
    address, other = (target.alloc(3 * MIB) for _ in range(2))
    for one in (address, other):
        target.write(one, 3 * MIB, next(SEEDS))
    before = [target.get(one, 4096) for one in (address, other)]
    result = held.checkpoint(target, lambda: through_map(target, module, address))
    assert result["retaken"] == {}
    assert result["copy_on_write"]["early_bytes"] == result["gpu_new_bytes"]
    image = held.contents(result["image"])
    assert [image[one][:4096] for one in (address, other)] == before
    assert target.get(address, 4096) != before[0]


# ── what nobody could see coming ────────────────────────────────────────────────────────────────────────────────────


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(places=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3 * MIB // 4 - 1)), min_size=1, max_size=4))
def test_writes_through_pointers_in_memory_are_found_and_the_image_taken_again(
    shared: Held, writers: Writers, places: list[tuple[int, int]]
) -> None:
    target = writers.target
    for address in (*writers.memory, writers.mapped):
        target.write(address, 3 * MIB, next(SEEDS))
    pointers = [writers.memory[number] + 4 * word for number, word in places]
    table = target.alloc(8 * len(pointers))
    target.put(table, struct.pack(f"<{len(pointers)}Q", *pointers))

    def write_unseen() -> None:
        parameters = struct.pack("<QII", table, len(pointers), 5)
        target.launch(writers.module, "through_table", parameters, block=(len(pointers), 1, 1))

    result = shared.checkpoint(target, write_unseen)
    assert result["retaken"]["kernels"] == ["through_table"]
    assert "through_table" in result["retaken"]["reason"]
    assert {device["way"] for device in result["concurrent"]} == {"stop"}
    assert result["stall_s"] > result["retaken"]["stall_s"] > 0
    image = shared.contents(result["image"])
    assert image[table] == struct.pack(f"<{len(pointers)}Q", *pointers)
    for address in (*writers.memory, writers.mapped):
        for at in range(0, 3 * MIB, MIB):
            assert image[address][at : at + MIB] == target.get(address + at, MIB)
    assert len(shared.product.images()) == len(set(shared.product.images()))
    target.free(table)


# ── what may go wrong ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_that_waits_goes_on_when_the_daemon_is_killed(make_held: Callable[..., Held]) -> None:
    held = make_held(points=(DRAIN, WANTED))
    target = held.product.scribbler()
    [address] = filled(target, [4 * MIB])
    killed = held.product.daemon_pid()

    def write_and_kill() -> None:
        def fill() -> str:
            return target.answer(target.give("fill", f"{address:x}", 4 * MIB, 0x33), "fill")

        with held.holds.at(WANTED, fill) as answered:
            assert not answered.done()
            os.kill(killed, signal.SIGKILL)
        target.memory[address][:] = b"\x33" * (4 * MIB)

    with pytest.raises(WoodfrogError):
        held.checkpoint(target, write_and_kill)
    held.product.wait_for_new_daemon(killed)
    assert target.shown(held.product.root) == memory_of(target)
    assert held.product.images() == []
    assert held.product.checkpoint(target.process)["state"] == "running"
    check_images(held.product, {held.product.images()[0]: memory_of(target)})


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("checkpoint.cow.armed", "error"),
        (WANTED, "error"),
        ("checkpoint.cow.batch", "enospc"),
        ("checkpoint.write.before", "enospc"),
    ],
)
def test_a_failure_while_it_runs_costs_the_image_only(
    make_product: Callable[..., Product], tmp_path: Path, point: str, action: str
) -> None:
    holds = Holds(tmp_path, DRAIN)
    environment = dict(holds.environment)
    environment["WOODFROG_FAULTS"] += f",{point}:{action}"
    held = Held(make_product(environment=environment), holds)
    target = held.product.scribbler()
    [address, other] = filled(target, [4 * MIB, 6 * MIB])

    def write() -> None:
        if point == "checkpoint.cow.armed":
            wait_for_path(tmp_path / f"{point}:{action}:1")  # it runs again only when this has been taken back
        else:
            target.fill(address, 0, 4 * MIB, 0x44)

    error = NoSpaceError if action == "enospc" else WoodfrogError
    with pytest.raises(error) as raised:
        held.checkpoint(target, write)
    assert raised.value.target_state == "running"
    assert held.product.images() == []
    target.fill(other, 0, 6 * MIB, 0x55)
    before = memory_of(target)
    result = held.checkpoint(target, lambda: target.fill(address, 0, 4 * MIB, 0x66))
    assert result["concurrent"][0]["early_bytes"] > 0
    check_images(held.product, {result["image"]: before})
    assert held.product.gpu_free_bytes() == held.product.gpu_total_bytes() - 10 * MIB


def test_an_arena_that_cannot_hold_what_is_new_is_told(make_held: Callable[..., Held]) -> None:
    held = make_held(memory="160MiB", daemon_arguments=["--arena", "64M"])
    target = held.product.scribbler()
    filled(target, [24 * MIB] * 4)
    before = memory_of(target)
    with pytest.raises(NoSpaceError, match="copy-on-write needs") as refused:
        held.product.checkpoint(target.process, cpu=False, concurrent="cow")
    assert refused.value.target_state == "running"
    result = held.product.checkpoint(target.process, cpu=False)
    assert result["concurrent"][0]["way"] == "copy and stop"
    check_images(held.product, {result["image"]: before})


def test_a_target_that_ends_does_not_run_on(product: Product) -> None:
    target = product.run()
    with pytest.raises(UsageError, match="does not run on"):
        product.checkpoint(target, concurrent="cow", stop=True)
    target.check_runs_right()


# ── several processes, and a CPU side ───────────────────────────────────────────────────────────────────────────────


def test_memory_that_processes_share_is_captured_whoever_writes_it(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.sharer(3)
    target.share("a", 0, 1, mib=4)
    target.share("b", 1, 2, mib=4)
    for name, worker in (("a", 0), ("b", 1)):
        target.order(worker, "write", name, 17)

    def write() -> None:
        target.require_shared("a", 1, 0, value=30)
        target.require_shared("b", 2, 1, value=40)

    result = held.checkpoint(target, write)
    assert result["retaken"] == {}
    assert result["concurrent"][0]["early_bytes"] == result["concurrent"][0]["cow_bytes"] > 0
    image = held.contents(result["image"])
    assert set(image.values()) == {struct.pack("<I", 17) * MIB}
    assert target.order(0, "check", "a", 31) == "ok"
    target.end()


def test_a_whole_image_is_restored_as_it_was(make_held: Callable[..., Held]) -> None:
    held = make_held()
    target = held.product.run("--idle-kib", "4096")
    with held.holds.at(DRAIN, lambda: held.product.checkpoint(target, concurrent="cow")) as made:
        target.wait_steps(2)  # each writes
    result = made.result()
    assert result["concurrent"][0]["early_bytes"] > 0
    target.finish()
    held.product.restore(result["image"], target.log, verify=True).check_runs_right()
