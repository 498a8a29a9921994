"""A target that follows its launches (run --track): what is not hashed is what it was, whatever the target does.

Every checkpoint of the random test hashes everything all the same and compares (check_clean): a write that was missed
fails it. More examples: WOODFROG_FOLLOWING_EXAMPLES (default 5); each is a living target with several checkpoints.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from launcher import Launcher
from product import Product, new_root

from woodfrog.errors import WoodfrogError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
import launches

EXAMPLES = int(os.environ.get("WOODFROG_FOLLOWING_EXAMPLES", "5"))
CHUNK = 64 << 10
SMALL, LARGE = 3000, 3 << 20
HOWS = ("params", "extra", "ex", "cooperative")
COPIES = ("plain", "async", "peer", "2d", "3d")
# Kernels of the corpus whose arrays may hold anything.
CORPUS = (
    "saxpy", "fill_grid_stride", "add_long_index", "add_vector4", "unrolled_by_four", "chunk_a_thread", "strided",
    "reversed", "bytes_to_words", "interleave", "every_second", "two_dimensions", "three_dimensions", "split_index",
    "divided_by_seven", "clamped", "guarded_range", "backwards",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus's elementwise kernels."""
    from product import _NVCC, ROOT, _wheel_nvcc

    nvcc = next((found for name in _NVCC if (found := shutil.which(name))), None) or str(_wheel_nvcc())
    ptx = tmp_path_factory.getbasetemp() / "elementwise.ptx"
    if not ptx.exists():
        source = ROOT / "tests" / "kernels" / "corpus" / "elementwise.cu"
        subprocess.run([nvcc, "-ptx", "-std=c++17", "-arch=sm_90", "-o", str(ptx), str(source)], check=True)
    return ptx


@pytest.fixture(scope="module")
def followed(targets: Path, corpus: Path) -> Iterator[Product]:
    """A daemon that has the catalogues of both files of kernels."""
    product = Product(new_root(), targets, daemon_arguments=["--arena", "128M"])
    product.call("ping")
    launcher = product.launcher()
    launcher.load(targets / "launcher.ptx")
    launcher.load(corpus)
    product.wait_for_catalogues(2)
    launcher.order("end")
    yield product
    product.close()


class Followed:
    """One target with the kernels loaded, that has had its first checkpoint."""

    def __init__(self, product: Product, corpus: Path | None = None, how: str = "module") -> None:
        self.product = product
        self.target: Launcher = product.launcher()
        self.own = self.target.load(product.build / "launcher.ptx", how)
        self.corpus = self.target.load(corpus, how) if corpus else -1
        self.small = self.target.alloc(SMALL)
        self.large = self.target.alloc(LARGE)
        self.target.write(self.large, LARGE, 1)

    def checkpoint(self, **params: Any) -> dict[str, Any]:
        return self.product.checkpoint(self.target.process, cpu=False, **params)

    def check(self) -> dict[str, Any]:
        """A checkpoint that finds every clean range unchanged, and was not let off comparing."""
        result = self.checkpoint(check_clean=True)
        assert result["tracked"]
        assert result["clean_checked"]
        return result

    def put(self, to: int, first: int = 0, count: int = 16, value: int = 7, how: str = "params") -> None:
        parameters = struct.pack("<QIII", to, first, count, value)
        self.target.launch(self.own, "put", parameters, grid=(2, 1, 1), block=(32, 1, 1), how=how)

    def count(self, to: int) -> None:
        """Adds to what is there: the same launch writes something else each time."""
        self.target.launch(self.own, "count_both", struct.pack("<Q", to), block=(32, 1, 1))

    def end(self) -> None:
        self.target.order("end")

    def kill(self) -> None:
        """The end of a target that may not answer any more."""
        process = self.target.process.process
        assert process is not None
        process.kill()
        process.wait()


class TargetMaker(launches.Maker):
    """Arrays of a launch of the corpus in a target's memory; they hold anything."""

    def __init__(self, rng: random.Random, target: Launcher) -> None:
        super().__init__(rng)
        self.target = target
        self.addresses: list[int] = []

    def array(self, size_bytes: int) -> int:
        address = self.target.alloc(max(size_bytes, 1))
        self.target.write(address, max(size_bytes, 1), self.rng.randrange(1 << 30))
        self.addresses.append(address)
        return address

    def content(self, data: bytes) -> int:
        address = self.target.alloc(len(data))
        self.target.put(address, data)
        self.addresses.append(address)
        return address


