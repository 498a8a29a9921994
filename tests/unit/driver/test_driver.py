"""The driver layer against a stand-in for cuda-bindings: results become errors that say what the target is doing now.

The real bindings on the simulated GPU are tested in tests/sim; here each answer of a driver can be had.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from woodfrog.driver import features, library
from woodfrog.driver.library import DriverError, NoDriverError
from woodfrog.driver.process import DriverProcess, GpuPair, ProcessState, is_cuda_process
from woodfrog.errors import NoSpaceError, NotFoundError, RefusedError, TargetLostError, TimeoutExceededError

OWN = os.getpid()


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801


class StandIn:
    """Answers like cuda.bindings.driver; `results` gives the next answer of a function."""

    def __init__(self) -> None:
        self.state = ProcessState.RUNNING
        self.results: dict[str, Result] = {}
        self.calls: list[tuple[str, Any]] = []
        self.CUcheckpointLockArgs = SimpleNamespace

    def _answer(self, name: str, after: ProcessState, argument: Any) -> tuple[Result]:
        self.calls.append((name, argument))
        result = self.results.get(name, Result.CUDA_SUCCESS)
        if result is Result.CUDA_SUCCESS:
            self.state = after
        return (result,)

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Result, int]:
        return self.results.get("state", Result.CUDA_SUCCESS), self.state

    def cuCheckpointProcessLock(self, pid: int, arguments: Any) -> tuple[Result]:
        return self._answer("lock", ProcessState.LOCKED, arguments)

    def cuCheckpointProcessCheckpoint(self, pid: int, arguments: Any) -> tuple[Result]:
        return self._answer("checkpoint", ProcessState.CHECKPOINTED, arguments)

    def cuCheckpointProcessRestore(self, pid: int, arguments: Any) -> tuple[Result]:
        return self._answer("restore", ProcessState.LOCKED, arguments)

    def cuCheckpointProcessUnlock(self, pid: int, arguments: Any) -> tuple[Result]:
        return self._answer("unlock", ProcessState.RUNNING, arguments)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(library, "_bindings", stand_in)
    return stand_in


def test_the_cycle_ends_where_it_began(driver: StandIn) -> None:
    process = DriverProcess(OWN)
    assert process.state() is ProcessState.RUNNING
    process.lock(timeout_s=2.5)
    assert driver.calls[-1][1].timeoutMs == 2500
    process.checkpoint()
    assert process.state() is ProcessState.CHECKPOINTED
    process.restore()
    assert process.state() is ProcessState.LOCKED
    process.unlock()
    assert process.state() is ProcessState.RUNNING


@pytest.mark.parametrize(("timeout_s", "milliseconds"), [(0, 1), (0.0001, 1), (10**9, 0xFFFFFFFF)])
def test_a_lock_is_never_without_a_time_out(driver: StandIn, timeout_s: float, milliseconds: int) -> None:
    DriverProcess(OWN).lock(timeout_s)
    assert driver.calls[-1][1].timeoutMs == milliseconds


def test_a_lock_that_times_out_says_that_the_target_runs_on(driver: StandIn) -> None:
    driver.results["lock"] = Result.CUDA_ERROR_NOT_READY
    with pytest.raises(TimeoutExceededError, match="could not lock the target within 3 s") as caught:
        DriverProcess(OWN).lock(3)
    assert caught.value.target_state == "running"
    assert caught.value.details["result"] == "CUDA_ERROR_NOT_READY"


@pytest.mark.parametrize(
    ("state", "target_state", "advice"),
    [
        (ProcessState.RUNNING, "running", "runs on"),
        (ProcessState.LOCKED, "frozen", "unlock lets it go on"),
        (ProcessState.FAILED, "gone", "given the process up"),
    ],
)
def test_a_failed_checkpoint_says_what_the_target_is_now(
    driver: StandIn, state: ProcessState, target_state: str, advice: str
) -> None:
    driver.state = state
    driver.results["checkpoint"] = Result.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(DriverError, match=f"process is {state.name.lower()}") as caught:
        DriverProcess(OWN).checkpoint()
    assert caught.value.target_state == target_state
    assert advice in caught.value.advice
    assert "managed memory" in caught.value.advice
    assert caught.value.result == "CUDA_ERROR_NOT_SUPPORTED"


def test_a_restore_without_room_on_the_gpu_can_be_tried_again(driver: StandIn) -> None:
    driver.results["restore"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(NoSpaceError, match="not enough free memory") as caught:
        DriverProcess(OWN).restore()
    assert caught.value.target_state == "frozen"
    assert "woodfrog resume" in caught.value.advice


def test_a_process_that_the_driver_does_not_know_is_refused(driver: StandIn) -> None:
    driver.results["state"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RefusedError, match="does not use CUDA"):
        DriverProcess(OWN).state()
    assert not is_cuda_process(OWN)
    assert not is_cuda_process(2**22 + 1)


def test_a_threads_number_is_refused(driver: StandIn) -> None:
    import threading

    ready, done = threading.Event(), threading.Event()
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        ready.set()
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        with pytest.raises(RefusedError, match=f"thread of process {OWN}"):
            DriverProcess(numbers[0])
    finally:
        done.set()
        thread.join()


def test_a_process_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        DriverProcess(2**22 + 1)


def test_a_target_that_ends_during_a_call_is_lost_and_not_failed(driver: StandIn) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = DriverProcess(child.pid)
    child.kill()
    child.communicate()
    driver.results["unlock"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(TargetLostError, match="ended during the driver's unlock"):
        process.unlock()


def test_a_function_that_the_bindings_or_the_driver_lack_is_named(driver: StandIn) -> None:
    with pytest.raises(DriverError, match="cuCheckpointProcessGetRestoreThreadId"):
        DriverProcess(OWN).restore_thread_id()

    def missing(pid: int, arguments: Any) -> None:
        raise RuntimeError('Function "cuCheckpointProcessUnlock" not found')

    driver.cuCheckpointProcessUnlock = missing  # type: ignore[method-assign, assignment]
    with pytest.raises(DriverError, match="does not have cuCheckpointProcessUnlock"):
        DriverProcess(OWN).unlock()


def test_gpus_are_mapped_by_all_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    from cuda.bindings import driver as real

    from woodfrog.driver import process

    monkeypatch.setattr(library, "_bindings", real)
    old, new = bytes(range(16)), bytes(range(16, 32))
    arguments = process._restore_arguments([GpuPair(old, new), GpuPair(new, old)])
    assert arguments.gpuPairsCount == 2
    # CUcheckpointRestoreArgs (cuda.h) begins with the pointer to the pairs, each two UUIDs of 16 bytes.
    pairs = ctypes.c_void_p.from_address(int(arguments.getPtr())).value
    assert pairs is not None
    assert ctypes.string_at(pairs, 64) == old + new + new + old


def test_a_uuid_has_sixteen_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        GpuPair(b"short", b"u" * 16)


def test_everything_imports_and_explains_itself_where_there_is_no_driver() -> None:
    code = (
        "from woodfrog.driver import devices, features, library, process\n"
        "import os, sys\n"
        "assert 'cuda.bindings.driver' not in sys.modules  # costs time that only GPU work should pay\n"
        "try:\n"
        "    devices.list_gpus()\n"
        "except library.NoDriverError as error:\n"
        "    print(error, '|', error.advice)\n"
        "try:\n"
        "    process.is_cuda_process(os.getpid())\n"
        "except library.NoDriverError as error:\n"
        "    print('again')\n"
        "print(sorted(features.exported_symbols()), devices.driver_branch())\n"
    )
    # An empty folder first on the library path hides a driver only if there is none elsewhere: such a machine is not
    # what this test is about.
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    if len(out) == 1:
        pytest.skip("this machine has a CUDA driver")
    assert "no CUDA driver on this machine" in out[0]
    assert "570" in out[0]
    assert out[1:] == ["again", "[] None"]


def test_a_driver_that_does_not_start_is_told_by_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as real

    monkeypatch.setattr(library, "_bindings", None)
    monkeypatch.setattr(real, "cuInit", lambda flags: (Result.CUDA_ERROR_NOT_SUPPORTED,))
    with pytest.raises(NoDriverError, match="does not start: CUDA_ERROR_NOT_SUPPORTED"):
        library.bindings()


@pytest.mark.parametrize(
    ("branch", "exported", "present", "absent"),
    [
        (550, (), {"toggle"}, {"actions", "checkpoint_api", "gpu_remap"}),
        (
            570,
            ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessLock"),
            {"checkpoint_api", "lock_timeout"},
            {"gpu_remap", "custom_storage"},
        ),
        (
            580,
            ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessLock"),
            {"gpu_remap", "checkpoint_api"},
            {"arm", "legacy_ipc"},
        ),
        (
            900,
            ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessLock", "cuCheckpointOperationComplete"),
            {"gpu_remap", "custom_storage", "legacy_ipc"},
            set(),
        ),
    ],
)
def test_what_a_driver_can_do_follows_its_symbols_then_its_branch(
    branch: int, exported: tuple[str, ...], present: set[str], absent: set[str]
) -> None:
    verdicts = {one.feature.name: one.available for one in features.judge(branch, frozenset(exported))}
    assert all(verdicts[name] for name in present)
    assert not any(verdicts[name] for name in absent)


def test_an_unknown_branch_is_judged_by_symbols_alone() -> None:
    verdicts = {one.feature.name: one for one in features.judge(None, frozenset({"cuCheckpointProcessCheckpoint"}))}
    assert verdicts["checkpoint_api"].available
    assert verdicts["gpu_remap"].how == "unknown"
    assert not verdicts["gpu_remap"].available


@pytest.mark.parametrize(
    ("version", "branch"),
    [((11, 8), None), ((12, 4), 550), ((12, 9), 570), ((13, 0), 580), ((13, 3), 580), ((14, 0), 615)],
)
def test_without_nvml_the_branch_follows_from_the_cuda_version(version: tuple[int, int], branch: int | None) -> None:
    assert features.branch_of_cuda(version) == branch


def test_a_feature_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        features.has("nonsense")


@pytest.mark.parametrize(
    ("machine", "release", "refused"),
    [("aarch64", (580,), True), ("aarch64", (595,), False), ("aarch64", (900,), False), ("x86_64", (580,), False)],
)
def test_arm_is_refused_before_its_driver_can_do_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, release: tuple[int, ...], refused: bool
) -> None:
    monkeypatch.setattr(features.devices, "driver_branch", lambda: release)
    monkeypatch.setattr(features.platform, "machine", lambda: machine)
    monkeypatch.setattr(features, "exported_symbols", lambda: frozenset({"cuCheckpointProcessCheckpoint"}))
    features._below.cache_clear()
    try:
        with pytest.raises(RefusedError, match="driver 595") if refused else contextlib.nullcontext():
            features.require_checkpoints()
        monkeypatch.setattr(features, "exported_symbols", frozenset)
        with pytest.raises(RefusedError, match="driver 570"):
            features.require_checkpoints()
    finally:
        features._below.cache_clear()


@pytest.mark.parametrize(
    ("release", "cuda", "lacking"),
    [
        ((575, 51), (12, 9), {"gpu_remap", "legacy_ipc"}),
        ((580, 159), (13, 0), {"legacy_ipc"}),
        ((612, 1), (13, 3), set()),
        ((700, 1), (14, 0), set()),  # newer than the table: the driver is asked
        (None, (12, 9), {"gpu_remap", "legacy_ipc"}),
        (None, (13, 0), set()),  # of a branch from 580 on: that is open, so it is tried
    ],
)
def test_only_what_a_driver_is_known_to_lack_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, ...] | None, cuda: tuple[int, int], lacking: set[str]
) -> None:
    monkeypatch.setattr(features.devices, "driver_branch", lambda: release)
    monkeypatch.setattr(features.devices, "cuda_version", lambda: cuda)
    features._below.cache_clear()
    try:
        assert {name for name in ("gpu_remap", "legacy_ipc") if features.lacks(name)} == lacking
        if "gpu_remap" in lacking:
            with pytest.raises(RefusedError, match="driver 580 or newer"):
                features.require("gpu_remap", "this")
        else:
            features.require("gpu_remap", "this")
    finally:
        features._below.cache_clear()
