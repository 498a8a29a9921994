"""The driver's checkpoint machine, driven from another process by pid: states, wrong calls, failures, whole cycles."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulated import (
    CHECKPOINTED,
    FAILED,
    ILLEGAL_STATE,
    INVALID_VALUE,
    LOCKED,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    RUNNING,
    SUCCESS,
    Controller,
    Machine,
    Target,
    free_mib,
)

SIMPLE = """
pointer = ok(driver.cuMemAlloc(10 << 20))
ok(driver.cuMemsetD8(pointer, 7, 10 << 20))
mapped, handle = map_new(GRANULARITY)
write(mapped, b"mapped")
print(int(pointer), flush=True)
input()
assert read(pointer, 10 << 20) == b"\\x07" * (10 << 20)
assert read(mapped, 6) == b"mapped"
print("right", flush=True)
input()
"""


@pytest.fixture
def target(machine: Machine) -> Iterator[Target]:
    process = Target(machine, SIMPLE)
    yield process
    process.process.kill()
    process.process.wait()


def test_a_checkpointed_target_holds_no_device_memory_and_is_whole_after_the_restore(
    machine: Machine, control: Controller, target: Target
) -> None:
    assert control.state(target.pid) == RUNNING
    assert free_mib(machine) == 256 - 12
    assert control("lock", target.pid, 5000) == SUCCESS
    assert control.state(target.pid) == LOCKED
    assert control("checkpoint", target.pid) == SUCCESS
    assert control.state(target.pid) == CHECKPOINTED
    assert target.device_files() == 0
    assert free_mib(machine) == 256
    assert control("restore", target.pid) == SUCCESS
    assert control.state(target.pid) == LOCKED
    assert control("unlock", target.pid) == SUCCESS
    assert control.state(target.pid) == RUNNING
    assert free_mib(machine) == 256 - 12
    assert target.go_on() == "right"
    target.finish()


def test_calls_in_the_wrong_state_change_nothing(control: Controller, target: Target) -> None:
    allowed = {RUNNING: "lock", LOCKED: "checkpoint", CHECKPOINTED: "restore"}
    for state, right in allowed.items():
        wrong = {"lock", "checkpoint", "restore", "unlock"} - {right} - ({"unlock"} if state == LOCKED else set())
        for action in sorted(wrong):
            assert control(action, target.pid) == ILLEGAL_STATE, (state, action)
            assert control.state(target.pid) == state
        assert control(right, target.pid) == SUCCESS
    assert control("restore", target.pid) == ILLEGAL_STATE
    assert control("unlock", target.pid) == SUCCESS
    assert control("unlock", target.pid) == ILLEGAL_STATE
    assert target.go_on() == "right"
    target.finish()


def test_calls_of_a_locked_target_wait_for_the_unlock(control: Controller, target: Target) -> None:
    assert control("lock", target.pid) == SUCCESS
    assert control("checkpoint", target.pid) == SUCCESS
    target.tell()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(target.line()))
    reader.start()
    reader.join(0.5)
    assert not lines
    assert control("restore", target.pid) == SUCCESS
    reader.join(0.3)
    assert not lines
    assert control("unlock", target.pid) == SUCCESS
    reader.join(30)
    assert lines == ["right"]
    target.finish()


def test_a_thread_id_stands_for_its_process(control: Controller, target: Target) -> None:
    result, thread = control.ask("thread", target.pid)
    assert result == SUCCESS
    assert Path(f"/proc/{target.pid}/task/{thread}").exists()
    assert thread != target.pid
    assert control("lock", thread) == SUCCESS
    assert control.state(target.pid) == LOCKED
    assert control("unlock", target.pid) == SUCCESS


def test_processes_without_cuda_are_refused(control: Controller) -> None:
    assert control("state", os.getpid()) == NOT_INITIALIZED
    assert control("lock", os.getpid()) == NOT_INITIALIZED
    assert control("state", 2**22 + 1) == INVALID_VALUE
    assert control("lock", 0) == INVALID_VALUE


def test_a_lock_that_times_out_leaves_the_target_running(machine: Machine, control: Controller) -> None:
    code = """