PLACE = st.integers(0, 1 << 30)
STEPS = st.one_of(
    st.tuples(st.just("alloc"), st.sampled_from([1, 512, 70_000, LARGE]), PLACE),
    st.tuples(st.just("free"), PLACE),
    st.tuples(st.just("put"), PLACE, PLACE, PLACE, st.sampled_from(HOWS)),
    st.tuples(st.just("corpus"), st.sampled_from(CORPUS), PLACE, st.sampled_from(HOWS[:3])),
    st.tuples(st.just("set"), st.sampled_from([8, 16, 32]), PLACE, PLACE, PLACE),
    st.tuples(st.just("box"), PLACE, PLACE),
    st.tuples(st.just("copy"), st.sampled_from(COPIES), PLACE, PLACE),
    st.tuples(st.just("value"), PLACE, PLACE),
    st.tuples(st.just("count"), PLACE),
    st.tuples(st.just("repeat"), PLACE),
    st.tuples(st.just("graph"), PLACE, PLACE),
    st.tuples(st.just("again"), PLACE),
    st.tuples(st.just("update"), PLACE, PLACE, PLACE),
    st.tuples(st.just("map"), PLACE),
    st.tuples(st.just("move"), PLACE),
    st.tuples(st.just("checkpoint")),
)


class Player:
    """Plays the steps of an example; numbers are brought into range."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.target = followed.target
        self.graphs: list[set[int]] = []  # what their nodes name: it is not freed
        self.mapped: dict[int, int] = {}
        self.counted: set[int] = set()  # addresses given to count_both, also of memory that is gone

    def play(self, verb: str, *numbers: Any) -> None:
        getattr(self, verb)(*numbers)

    def _some(self, place: int, least: int = 1) -> tuple[int, int]:
        """An allocation of at least so many bytes, and its size."""
        fitting = sorted(item for item in {**self.target.sizes, **self.mapped}.items() if item[1] >= least)
        return fitting[place % len(fitting)]

    def alloc(self, size: int, seed: int) -> None:
        self.target.write(self.target.alloc(size), size, seed)

    def free(self, place: int) -> None:
        used = set().union(*self.graphs) | {self.followed.small, self.followed.large}
        if free := sorted(set(self.target.sizes) - used):
            self.target.free(free[place % len(free)])

    def put(self, place: int, first: int, count: int, how: str) -> None:
        address, size = self._some(place, 512)
        first %= size // 4
        self.followed.put(address, first, min(count % 600, size // 4 - first), how=how)

    def corpus(self, kernel: str, seed: int, how: str) -> None:
        rng = random.Random(seed)
        maker = TargetMaker(rng, self.target)
        made = launches.GENERATORS[kernel](maker, rng)
        parameters, module = made.parameters, self.followed.corpus
        self.target.launch(
            module, kernel, parameters, grid=made.grid, block=made.block, shared_bytes=made.shared_bytes, how=how
        )

    def set(self, width: int, place: int, first: int, count: int) -> None:
        address, size = self._some(place, 512)
        unit = width // 8
        first %= size // unit
        self.target.order("set", width, f"{address + first * unit:x}", max(1, count % (size // unit - first + 1)), 5)

    def box(self, place: int, pitch: int) -> None:
        address, size = self._some(place, 512)
        pitch = 32 + pitch % 64
        self.target.order("box", f"{address:x}", pitch, 20, size // pitch, 9)

    def copy(self, how: str, to: int, source: int) -> None:
        (there, room), (here, size) = self._some(to, 512), self._some(source, 512)
        if there != here:
            self.target.order("copy", how, f"{there:x}", f"{here:x}", min(room, size))

    def value(self, place: int, value: int) -> None:
        address, _ = self._some(place, 4)
        self.target.order("value", f"{address:x}", value & 0xFFFFFFFF)

    def count(self, place: int) -> None:
        address, _ = self._some(place, 512)
        self.counted.add(address)
        self.followed.count(address)

    def repeat(self, place: int) -> None:
        """A launch that was made before, byte for byte; it writes something else each time."""
        sizes = {**self.target.sizes, **self.mapped}
        if known := sorted(address for address in self.counted if sizes.get(address, 0) >= 512):
            self.followed.count(known[place % len(known)])

    def _capture(self, to: int, source: int) -> set[int]:
        (there, room), (here, _size) = self._some(to, 512), self._some(source, 512)
        self.target.order("capture")
        self.followed.put(there, 0, min(100, room // 4))
        self.target.order("set", 32, f"{here:x}", 64, to & 0xFFFF)
        # Between different pieces, else within one: the same topology every time.
        self.target.order("copy", "async", f"{there:x}", f"{here + 256:x}", 128)
        return {there, here}

    def graph(self, to: int, source: int) -> None:
        used = self._capture(to, source)
        assert int(self.target.order("captured")) == len(self.graphs)
        self.graphs.append(used)

    def again(self, number: int) -> None:
        if self.graphs:
            self.target.order("again", number % len(self.graphs))

    def update(self, number: int, to: int, source: int) -> None:
        if self.graphs:
            used = self._capture(to, source)
            self.graphs[number % len(self.graphs)] |= used
            self.target.order("update", number % len(self.graphs))
            self.again(number)

    def map(self, seed: int) -> None:
        address = int(self.target.order("map", 2 << 20), 16)
        self.mapped[address] = 2 << 20
        self.target.write(address, 2 << 20, seed)

    def move(self, place: int) -> None:
        if free := sorted(set(self.mapped) - set().union(*self.graphs)):
            address = free[place % len(free)]
            self.mapped[int(self.target.order("move", f"{address:x}"), 16)] = self.mapped.pop(address)

    def checkpoint(self) -> None:
        self.followed.check()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take an hour
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    how=st.sampled_from(["module", "library"]),
    rounds=st.lists(st.lists(STEPS, min_size=1, max_size=12), min_size=3, max_size=5),
)
def test_whatever_is_launched_no_clean_range_differs(
    how: str, rounds: list[list[tuple[Any, ...]]], followed: Product, corpus: Path
) -> None:
    one = Followed(followed, corpus, how)
    try:
        player = Player(one)
        one.check()
        for steps in rounds:
            for step in steps:
                player.play(*step)
            event(one.check()["unclean_reason"] or "compared")
    finally:
        one.kill()


def test_what_was_not_written_is_not_hashed(followed: Product) -> None:
    one = Followed(followed)
    first = one.checkpoint()
    assert (first["tracked"], first["clean_bytes"]) == (True, 0)
    assert "no earlier image" in first["unclean_reason"]
    one.put(one.large, first=CHUNK // 4, count=32)
    second = one.checkpoint()
    assert second["clean_bytes"] == second["gpu_bytes"] - CHUNK
    assert (second["launches"], second["covered_launches"], second["new_chunks"]) == (1, 1, 1)
    third = one.checkpoint()
    assert (third["clean_bytes"], third["launches"], third["new_chunks"]) == (third["gpu_bytes"], 0, 0)
    one.end()


def test_an_image_of_what_was_not_hashed_is_the_memory_to_the_byte(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    one.put(one.large, first=1000, count=500)
    reference = one.checkpoint()["image"]
    full = one.checkpoint(check_clean=True)["image"]
    assert _digests(followed, reference) == _digests(followed, full)
    assert followed.images()  # all of them verify
    one.end()


def test_new_memory_is_hashed_and_freed_memory_is_no_trouble(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    # A block of the same size at the same address, with other contents.
    other = one.target.alloc(LARGE)
    one.target.write(other, LARGE, 3)
    one.checkpoint()
    one.target.free(other)
    again = one.target.alloc(LARGE)
    one.target.write(again, LARGE, 4)
    assert one.check()["clean_bytes"] > 0
    one.end()


def test_writes_through_a_pointer_table_count_as_everything(followed: Product) -> None:
    one = Followed(followed)
    table = one.target.alloc(64)
    one.target.put(table, struct.pack("<QQ", one.large, one.large + 2 * CHUNK))
    one.checkpoint()
    one.target.launch(one.own, "through_table", struct.pack("<QII", table, 2, 3), block=(2, 1, 1))
    result = one.check()
    assert result["clean_bytes"] == 0
    assert "through_table" in result["unclean_reason"]
    assert (result["launches"], result["covered_launches"]) == (1, 0)
    assert one.check()["clean_bytes"] > 0  # and only until that image
    one.end()


def test_code_that_nobody_has_analysed_counts_as_everything(followed: Product, tmp_path: Path) -> None:
    text = (followed.build / "launcher.ptx").read_text()
    path = tmp_path / "other.ptx"
    path.write_text(text + f"\n// {tmp_path}\n")
    one = Followed(followed)
    module = one.target.load(path)
    one.checkpoint()
    one.target.launch(module, "put", struct.pack("<QIII", one.large, 0, 8, 1))
    result = one.check()
    if result["covered_launches"] == 0:  # else the daemon was quick
        assert result["clean_bytes"] == 0
        assert "put" in result["unclean_reason"]
    followed.wait_for_catalogues(3)
    one.target.launch(module, "put", struct.pack("<QIII", one.large, 0, 8, 1))
    assert one.check()["covered_launches"] == 1
    one.end()


def test_more_launches_than_fit_the_ring_count_as_everything(
    followed: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WOODFROG_TRACK_LATE", "1")  # nothing is read from the ring before the target is at rest
    one = Followed(followed)
    one.checkpoint()
    # Each takes 4 KiB of the ring of 1 MiB.
    one.target.order("burst", one.own, "large", 4000, (struct.pack("<Q", one.large) + bytes(4 * 960)).hex())
    result = one.check()
    assert result["launches"] == 4000
    assert result["clean_bytes"] == 0
    assert "more launches" in result["unclean_reason"]
    one.put(one.large)
    assert one.check()["clean_bytes"] > 0
    one.end()


def test_a_launch_that_is_made_again_is_told_again_after_each_report(followed: Product) -> None:
    one = Followed(followed)
    one.check()
    for _ in range(3):
        one.count(one.large)
        one.count(one.large)
        result = one.check()
        assert (result["launches"], result["covered_launches"]) == (2, 2)
        assert result["clean_bytes"] == result["gpu_bytes"] - CHUNK
    one.end()


def test_a_launch_that_is_made_again_is_told_again_in_memory_that_came_since(followed: Product) -> None:
    """New memory at an old address: told clean it would keep the digests of what was there."""
    one = Followed(followed)
    again = one.target.alloc(LARGE)
    one.check()
    for _ in range(3):
        one.count(again)
        one.target.free(again)
        assert one.target.alloc(LARGE) == again
        one.count(again)
        assert one.check()["unclean_reason"] == ""
        one.count(again)
        assert one.check()["covered_launches"] == 1
    one.end()


def test_a_graph_launched_again_is_told_again_after_each_report(followed: Product) -> None:
    one = Followed(followed)
    one.target.order("capture")
    one.count(one.large)
    number = int(one.target.order("captured"))
    one.check()
    for _ in range(3):
        one.target.order("again", number)
        one.target.order("again", number)
        result = one.check()
        assert (result["launches"], result["covered_launches"]) == (2, 2)
        assert result["clean_bytes"] == result["gpu_bytes"] - CHUNK
    one.end()


def test_a_thousand_launches_take_less_than_a_megabyte(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    launches, held = 1000, []
    for count in (100, launches):  # the first ones make what every target has once
        for number in range(count):
            one.put(one.large, first=number % 1000, count=1 + number // 1000, value=number)
        held.append(_private_bytes(one.target.process.pid))
        assert one.checkpoint()["covered_launches"] == count
    assert held[1] - held[0] < launches / 1000 * 2**20
    one.end()


def test_many_far_places_are_told_as_fewer_ranges(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    many = struct.pack("<QII", one.large, 128, 1)
    one.target.launch(one.own, "sparse", many, grid=(96, 1, 1), block=(64, 1, 1))
    result = one.check()
    assert result["unclean_reason"] == ""
    assert 0 < result["clean_bytes"] < result["gpu_bytes"]
    one.end()


def test_a_forked_child_follows_nothing_and_harms_nothing(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    one.put(one.large)
    assert one.target.order("fork") == "ok"
    one.put(one.large, first=CHUNK)
    assert one.check()["clean_bytes"] > 0
    one.end()


def test_a_template_that_is_wrong_is_caught_and_its_kernel_named(
    make_product: Callable[..., Product], targets: Path
) -> None:
    product = make_product()
    product.call("ping")
    one = Followed(product)
    product.wait_for_catalogues(1)
    (listing,) = (product.runtime / "kernels").glob("*.kernels")
    lines = listing.read_text().splitlines()
    numbers = {line.split()[-1]: line.split()[1] for line in lines if line.startswith("kernel ")}
    wrong = [
        line.replace(f"kernel {numbers['put']} ", f"kernel {numbers['look']} ") if line.endswith(" put") else line
        for line in lines
    ]
    listing.write_text("\n".join([*wrong, ""]))
    one.checkpoint()
    one.put(one.large)
    with pytest.raises(WoodfrogError, match=r"differ.* put"):
        one.checkpoint(check_clean=True)
    assert one.target.get(one.large, 4) != b""  # it runs on
    result = one.checkpoint(check_clean=True)  # what was doubted is not believed again
    assert result["clean_bytes"] == 0
    one.end()


def test_what_a_failed_checkpoint_was_told_is_told_again(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_FAULTS": "checkpoint.commit.before:error:2"})
    product.call("ping")
    one = Followed(product)
    product.wait_for_catalogues(1)
    one.checkpoint()
    one.put(one.large)
    with pytest.raises(WoodfrogError):
        one.checkpoint()
    one.put(one.large, first=CHUNK)
    result = one.check()
    assert result["clean_bytes"] == result["gpu_bytes"] - 2 * CHUNK
    one.end()


def test_a_restored_target_begins_anew_and_then_follows_again(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    one.put(one.large)
    log = one.target.process.log
    stopped = followed.checkpoint(one.target.process, stop=True)
    assert stopped["clean_bytes"] > 0
    one.target.process = followed.restore(stopped["image"], log, verify=True)
    one.put(one.large, first=CHUNK)
    result = one.check()
    assert (result["tracked"], result["clean_bytes"]) == (True, 0)
    one.put(one.large, first=2 * CHUNK)
    result = one.check()
    assert result["clean_bytes"] == result["gpu_bytes"] - CHUNK
    assert result["covered_launches"] == 1
    one.end()


def test_a_whole_image_of_a_running_target_holds_no_file_of_ours(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    one.put(one.large)
    result = followed.checkpoint(one.target.process)
    assert result["clean_bytes"] > 0
    maps = Path(f"/proc/{one.target.process.pid}/maps").read_text()
    assert "/kernels/" not in maps
    one.put(one.large, first=CHUNK)
    assert one.check()["clean_bytes"] > 0  # loaded again
    one.end()


def test_after_a_suspend_everything_is_hashed_once(followed: Product) -> None:
    one = Followed(followed)
    one.checkpoint()
    followed.call("suspend", target=one.target.process.pid)
    followed.call("resume", target=one.target.process.pid)
    assert one.check()["clean_bytes"] == 0
    assert one.check()["clean_bytes"] > 0
    one.end()


def test_threads_on_several_gpus_are_followed_together(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={"WOODFROG_SIMGPU_DEVICES": "3", "WOODFROG_TRACK": "1"})
    product.call("ping")
    stepper = product.run("--threads", "2", "--spread", "--idle-kib", "4096", "--pace-us", "2000")
    product.wait_for_catalogues(1)
    product.checkpoint(stepper, cpu=False)
    for _ in range(4):
        stepper.wait_steps(5)
        result = product.checkpoint(stepper, cpu=False, check_clean=True)
        assert result["unclean_reason"] == ""
        assert result["clean_bytes"] >= 4 << 20
        assert result["covered_launches"] == result["launches"] > 0
    stepper.finish()


def test_without_track_nothing_is_followed(followed: Product) -> None:
    target = followed.launcher(track=False)
    target.alloc(LARGE)
    for _ in range(2):
        result = followed.checkpoint(target.process, cpu=False, check_clean=True)
        assert result["tracked"] is False
    threads = [path.read_text().strip() for path in Path(f"/proc/{target.process.pid}/task").glob("*/comm")]
    assert "woodfrog-agent" in threads
    assert "woodfrog-track" not in threads
    target.order("end")


def _digests(product: Product, reference: str) -> bytes:
    from woodfrog.image.repository import ImageRepository

    with ImageRepository(product.store_path) as images, images.open(reference) as image:
        return bytes(image.manifest.digests)


def _private_bytes(pid: int) -> int:
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("RssAnon:")]
    return int(line.split()[1]) << 10
