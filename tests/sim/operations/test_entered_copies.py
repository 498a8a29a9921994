"""WOODFROG_ENTER_COPIES: threads help with the driver's copies in targets that woodfrog did not start, and go again."""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from copier import PLACE, STACKS, STACKS_BYTES, has_code, helping_threads, is_at_work
from product import Product, Stepper

from woodfrog.driver.limits import processors_of

MIB = 1 << 20
STATE_BYTES = 48 * MIB + 4096 * 3  # its last copy is no whole piece, and too small to be shared
SHARED_BYTES = 48 * MIB
HELPERS = 2
ENVIRONMENT = {
    "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES),
    "WOODFROG_SIMGPU_ONE_MAPPING": "1",
    "WOODFROG_ENTER_COPIES": str(HELPERS),
}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="woodfrog-enter enters x86-64 processes only")


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product(environment=dict(ENVIRONMENT))


def is_saved(target: Stepper) -> bool:
    """Whether the driver's mapping is there: it is during a restore, and not yet while a checkpoint begins."""
    maps = [line.split() for line in Path(f"/proc/{target.pid}/maps").read_text().splitlines()]
    ranges = [words[0].split("-") for words in maps if words[1] == "rw-p"]
    return any(int(end, 16) - int(begin, 16) >= STATE_BYTES for begin, end in ranges)


def stop_daemon(product: Product) -> None:
    """The daemon and its keeper, which holds the directory until it has ended."""
    stat = Path(f"/proc/{product.daemon_pid()}/stat").read_text()
    keeper_fd = os.pidfd_open(int(stat.rpartition(")")[2].split()[1]))
    try:
        product.call("stop")
        poll = select.poll()
        poll.register(keeper_fd, select.POLLIN)
        assert poll.poll(30_000), "the keeper does not end"
    finally:
        os.close(keeper_fd)