flag = ok(driver.cuMemHostAlloc(4096, 0))
import ctypes
value = ctypes.c_uint.from_address(int(flag)); value.value = 0
stream, other = ok(driver.cuStreamCreate(NON_BLOCKING)), ok(driver.cuStreamCreate(NON_BLOCKING))
ok(driver.cuStreamWaitValue32(stream, int(flag), 1, 0))
print("ready", flush=True)
input()
ok(driver.cuStreamQuery(other))
value.value = 1
ok(driver.cuStreamSynchronize(stream))
print("ran", flush=True)
input()
"""
    target = Target(machine, code)
    assert control("lock", target.pid, 200) == NOT_READY
    assert control.state(target.pid) == RUNNING
    assert target.go_on() == "ran"
    assert control("lock", target.pid, 200) == SUCCESS
    assert control("unlock", target.pid) == SUCCESS
    target.finish()


def test_a_full_device_leaves_the_target_checkpointed_until_there_is_room(
    machine: Machine, control: Controller, target: Target
) -> None:
    assert control("lock", target.pid) == SUCCESS
    assert control("checkpoint", target.pid) == SUCCESS
    other = Target(machine, "pointer = ok(driver.cuMemAlloc(250 << 20))\nprint('full', flush=True)\ninput()")
    assert control("restore", target.pid) == OUT_OF_MEMORY
    assert control.state(target.pid) == CHECKPOINTED
    assert target.device_files() == 0
    other.finish()
    assert control("restore", target.pid) == SUCCESS
    assert control("unlock", target.pid) == SUCCESS
    assert target.go_on() == "right"
    target.finish()


IMPORTED = """
import os, sys
address, handle = map_new(GRANULARITY)
fd = export(handle)
ok(driver.cuMemUnmap(address, GRANULARITY)); ok(driver.cuMemRelease(handle))
imported = ok(driver.cuMemImportFromShareableHandle(fd, POSIX_FD))
ok(driver.cuMemMap(address, GRANULARITY, 0, imported, 0))
ok(driver.cuMemSetAccess(address, GRANULARITY, [access(0)], 1))
print("ready", flush=True)
input()
ok(driver.cuMemUnmap(address, GRANULARITY)); ok(driver.cuMemRelease(imported))
print("released", flush=True)
input()
"""


def test_a_target_with_imported_memory_mapped_is_lost_at_the_restore(machine: Machine, control: Controller) -> None:
    target = Target(machine, IMPORTED)
    assert control("lock", target.pid) == SUCCESS
    assert control("checkpoint", target.pid) == SUCCESS
    assert control("restore", target.pid) == NOT_SUPPORTED
    assert control.state(target.pid) == FAILED
    assert control("restore", target.pid) == ILLEGAL_STATE
    assert control("unlock", target.pid) == ILLEGAL_STATE
    target.process.kill()
    target.process.wait()


def test_a_target_that_released_its_imported_memory_can_be_restored(machine: Machine, control: Controller) -> None:
    target = Target(machine, IMPORTED)
    assert target.go_on() == "released"
    for action in ("lock", "checkpoint", "restore", "unlock"):
        assert control(action, target.pid) == SUCCESS
    target.finish()


def test_managed_memory_is_refused_at_the_checkpoint(machine: Machine, control: Controller) -> None:
    target = Target(
        machine,
        "flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value\n"
        "pointer = ok(driver.cuMemAllocManaged(4096, flags))\nprint('ready', flush=True)\ninput()",
    )
    assert control("lock", target.pid) == SUCCESS
    assert control("checkpoint", target.pid) == NOT_SUPPORTED
    assert control.state(target.pid) == LOCKED
    assert control("unlock", target.pid) == SUCCESS
    target.finish()


def test_a_restore_onto_another_device_moves_the_memory_there(machine: Machine, control: Controller) -> None:
    two = machine.with_environment(WOODFROG_SIMGPU_DEVICES="2")
    uuids = two.python(
        "from driver import *; ok(driver.cuInit(0))\n"
        "print(*(bytes(ok(driver.cuDeviceGetUuid(i)).bytes).hex() for i in range(2)))"
    ).stdout.split()
    show = "from driver import *\nfor i in range(2):\n    start(i)\n    print(free_bytes() >> 20)"
    target = Target(two, SIMPLE)
    assert two.python(show).stdout.split() == ["244", "256"]
    assert control("lock", target.pid) == SUCCESS
    assert control("checkpoint", target.pid) == SUCCESS
    assert control("restore", target.pid, f"{uuids[0]}={uuids[1]}") == INVALID_VALUE  # not every device is listed
    assert control.state(target.pid) == CHECKPOINTED
    swapped = [f"{uuids[0]}={uuids[1]}", f"{uuids[1]}={uuids[0]}"]
    assert control("restore", target.pid, *swapped) == SUCCESS
    assert control("unlock", target.pid) == SUCCESS
    assert two.python(show).stdout.split() == ["256", "244"]
    assert target.go_on() == "right"
    target.finish()


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore", "unlock"])
def test_an_injected_failure_fails_the_call_once_and_leaves_the_state(
    machine: Machine, control: Controller, action: str
) -> None:
    target = Target(machine.with_environment(WOODFROG_SIMGPU_FAIL=f"{action}:999:1"), SIMPLE)
    for step in ("lock", "checkpoint", "restore", "unlock"):
        before = control.state(target.pid)
        if step == action:
            assert control(step, target.pid) == 999
            assert control.state(target.pid) == before
        assert control(step, target.pid) == SUCCESS
    assert target.go_on() == "right"
    target.finish()


@pytest.mark.parametrize("program", ["multistream", "churn"])
def test_a_busy_program_goes_through_ten_cycles_in_the_middle_of_its_work(
    machine: Machine, control: Controller, compiled: Callable[[str], Path], program: str
) -> None:
    process = machine.popen([compiled(program)])
    try:
        question, answer = process.stdin, process.stdout
        assert question is not None
        assert answer is not None

        def steps() -> int:
            question.write("?")
            question.flush()
            return int(answer.readline().split()[1])

        steps()  # it has started its threads
        for _ in range(10):
            for action in ("lock", "checkpoint", "restore", "unlock"):
                assert control(action, process.pid) == SUCCESS
        before = steps()
        while steps() <= before:
            pass
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out + err
    assert out.strip().endswith("errors 0")


def test_other_users_may_not_control_a_target(machine: Machine, target: Target) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user here")
    # Everything is loaded before the change of user, who may not be able to read this Python's files.
    code = (
        "import __future__, ctypes, os, sys; source = open(sys.argv[1]).read(); ctypes.CDLL('libcuda.so.1')\n"
        "os.setuid(65534); exec(source)"
    )
    script = Path(machine.environment["PYTHONPATH"]) / "control.py"
    done = subprocess.run(
        [sys.executable, "-c", code, script],
        input=f"state {target.pid}\nlock {target.pid}\n",
        env=dict(machine.environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answers = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(answers) == 2, done.stderr
    assert "0" not in answers
