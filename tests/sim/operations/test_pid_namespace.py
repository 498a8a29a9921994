"""Several processes of one image at once: each in a PID namespace of its own, with its own name, log and life."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from instances import inits, nothing_is_left, wait_until_ended
from product import DEADLINE_S, Product, Stepper

from woodfrog.errors import UsageError
from woodfrog.target import pid_namespace, procfs


def stopped_image(product: Product, *arguments: str) -> tuple[str, Stepper]:
    target = product.run("--idle-kib", "4096", *arguments, name="llama")
    return str(product.checkpoint(target, stop=True)["image"]), target


def instance(product: Product, image: str, **params: object) -> tuple[dict[str, object], Stepper]:
    """One more process of the image, in a namespace of its own; the result and the process."""
    result = product.call("restore", image=image, store=str(product.store_path), new_pid_namespace=True, **params)
    return result, product.restored(result, Path(result["log"]))


def test_three_processes_of_one_image_run_at_once_and_one_that_is_killed_disturbs_nobody(product: Product) -> None:
    image, first = stopped_image(product)
    told, targets = zip(*(instance(product, image) for _ in range(3)), strict=True)
    assert [result["name"] for result in told] == ["llama", "llama-2", "llama-3"]
    assert len({target.pid for target in targets}) == len({target.log for target in targets}) == 3
    assert targets[0].log == first.log
    rows = {row["name"]: row for row in product.call("ps")}
    assert {name: (row["pid"], row["state"]) for name, row in rows.items()} == {
        str(result["name"]): (result["pid"], "running") for result in told
    }
    assert {pid_namespace.inner_number(target.pid) for target in targets} == {first.pid}
    # What one of them calls itself, as the daemon understands it (checkpoint_self); what nobody has there stays.
    assert [pid_namespace.from_caller(first.pid, target.pid) for target in targets] == [one.pid for one in targets]
    assert pid_namespace.from_caller(first.pid, os.getpid()) == first.pid
    assert len({procfs.namespaces(target.pid)["pid"] for target in targets}) == 3
    assert len(inits(product)) == 3
    for target in targets:
        target.wait_steps(3)
    os.kill(targets[1].pid, signal.SIGKILL)
    wait_until_ended(targets[1].pid)
    for target in (targets[0], targets[2]):
        target.check_runs_right()
    for target in targets:
        wait_until_ended(target.pid)
    assert product.daemon_log().count("of pages filled in") == 3, "CRIU was to leave their memory out"
    nothing_is_left(product)


def test_one_in_a_namespace_is_suspended_checkpointed_stopped_and_restored_again(product: Product) -> None:
    image, first = stopped_image(product)
    result, target = instance(product, image)
    other_result, other = instance(product, image)
    product.call("suspend", target="llama")
    standing = target.steps()
    other.wait_steps(2)
    assert target.steps() == standing
    product.call("resume", target="llama")
    target.wait_steps(2)
    running = product.call("checkpoint", target="llama", store=str(product.store_path))
    assert (running["parent"], running["pid"]) == (image, result["pid"])
    assert running["cpu_new_bytes"] < running["cpu_bytes"]
    target.wait_steps(2)
    again = product.call("checkpoint", target="llama-2", store=str(product.store_path), stop=True)
    wait_until_ended(other.pid)
    assert again["image"].startswith("llama-2@")
    # The new image has the numbers that the first one had, whatever they were outside meanwhile.
    product.restore(again["image"], Path(str(other_result["log"]))).check_runs_right()
    third_result, third = instance(product, again["image"])
    assert (third_result["name"], pid_namespace.inner_number(third.pid)) == ("llama-2", first.pid)
    for one in (target, third):
        one.check_runs_right()
        wait_until_ended(one.pid)
    nothing_is_left(product)


def test_a_name_is_given_once_and_only_in_a_namespace(product: Product) -> None:
    image, _ = stopped_image(product)
    result, target = instance(product, image, target_name="worker-a")
    assert result["name"] == "worker-a"
    assert Path(str(result["log"])) == product.runtime / "logs" / "worker-a.log"
    assert target.log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="worker-a"):
        instance(product, image, target_name="worker-a")
    with pytest.raises(UsageError, match="namespace"):
        product.call("restore", image=image, store=str(product.store_path), target_name="worker-b")
    assert product.call("checkpoint", target="worker-a", store=str(product.store_path))["name"] == "worker-a"
    target.check_runs_right()


def test_the_daemon_knows_the_end_of_one_in_a_namespace(product: Product) -> None:
    image, _ = stopped_image(product)
    daemon = product.daemon_pid()
    results = [instance(product, image) for _ in range(2)]
    for (result, target), number, code in zip(results, (signal.SIGTERM, signal.SIGKILL), (0, 137), strict=True):
        watched = watchers(daemon, target.pid)
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(product.call, "wait", pid=result["pid"])
            deadline = time.monotonic() + DEADLINE_S
            while watchers(daemon, target.pid) == watched:
                assert time.monotonic() < deadline, "the daemon does not wait"
            os.kill(target.pid, number)
            assert told.result(DEADLINE_S) == {"pid": result["pid"], "exit_code": code, "signal": None}


def watchers(daemon: int, pid: int) -> int:
    """How many descriptors the daemon has of that process."""
    numbers = [number for number, link in procfs.descriptors(daemon).items() if link == "anon_inode:[pidfd]"]
    return sum(f"\nPid:\t{pid}\n" in (procfs.text(daemon, f"fdinfo/{number}") or "") for number in numbers)


def test_namespaces_outlive_a_killed_daemon_and_are_found_again(product: Product) -> None:
    image, _ = stopped_image(product)
    targets = [instance(product, image)[1] for _ in range(3)]
    product.kill_daemon()
    assert {row["name"] for row in product.call("ps")} == {"llama", "llama-2", "llama-3"}
    assert instance(product, image)[0]["name"] == "llama-4"
    product.call("suspend", target="llama-2")
    product.kill_daemon()
    states = {row["name"]: row["state"] for row in product.call("ps")}
    assert states == {"llama": "running", "llama-2": "suspended", "llama-3": "running", "llama-4": "running"}
    product.call("resume", target="llama-2")
    product.call("checkpoint", target="llama-3", store=str(product.store_path), stop=True)
    wait_until_ended(targets[2].pid)
    for target in targets[:2]:
        target.check_runs_right()


def test_three_wait_and_are_taken_one_after_the_other(product: Product) -> None:
    image, _ = stopped_image(product)
    made = product.call("standby", image=image, store=str(product.store_path), count=3)
    assert [(one["name"], one["new"]) for one in made] == [("llama", True), ("llama-2", True), ("llama-3", True)]
    told = product.call("standby", image=image, store=str(product.store_path), count=2)
    assert [one["new"] for one in told] == [False, False]
    product.kill_daemon()
    taken = []
    for _ in range(3):
        result, target = instance(product, image)
        assert result["standby"] == "host"
        taken.append(target)
    assert len({target.pid for target in taken}) == 3
    fresh, _ = instance(product, image)
    assert not fresh.get("standby")
    more = product.call("standby", image=image, store=str(product.store_path), count=2, hold="device")
    assert [one["name"] for one in more] == ["llama-5", "llama-6"]
    ended = product.call("standby_end", which=image)
    assert sorted(ended) == sorted(one["pid"] for one in more)
    for target in taken:
        target.check_runs_right()
    os.kill(int(str(fresh["pid"])), signal.SIGKILL)
    for target in taken:
        wait_until_ended(target.pid)
    wait_until_ended(int(str(fresh["pid"])))
    nothing_is_left(product)
