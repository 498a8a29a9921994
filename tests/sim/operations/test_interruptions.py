"""Operations that somebody disturbs: cancelled, left alone by their client, run at once, or with the target killed."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from product import DEADLINE_S, Product

from woodfrog.daemon import wire
from woodfrog.errors import RefusedError, TargetLostError, from_dict


class Hanging:
    """A checkpoint that hangs at a fault point, over a connection that is used by hand."""

    def __init__(self, product: Product, target: int, phase: str, **more: Any) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(DEADLINE_S)
        self.connection.connect(str(product.runtime / "daemon.sock"))
        params = {"target": target, "store": str(product.store_path), **more}
        wire.send(self.connection, wire.Request(1, "checkpoint", params))
        while True:
            answer = wire.receive_answer(self.connection)
            assert answer is not None
            assert answer.error is None, answer.error
            if answer.event is not None and (answer.event["event"], answer.event["phase"]) == ("begin", phase):
                return

    def cancel(self) -> dict[str, Any]:
        """Ask for the end; the error that the checkpoint ends with."""
        wire.send(self.connection, wire.Request(2, "cancel", {"request": 1}))
        error = None
        while error is None:
            answer = wire.receive_answer(self.connection)
            assert answer is not None
            error = answer.error if answer.id == 1 else None
        self.connection.close()
        return error


def hanging_at(make_product: Callable[..., Product], tmp_path: Path, phase: str) -> Product:
    state = tmp_path / "fired"
    state.mkdir()
    faults = {"WOODFROG_FAULTS": f"checkpoint.{phase}.before:hang", "WOODFROG_FAULTS_STATE": str(state)}
    return make_product(environment=faults)


@pytest.mark.parametrize("phase", ["quiesce", "control", "snapshot", "hash", "drain", "return", "write", "commit"])
def test_a_cancelled_checkpoint_leaves_the_target_running_right(
    make_product: Callable[..., Product], tmp_path: Path, phase: str
) -> None:
    product = hanging_at(make_product, tmp_path, phase)
    target = product.run("--idle-kib", "2048")
    product.call("ps")
    error = Hanging(product, target.pid, phase).cancel()
    assert error["target_state"] == "running"
    assert product.images() == []
    product.checkpoint(target)
    target.check_runs_right()


@pytest.mark.parametrize("phase", ["drain", "return", "write"])
def test_a_cancelled_copy_on_write_lets_the_target_run_on(
    make_product: Callable[..., Product], tmp_path: Path, phase: str
) -> None:
    product = hanging_at(make_product, tmp_path, phase)
    target = product.run("--idle-kib", "2048")
    product.call("ps")
    error = Hanging(product, target.pid, phase, concurrent="cow").cancel()
    assert error["target_state"] == "running"
    assert product.images() == []
    product.checkpoint(target, concurrent="cow")
    target.check_runs_right()


@pytest.mark.parametrize("phase", ["quiesce", "drain", "return"])
def test_a_target_that_is_killed_in_the_middle_is_told_as_lost_and_its_memory_is_given_back(
    make_product: Callable[..., Product], tmp_path: Path, phase: str
) -> None:
    product = hanging_at(make_product, tmp_path, phase)
    target = product.run("--idle-kib", "2048")
    product.call("ps")
    hanging = Hanging(product, target.pid, phase)
    os.kill(target.pid, signal.SIGKILL)
    assert target.process is not None
    target.process.wait(DEADLINE_S)
    error = from_dict(hanging.cancel())
    assert isinstance(error, TargetLostError)
    assert error.target_state == "gone"
    assert product.gpu_free_bytes() == product.gpu_total_bytes()
    assert product.images() == []
    product.call("stop")  # refused if anything were still held


def test_a_checkpoint_whose_client_went_away_goes_on_to_its_end(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    product = make_product()
    target = product.run()
    product.call("ps")
    hanging = Hanging(product, target.pid, "quiesce")
    hanging.connection.close()
    product.checkpoint(target)  # takes its turn after it
    assert len(product.images()) == 2
    target.check_runs_right()


def test_operations_on_one_target_take_turns(product: Product) -> None:
    target = product.run("--tiny", "50")
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda _: product.checkpoint(target)["image"], range(4)))
    assert sorted(images) == product.images()
    assert len(images) == 4
    target.check_runs_right()


def test_operations_on_different_targets_run_at_once(make_product: Callable[..., Product], tmp_path: Path) -> None:
    product = hanging_at(make_product, tmp_path, "return")
    first, second = product.run(), product.run()
    product.call("ps")
    hanging = Hanging(product, first.pid, "return")
    done = threading.Event()
    product.checkpoint(second)  # while the first one hangs
    done.set()
    hanging.cancel()
    first.check_runs_right()
    second.check_runs_right()


def test_two_gpu_processes_in_one_tree_are_taken_together(product: Product) -> None:
    target = product.run_script('"$@" & "$@" & wait')
    target.wait_for(lambda lines: sum(line.startswith("step 1 ") for line in lines) == 2, "both processes")
    result = product.call("checkpoint", target=target.pid, store=str(product.store_path))
    assert len(result["gpu_pids"]) == 2
    target.wait_steps(3)
    assert target.alive


def test_a_process_without_cuda_is_refused_with_the_reason(product: Product) -> None:
    with pytest.raises(RefusedError, match="CUDA"):
        product.call("suspend", target=os.getpid())


def test_a_stopped_target_is_refused_and_taken_once_it_goes_on(product: Product) -> None:
    target = product.run("--idle-kib", "2048")
    os.kill(target.pid, signal.SIGSTOP)
    [row] = product.call("ps")  # although its agent does not answer
    assert row["pid"] == target.pid
    with pytest.raises(RefusedError, match="stopped"):
        product.checkpoint(target)
    os.kill(target.pid, signal.SIGCONT)
    product.checkpoint(target)
    target.check_runs_right()


def test_two_suspends_at_once_suspend_once(product: Product) -> None:
    target = product.run("--idle-kib", "2048", name="sleeper")

    def suspend(_: int) -> str:
        try:
            return str(product.call("suspend", target="sleeper")["state"])
        except RefusedError as refusal:
            return refusal.target_state

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(suspend, range(3))) == {"suspended"}
    product.call("resume", target="sleeper")
    target.check_runs_right()