def kept(pid: int) -> list[tuple[str, str, set[str]]]:
    """What of woodfrog-enter is mapped: range, permissions, those of the kernel's flags that matter to it."""
    found: list[tuple[str, str, set[str]]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            mine = PLACE <= int(words[0].partition("-")[0], 16) < STACKS + STACKS_BYTES
            if mine:
                found.append((words[0], words[1], set()))
        elif words[0] == "VmFlags:" and mine:
            found[-1][2].update({"rd", "wr", "ex", "wf"} & set(words[1:]))
    return found


def check_clean(target: Stepper) -> None:
    assert not is_at_work(target.pid)


def check_shared(visit: dict[str, Any], *steps: str) -> None:
    """The copies of each step were shared; all of them, unless helpers had no processor here."""
    assert [one["step"] for one in visit["copies"]] == list(steps)
    for one in visit["copies"]:
        assert one["reason"] == ""
        assert one["threads"] == HELPERS
        assert one["copied_bytes"] == SHARED_BYTES or one["slow_copies"] >= 4


def test_suspend_and_resume(product: Product) -> None:
    target = product.run("--idle-kib", "20000", managed=False)
    for _ in range(2):
        out = product.call("suspend", target=target.pid)
        check_shared(out["visit"], "checkpoint")
        assert len(out["visit"]["mappings"]) == 1
        check_clean(target)
        back = product.call("resume", target=target.pid)
        check_shared(back["visit"], "restore")
        check_clean(target)
        target.wait_steps(1)
    target.check_runs_right()


def test_a_checkpoint_that_runs_on(product: Product) -> None:
    target = product.run("--threads", "2", "--idle-kib", "3000", managed=False)
    for _ in range(2):
        check_shared(product.checkpoint(target)["visit"], "checkpoint", "restore")
        check_clean(target)
    target.check_runs_right()


def test_an_image_and_a_new_process_from_it(product: Product) -> None:
    target = product.run("--idle-kib", "3000", managed=False)
    for _ in range(2):
        stopped = product.checkpoint(target, stop=True)
        check_shared(stopped["visit"], "checkpoint")
        result = product.call("restore", image=stopped["image"], store=str(product.store_path))
        check_shared(result["visit"], "restore")
        target = product.restored(result, target.log)
        check_clean(target)
        target.wait_steps(1)
    target.check_runs_right()


@pytest.mark.parametrize("point", ["copy_mapped", "copy_threads", "copy_running", "copy_go_home", "copy_home"])
def test_what_a_killed_visitor_left_goes_into_the_image_and_harms_nobody(
    make_product: Callable[..., Product], point: str
) -> None:
    """Every visit is killed at the same point: those before the dump, and beside the driver's restore of it. If it does
    not come to the point there, since what the driver saved was not seen, it takes out what was no code yet."""
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_ENTER_FAULT": point})
    target = product.run("--idle-kib", "3000", managed=False)
    stopped = product.checkpoint(target, stop=True)
    assert stopped["visit"]["copies"][0]["reason"] == "woodfrog-enter was killed"
    restored = product.restore(stopped["image"], target.log)
    assert has_code(restored.pid) == (point != "copy_mapped")
    restored.check_runs_right()


def test_what_is_in_an_image_is_ended_by_the_next_visit(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_ENTER_FAULT": "copy_running"})
    target = product.run("--idle-kib", "3000", managed=False)
    stopped = product.checkpoint(target, stop=True)
    stop_daemon(product)
    product.environment.pop("WOODFROG_ENTER_FAULT")
    result = product.call("restore", image=stopped["image"], store=str(product.store_path))
    (copies,) = result["visit"]["copies"]
    assert "was not seen" in copies["reason"]  # the visitor was killed before the driver had saved anything
    restored = product.restored(result, target.log)
    check_clean(restored)
    restored.check_runs_right()


def test_what_stays_in_a_process_goes_through_images_as_it_is(product: Product) -> None:
    """Code that nobody is led to, and its words, which a forked child must find as zeros."""
    target = product.run("--idle-kib", "3000", managed=False)
    check_shared(product.checkpoint(target)["visit"], "checkpoint", "restore")
    before = kept(target.pid)
    assert [permissions for _, permissions, _ in before] == ["r-xp", "rw-p", "rw-p"]
    assert ["wf" in flags for _, _, flags in before] == [False, False, True]
    stopped = product.checkpoint(target, stop=True)
    restored = product.restore(stopped["image"], target.log)
    assert kept(restored.pid) == before
    check_clean(restored)
    restored.check_runs_right()


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_a_daemon_that_is_killed_meanwhile(make_product: Callable[..., Product], step: str) -> None:
    """woodfrog-enter goes in good order when the daemon is gone, and the next daemon brings the target back."""
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_SIMGPU_LATENCY_MS": f"{step}:2000"})
    target = product.run("--idle-kib", "3000", managed=False)
    with product.client() as client, ThreadPoolExecutor(1) as pool:
        client.call("ps")
        pool.submit(lambda: product.call("checkpoint", target=target.pid, store=str(product.store_path), cpu=False))
        deadline = time.monotonic() + 30
        while not (helping_threads(target.pid) == HELPERS and is_saved(target) == (step == "restore")):
            assert time.monotonic() < deadline, "nobody helps"
            os.sched_yield()
        product.kill_daemon()
    target.wait_steps(1)
    check_clean(target)
    target.check_runs_right()


@pytest.mark.parametrize("setting", ["0", "many"])
def test_nobody_helps_where_it_is_switched_off(make_product: Callable[..., Product], setting: str) -> None:
    environment = {**ENVIRONMENT, "WOODFROG_ENTER_COPIES": setting}
    product = make_product(environment=environment)
    target = product.run("--idle-kib", "3000", managed=False)
    assert product.call("suspend", target=target.pid)["visit"]["copies"] == []
    assert product.call("resume", target=target.pid)["visit"]["copies"] == []
    assert not has_code(target.pid)
    target.check_runs_right()


def test_by_default_half_of_the_processors_help(make_product: Callable[..., Product]) -> None:
    product = make_product(environment={**ENVIRONMENT, "WOODFROG_ENTER_COPIES": ""})
    target = product.run("--idle-kib", "3000", managed=False)
    helpers = min(4, int(processors_of(target.pid) / 2))
    visits = [product.call(verb, target=target.pid)["visit"]["copies"] for verb in ("suspend", "resume")]
    assert [one["threads"] for copies in visits for one in copies] == [helpers] * 2 * (helpers > 0)
    assert [one["reason"] for copies in visits for one in copies] == [""] * 2 * (helpers > 0)
    target.check_runs_right()


def test_a_target_of_ours_is_not_entered(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    assert product.checkpoint(target, cpu=False)["visit"]["copies"] == []
    target.check_runs_right()
