"""Restores whose target runs before its data is on the GPU: right at every moment, and in the end as an eager one.

More examples: WOODFROG_MAPPED_EXAMPLES (default 3).
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
from mapped import AT_REST, COPIED, MADE, MIB, POINTS, REPLACED, Mapped
from product import Product, new_root
from scribbling import STEPS, check_images, do

from woodfrog.errors import RefusedError, TargetLostError, UsageError, WoodfrogError
from woodfrog.image.profile import read_profile
from woodfrog.image.repository import ImageRepository

EXAMPLES = int(os.environ.get("WOODFROG_MAPPED_EXAMPLES", "3"))
MODES = ("mapped", "ordered")
LAUNCHES = st.one_of(
    st.tuples(st.sampled_from(["launch", "record"]), st.integers(0, 1 << 30), st.integers(1, 4096), st.integers(0, 99)),
    st.just(("replay",)),
)
DEVICE_MEMORY = "2"  # CU_MEMORYTYPE_DEVICE


@pytest.fixture
def make_mapped(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., Mapped]:
    def make(*points: str, **environment: str) -> Mapped:
        holds = Holds(tmp_path / "holds", *points)
        return Mapped(make_product(environment=Mapped.environment(holds, **environment)), holds)

    return make


def test_a_target_runs_on_host_memory_and_ends_up_on_the_gpu(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped(MADE)
    small, *_ = mapped.filled([64, 3 * MIB, 2 * MIB, 4 * MIB, 4 * MIB, 6 * MIB])
    mapped.stop()
    free = mapped.product.gpu_free_bytes()

    def meanwhile() -> None:
        # Nothing has moved: on the GPU is what is larger than a pause, and what was made for the first batch.
        used = free - mapped.product.gpu_free_bytes()
        assert 6 * MIB <= used <= 10 * MIB
        row = mapped.row()
        assert (row["state"], row["operation"]) == ("running", "migrating 0 %")
        assert row["hosted_bytes"] == 16 * MIB  # the slab, and what is at most a pause, rounded up
        mapped.target.fill(small, 0, 64, 9)
        mapped.check()

    result = mapped.restored_at(MADE, meanwhile, verify=True)
    assert (result["mode"], result["verified"], result["warnings"]) == ("mapped", True, [])
    promotion = result["promotion"]
    assert promotion["state"] == "complete"
    assert (promotion["moved_bytes"], promotion["left_bytes"], promotion["total_bytes"]) == (16 * MIB, 0, 16 * MIB)
    assert promotion["batches"] >= 4
    assert 0 < promotion["longest_pause_s"] <= promotion["pause_s"]
    mapped.check()
    assert free - mapped.product.gpu_free_bytes() == 22 * MIB
    assert (mapped.row()["operation"], mapped.row()["hosted_bytes"]) == ("", 0)
    assert mapped.product.checkpoint(mapped.target.process)["parent"] == mapped.image
    with pytest.raises(RefusedError, match="all of its memory is on the GPU"):
        mapped.product.call("resume", target=mapped.target.process.pid)


def test_the_application_cannot_tell_where_its_memory_lies(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped(MADE)
    addresses = mapped.filled([64, 3 * MIB, 4 * MIB, 6 * MIB])

    def asked() -> list[list[str]]:
        return [mapped.target.order("ask", f"{address + 8:x}").split() for address in addresses]

    before = asked()
    mapped.stop()

    def meanwhile() -> None:
        # The free memory less what the daemon holds for the first batch, which is counted twice as long.
        found = asked()
        assert [one[:5] for one in found] == [one[:5] for one in before]
        assert {one[0] for one in found} == {DEVICE_MEMORY}
        for one, old in zip(found, before, strict=True):
            assert 0 <= int(old[5]) - int(one[5]) <= 4 * MIB

    mapped.restored_at(MADE, meanwhile)
    assert asked() == before


def test_what_is_freed_meanwhile_is_gone_and_what_is_new_is_device_memory(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped(MADE)
    small, first, second, third = mapped.filled([64, 4 * MIB, 4 * MIB, 4 * MIB])
    mapped.stop()

    def meanwhile() -> None:
        for address in (small, first, third):
            mapped.target.free(address)
        free = mapped.product.gpu_free_bytes()
        mapped.filled([64, 2 * MIB])  # a slab of its own, and a block
        assert free - mapped.product.gpu_free_bytes() == 4 * MIB

    promotion = mapped.restored_at(MADE, meanwhile)["promotion"]
    assert (promotion["state"], promotion["moved_bytes"], promotion["left_bytes"]) == ("complete", 4 * MIB, 0)
    mapped.check()
    mapped.target.free(second)
    mapped.check()


@pytest.mark.parametrize("point", [MADE, AT_REST])
def test_a_checkpoint_waits_for_the_promotion(make_mapped: Callable[..., Mapped], point: str) -> None:
    mapped = make_mapped(point)
    mapped.filled([64, 3 * MIB, 4 * MIB])
    mapped.stop()
    with mapped.holds.at(
        point, lambda: mapped.restore(wait=False) and mapped.product.checkpoint(mapped.target.process)
    ):
        pass
    [entry] = [entry for entry in mapped.product.images() if entry != mapped.image]
    memory = {address: bytes(content) for address, content in mapped.target.memory.items()}
    check_images(mapped.product, {entry: memory})
    assert mapped.ended()["left_bytes"] == 0


@pytest.mark.parametrize("point", POINTS)
def test_a_daemon_killed_while_memory_moves_goes_on_as_the_next_one(
    make_mapped: Callable[..., Mapped], point: str
) -> None:
    mapped = make_mapped(WOODFROG_FAULTS=f"{point}:kill:2")
    mapped.filled([64, 3 * MIB, 4 * MIB, 4 * MIB, 2 * MIB])
    mapped.stop()
    free = mapped.product.gpu_free_bytes()
    old = mapped.product.daemon_pid()
    mapped.restore()
    mapped.product.wait_for_new_daemon(old)
    promotion = mapped.ended()
    assert (promotion["state"], promotion["left_bytes"]) == ("complete", 0)
    assert 0 < promotion["moved_bytes"] < 16 * MIB  # the first daemon's part is done
    mapped.check()
    assert free - mapped.product.gpu_free_bytes() == 16 * MIB
    mapped.product.checkpoint(mapped.target.process, stop=True)


@pytest.mark.parametrize("point", POINTS)
def test_a_target_killed_while_memory_moves_leaves_nothing(make_mapped: Callable[..., Mapped], point: str) -> None:
    mapped = make_mapped(point)
    mapped.filled([64, 3 * MIB, 4 * MIB])
    mapped.stop()
    with pytest.raises(TargetLostError):
        mapped.restored_at(point, lambda: os.kill(mapped.target.process.pid, signal.SIGKILL))
    assert mapped.product.call("ps") == []
    mapped.product.call("stop")  # refused while anything is under way, or held
    assert mapped.product.gpu_free_bytes() == mapped.product.gpu_total_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_full_gpu_stops_a_promotion_and_resume_goes_on(make_mapped: Callable[..., Mapped], mode: str) -> None:
    mapped = make_mapped(MADE, WOODFROG_SIMGPU_MEMORY="32MiB")
    mapped.filled([64, 3 * MIB, 4 * MIB, 4 * MIB])
    mapped.stop()
    more: list[int] = []

    def fill_the_gpu() -> None:
        while not (answer := mapped.target.try_order("alloc", 2 * MIB)).startswith("error"):
            more.append(int(answer, 16))

    result = mapped.restored_at(MADE, fill_the_gpu, mode)
    promotion = result["promotion"]
    assert promotion["state"] == "stopped"
    assert "memory does not suffice" in promotion["reason"]
    assert 0 < promotion["left_bytes"] < 14 * MIB
    assert any("stay on host memory" in warning for warning in result["warnings"])
    assert mapped.row()["hosted_bytes"] == promotion["left_bytes"]
    mapped.check()
    image = mapped.product.checkpoint(mapped.target.process, concurrent="stop")["image"]
    mapped.check()
    for address in more:
        mapped.target.order("free", f"{address:x}")
    told = mapped.product.call("resume", target=mapped.target.process.pid, wait=True)
    assert (told["promotion"]["state"], told["promotion"]["left_bytes"]) == ("complete", 0)
    assert told["promotion"]["moved_bytes"] == promotion["left_bytes"]
    mapped.check()
    for address in more:
        mapped.target.memory.pop(address, None)
    assert image in mapped.product.images()


@pytest.mark.parametrize("action", ["error", "timeout"])
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_while_memory_moves_leaves_the_target_right(
    make_mapped: Callable[..., Mapped], point: str, action: str
) -> None:
    mapped = make_mapped(WOODFROG_FAULTS=f"{point}:{action}:2")
    mapped.filled([64, 3 * MIB, 4 * MIB, 4 * MIB])
    mapped.stop()
    result = mapped.restore(wait=True)
    promotion = result["promotion"]
    assert (promotion["state"], result["state"]) == ("stopped", "running")
    assert "injected" in promotion["reason"]
    assert promotion["left_bytes"] > 0
    mapped.check()
    told = mapped.product.call("resume", target=mapped.target.process.pid, wait=True)["promotion"]
    assert (told["state"], told["left_bytes"]) == ("complete", 0)
    mapped.check()


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_cannot_be_mapped_leaves_the_old_one_or_a_frozen_target(
    make_mapped: Callable[..., Mapped], tmp_path: Path, times: int
) -> None:
    """The new memory's mapping fails, and (`times` 2) then the old one's too."""
    fails = tmp_path / "fails"
    fails.touch()
    mapped = make_mapped(AT_REST, WOODFROG_SIMGPU_FAIL=f"@{fails}")
    address, *_ = mapped.filled([4 * MIB, 4 * MIB])
    mapped.stop()

    def fail() -> None:
        fails.write_text(f"cuMemMap:999:{times}")

    if times == 1:
        promotion = mapped.restored_at(AT_REST, fail)["promotion"]
        fails.write_text("")
        assert (promotion["state"], promotion["left_bytes"]) == ("stopped", 8 * MIB)
        assert "mapping memory that is promoted" in promotion["reason"]
        mapped.target.fill(address, 0, 64, 9)
        mapped.check()
        told = mapped.product.call("resume", target=mapped.target.process.pid, wait=True)["promotion"]
        assert (told["state"], told["left_bytes"]) == ("complete", 0)
        mapped.check()
        return
    with pytest.raises(WoodfrogError, match="mapping memory that is promoted") as raised:
        mapped.restored_at(AT_REST, fail)
    assert raised.value.target_state == "frozen"
    assert "restore the image once more" in raised.value.advice
    fails.write_text("")
    mapped.product.end(mapped.target.process)
    mapped.restore("eager")
    mapped.check()


def test_what_is_used_first_moves_first_and_is_remembered(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped(MADE)
    addresses = mapped.filled([4 * MIB] * 5)
    mapped.stop()
    used = [addresses[number] for number in (3, 1, 4)]

    def use() -> None:
        for number, address in enumerate(used):
            mapped.target.launch(address, 64, seed=number)

    mapped.restored_at(MADE, use, "ordered")
    mapped.check()
    with ImageRepository(mapped.product.store_path) as images:
        manifest = images.manifest(mapped.image)
        handle_at = {row.address: row.handle for row in manifest.allocations.rows()}
        wanted = [handle_at[address] for address in used]
        assert read_profile(images.store, mapped.image, manifest.operation) == wanted
    first, *others = mapped.moved()  # the first was on its way already
    expected = [handle for handle in wanted if handle not in first]
    assert [batch[0] for batch in others][: len(expected)] == expected
    # The next restore begins with it.
    mapped.product.end(mapped.target.process)
    mapped.target.memory = {address: bytearray(content) for address, content in mapped.target.memory.items()}
    before = len(mapped.moved())
    mapped.restore("ordered", wait=True)
    assert [batch[0] for batch in mapped.moved()[before:]][: len(wanted)] == wanted


def test_modes_that_cannot_be_are_refused(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped()
    driver_only = mapped.product.run(managed=False)
    mapped.image = mapped.product.checkpoint(driver_only, stop=True)["image"]
    with pytest.raises(UsageError, match="lazy"):
        mapped.restore("lazy")
    with pytest.raises(RefusedError, match="the driver's way"):
        mapped.restore("mapped")
    mapped.product.restore(mapped.image, driver_only.log).check_runs_right()


@pytest.fixture(scope="module")
def shared(targets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapped]:
    holds = Holds(tmp_path_factory.mktemp("holds"), MADE, REPLACED, COPIED)
    product = Product(new_root(), targets, environment=Mapped.environment(holds))
    yield Mapped(product, holds)
    product.close()


def step(mapped: Mapped, one: tuple[Any, ...]) -> None:
    """One step of a random program, launches among them."""
    target = mapped.target
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


@pytest.mark.parametrize("mode", ["eager", *MODES])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    before=st.lists(st.one_of(STEPS, LAUNCHES), min_size=4, max_size=10),
    held=st.lists(st.one_of(STEPS, LAUNCHES), max_size=6),
    free=st.lists(st.one_of(STEPS, LAUNCHES), max_size=6),
    point=st.sampled_from([MADE, REPLACED]),
)
def test_every_mode_gives_the_same_whatever_the_target_does_meanwhile(
    shared: Mapped, mode: str, before: list[Any], held: list[Any], free: list[Any], point: str
) -> None:
    """`held`: while the promotion stands between two batches; `free`: while it goes on."""
    for address in list(shared.target.memory):
        shared.target.free(address)
    shared.filled([3 * MIB, 64])
    for one in before:
        step(shared, one)
    shared.stop()

    def meanwhile() -> None:
        for one in held:
            step(shared, one)

    if mode == "eager" or point == REPLACED:
        shared.restore(mode)
        meanwhile()
    else:
        with shared.holds.at(point, lambda: shared.restore(mode)):
            meanwhile()
    for one in free:
        step(shared, one)
    if mode != "eager":
        assert shared.ended()["state"] == "complete"
    shared.check()


@pytest.mark.parametrize("way", ["restore", "resume", "switch"])
def test_a_standby_process_held_on_the_host_runs_there_and_is_promoted(
    make_mapped: Callable[..., Mapped], way: str
) -> None:
    mapped = make_mapped(MADE)
    small, *_ = mapped.filled([64, 3 * MIB, 4 * MIB, 6 * MIB])
    mapped.stop()
    pid, store = mapped.target.process.pid, str(mapped.product.store_path)
    free = mapped.product.gpu_free_bytes()
    mapped.product.call("standby", image=mapped.image, store=store, hold="mapped")
    assert free - mapped.product.gpu_free_bytes() == 6 * MIB  # what is larger than a pause
    other = mapped.product.run() if way == "switch" else None

    def take() -> Any:
        if way == "restore":
            result = mapped.restore("ordered", verify=True)
            assert (result["standby"], result["mode"]) == ("mapped", "ordered")
            return result
        if other is not None:
            return mapped.product.call("switch", **{"out": other.pid, "in": pid})
        return mapped.product.call("resume", target=pid)

    with mapped.holds.at(MADE, lambda: take() and mapped.ended()) as ended:
        mapped.target.fill(small, 0, 64, 9)
        mapped.check()
    assert (ended.result()["state"], ended.result()["moved_bytes"]) == ("complete", 10 * MIB)
    mapped.check()


def test_a_standby_process_held_on_the_host_outlives_the_daemon(make_mapped: Callable[..., Mapped]) -> None:
    mapped = make_mapped()
    mapped.filled([64, 3 * MIB, 4 * MIB])
    mapped.stop()
    mapped.product.call("standby", image=mapped.image, store=str(mapped.product.store_path), hold="mapped")
    mapped.product.kill_daemon()
    result = mapped.restore(wait=True)
    assert (result["standby"], result["promotion"]["state"], result["promotion"]["moved_bytes"]) == (
        "mapped",
        "complete",
        10 * MIB,
    )
    mapped.check()
