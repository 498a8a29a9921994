"""Rounds of copies of a job: all ranks' memory side by side while they run, and one cut through all at the end."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpus import ranks_of, uuids
from held import Holds
from product import Product
from scribbling import contents
from sharer import Sharer, check, fill, kill

from woodfrog.errors import NoDaemonError, TargetLostError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.image.repository import ImageRepository

MIB = 1 << 20
BEFORE, HASHED, QUIESCE = "checkpoint.precopy.before", "precopy.round.hashed", "checkpoint.quiesce.before"
EXPORTED = "precopy.peek.exported"  # all gates are closed
SWAP = {"0": "1", "1": "0"}


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    return Holds(tmp_path / "holds", BEFORE, EXPORTED, HASHED, QUIESCE, "migrate.quiesce.before")


@pytest.fixture
def make(make_product: Callable[..., Product], holds: Holds) -> Callable[..., Product]:
    def make(devices: int = 2, **environment: str) -> Product:
        return make_product(
            environment={**holds.environment, "WOODFROG_SIMGPU_DEVICES": str(devices), **environment},
            daemon_arguments=["--arena", "128M"],
        )

    return make


class Words:
    """A sharer's memory: each allocation is one word over and over."""

    def __init__(self, job: Sharer, workers: int, seed: int) -> None:
        self._job = job
        self._random = random.Random(seed)
        self.values: dict[tuple[int, str], int] = {}
        for worker in range(workers):
            for name in ("first", "second"):
                job.order(worker, "make", name, 2)
                job.order(worker, "map", name, 2)
                self.write(worker, name)
        job.share("common", 0, *range(1, workers))
        self.write(0, "common")
        self._addresses = {(who, name): int(job.order(who, "address", name)) for who, name in self.values}

    def write(self, worker: int, name: str) -> None:
        value = self._random.randrange(1, 1 << 31)
        assert self._job.order(worker, "write", name, value) == "ok"
        self.values[(worker, name)] = value

    def scribble(self) -> None:
        """Some of it, by whichever worker has it; what all share by any of them."""
        workers = len(self._job.pids)
        for worker, name in self._random.sample(sorted(self.values), 4):
            if name == "common":
                value = self._random.randrange(1, 1 << 31)
                assert self._job.order(self._random.randrange(workers), "write", name, value) == "ok"
                self.values[(0, name)] = value
            else:
                self.write(worker, name)

    def check_image(self, product: Product, reference: str, values: dict[tuple[int, str], int]) -> None:
        with ImageRepository(product.store_path) as store, store.open(reference) as image:
            assert image.verify() == []
            assert len(image.manifest.shared) == len(self._job.pids) - 1
            for worker in range(len(self._job.pids)):
                found = contents(image, product.root, worker)
                for (who, name), value in values.items():
                    if who == worker:
                        assert found[self._addresses[(who, name)]] == value.to_bytes(4, "little") * (MIB // 2)

    def check(self) -> None:
        """By every worker's own word."""
        for (worker, name), value in self.values.items():
            for who in range(len(self._job.pids)) if name == "common" else [worker]:
                assert self._job.order(who, "check", name, value) == "ok"


@pytest.mark.parametrize("concurrent", ["auto", "cow", "stop"])
def test_the_image_is_the_memory_of_all_processes_at_the_cut_whatever_they_write_during_the_rounds(
    make: Callable[..., Product], holds: Holds, concurrent: str
) -> None:
    product = make()
    job = product.sharer(3)
    words = Words(job, 3, seed=len(concurrent))
    images: dict[str, dict[tuple[int, str], int]] = {}
    for point in (HASHED, QUIESCE):
        work = {"cpu": False, "precopy": True, "concurrent": concurrent}
        with holds.at(point, lambda work=work: product.checkpoint(job.process, **work)) as made:  # type: ignore[misc]
            words.scribble()
            values = dict(words.values)
        result = made.result()
        images[result["image"]] = values
        words.scribble()
    first, second = images
    assert images[first] != images[second]
    for reference, values in images.items():
        words.check_image(product, reference, values)
    words.check()


def test_what_the_rounds_have_copied_of_each_process_does_not_move_again(
    make: Callable[..., Product], holds: Holds
) -> None:
    product = make()
    job = product.sharer(2)
    words = Words(job, 2, seed=1)
    with holds.at(QUIESCE, lambda: product.checkpoint(job.process, precopy=True)) as made:
        words.write(1, "second")
    result = made.result()
    # Each allocation is one chunk's content over and over: five of them, of which one has changed since.
    chunk = 64 << 10
    assert result["precopy"]["rounds"][0] == 5 * chunk
    assert result["precopy"]["used_bytes"] == 4 * chunk
    assert result["gpu_new_bytes"] == 5 * chunk
    assert result["precopy"]["pause_s"] == result["stall_parts"]["precopy"] > 0
    assert result["gpu_pids"] == job.pids
    words.check()


def test_a_job_that_is_to_end_comes_back_from_what_was_stored_ahead_and_what_changed_since(
    make: Callable[..., Product], holds: Holds
) -> None:
    product = make()
    job = product.sharer(3)
    words = Words(job, 3, seed=2)
    with holds.at(QUIESCE, lambda: product.checkpoint(job.process, precopy=True, stop=True)) as made:
        words.scribble()
    result = made.result()
    assert result["precopy"]["stored_bytes"] > 0
    job.process = product.restore(result["image"], job.process.log, verify=True)
    words.check()
    job.require_shared("common", 2, 0, 1, value=5)


@pytest.mark.parametrize(("ranks", "options"), [(2, ()), (3, ("graph",))], ids=["two", "three-graph"])
def test_ranks_that_wait_for_each_other_in_collectives_go_on_through_every_round(
    make: Callable[..., Product], ranks: int, options: tuple[str, ...]
) -> None:
    product = make()
    job = product.collective(ranks, *options)
    for concurrent in ("auto", "cow"):
        result = product.checkpoint(job, precopy=True, concurrent=concurrent)
        assert len(result["gpu_pids"]) == ranks
        assert result["precopy"]["rounds"]
        job.wait_steps(4)
    image = product.checkpoint(job, precopy=True, stop=True)["image"]
    product.restore(image, job.log, verify=True).check_runs_right()


def test_the_ranks_of_a_job_change_places_with_their_memory_copied_ahead(make: Callable[..., Product]) -> None:
    product = make()
    job = product.collective(2)
    product.checkpoint(job)
    before = ranks_of(job)
    assert before == uuids(product)
    result = product.call("migrate", target=job.pid, gpu_map=SWAP, precopy=True)
    assert result["precopied_bytes"][0] == result["bytes"] > 0
    assert result["copied_bytes"] < result["bytes"]
    assert ranks_of(job) == before[::-1]
    home = {"0": "0", "1": "1"}  # on the left the target's own numbers
    product.call("migrate", target=job.pid, gpu_map=home, precopy=True)
    assert ranks_of(job) == before
    image = product.checkpoint(job, stop=True)["image"]
    product.restore(image, job.log, gpu_map=SWAP, verify=True).check_runs_right()


def test_shared_memory_that_changes_while_a_migration_copies_ahead_is_one_and_right(
    make: Callable[..., Product], holds: Holds
) -> None:
    product = make()
    job = product.sharer(2)
    words = Words(job, 2, seed=4)
    migrate = {"target": job.process.pid, "gpu_map": {"0": "1"}, "precopy": True}
    with holds.at("migrate.quiesce.before", lambda: product.call("migrate", **migrate)) as made:
        words.write(1, "first")
        assert job.order(1, "write", "common", 77) == "ok"
        words.values[(0, "common")] = 77
        job.share("late", 1, 0)
        assert job.order(0, "write", "late", 8) == "ok"
    result = made.result()
    assert result["precopied_bytes"][0] == 10 * MIB
    assert result["copied_bytes"] == 6 * MIB
    words.check()
    assert job.order(1, "check", "late", 8) == "ok"
    job.require_shared("common", 0, 1, value=90)
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    job.end()


@pytest.mark.parametrize("point", [BEFORE, EXPORTED, HASHED, QUIESCE])
@pytest.mark.parametrize("stop", [False, True], ids=["leave-running", "stop"])
def test_a_process_killed_during_the_rounds_leaves_the_others_running(
    make: Callable[..., Product], holds: Holds, point: str, stop: bool
) -> None:
    product = make()
    job = product.sharer(2)
    fill(job)
    with (
        pytest.raises(TargetLostError) as raised,
        holds.at(point, lambda: product.checkpoint(job.process, precopy=True, stop=stop)),
    ):
        kill(job.pids[1])
    assert raised.value.pid == job.pids[1]
    assert raised.value.target_state == TargetState.RUNNING
    assert product.images() == []
    check(job, 0)
    assert product.call("arena")["free_bytes"] == product.call("arena")["size_bytes"]


def stand_still(pid: int) -> None:
    """For 3 s: longer than the operation's time-out, and an agent that never answers is waited for longer still."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()


def test_ranks_that_do_not_come_to_rest_in_time_for_a_round_run_on(make: Callable[..., Product], holds: Holds) -> None:
    product = make()
    job = product.collective(2)
    (row,) = [row for row in product.call("ps") if row["root_pid"] == job.pid]
    second = row["gpu_pids"][1]
    try:
        with (
            pytest.raises(TimeoutExceededError) as raised,
            holds.at(BEFORE, lambda: product.checkpoint(job, precopy=True, timeout_s=0.5)),
        ):
            stand_still(second)
        assert raised.value.target_state == TargetState.RUNNING
    finally:
        os.kill(second, signal.SIGCONT)
    job.wait_steps(4)
    product.checkpoint(job, precopy=True)
    job.check_runs_right()


@pytest.mark.parametrize("point", [EXPORTED, HASHED, "migrate.precopy.after"])
def test_a_failure_or_a_killed_daemon_within_a_round_leaves_the_ranks_running(
    make_product: Callable[..., Product], tmp_path: Path, point: str
) -> None:
    state = tmp_path / "fired"
    state.mkdir()
    faults = {"WOODFROG_FAULTS": f"{point}:error,{point}:kill:2", "WOODFROG_FAULTS_STATE": str(state)}
    product = make_product(environment={**faults, "WOODFROG_SIMGPU_DEVICES": "2"})
    job = product.collective(2)

    def attempt() -> dict[str, Any]:
        if point.startswith("migrate"):
            result: dict[str, Any] = product.call("migrate", target=job.pid, gpu_map=SWAP, precopy=True)
            return result
        return product.checkpoint(job, precopy=True)

    with pytest.raises(WoodfrogError, match="injected") as failed:
        attempt()
    assert failed.value.target_state == TargetState.RUNNING
    job.wait_steps(4)
    daemon = product.daemon_pid()
    with pytest.raises(NoDaemonError):
        attempt()
    product.wait_for_new_daemon(daemon)
    job.wait_steps(4)
    attempt()
    job.check_runs_right()
