"""Both generations of the simulated driver: before CUDA 13.4 it has no custom storage, from then on it lends memory."""

from __future__ import annotations

import sys

import pytest
from simulated import CHECKPOINTED, RUNNING, Controller, Machine, Target, free_mib

MIB = 1 << 20
CONTROL = {"WOODFROG_SIMGPU_CONTROL_STATE": "24MiB"}

TARGET = """
import random

sizes = [3 << 20, 8 << 20, 5000]
addresses = [int(ok(driver.cuMemAlloc(size))) for size in sizes]
for seed, (address, size) in enumerate(zip(addresses, sizes)):
    write(address, random.Random(seed).randbytes(size))
print("ready", flush=True)
for line in sys.stdin:
    same = [read(address, size) == random.Random(seed).randbytes(size)
            for seed, (address, size) in enumerate(zip(addresses, sizes))]
    print(all(same), flush=True)
"""

# What a daemon would do: out into an arena with the transfer engine, and back.
THERE_AND_BACK = """
import sys
from woodfrog._native import transfer
from woodfrog.driver import storage
from woodfrog.driver.process import DriverProcess, ProcessState

process = DriverProcess(int(sys.argv[1]))
assert storage.available()

def copy(lent, arena, how):
    memories = [transfer.Device(piece.ordinal).view_memory(piece.address, piece.size_bytes) for piece in lent.pieces]
    offset, extents = 0, []
    for memory in memories:
        extents.append((memory, 0, offset, memory.size_bytes))
        offset += memory.size_bytes
    how(extents, arena)
    digests = [transfer.hash_device([(memory, 0, memory.size_bytes)], chunk_bytes=1 << 16) for memory in memories]
    for memory in memories:
        memory.release()
    return digests

process.lock(10)
with storage.begin_checkpoint(process.pid) as lent:
    assert process.state() is ProcessState.CHECKPOINTING
    total = sum(piece.size_bytes for piece in lent.pieces)
    arena = transfer.Arena(total)
    arena.register(lent.pieces[0].ordinal)
    out = copy(lent, arena, transfer.drain)
assert process.state() is ProcessState.CHECKPOINTED
print("out", total, [piece.ordinal for piece in lent.pieces], flush=True)
input()
with storage.begin_restore(process.pid) as lent:
    assert process.state() is ProcessState.RESTORING
    assert copy(lent, arena, transfer.refill) == out
process.unlock()
assert process.state() is ProcessState.RUNNING
print("back", flush=True)
"""


@pytest.fixture
def newer(machine: Machine) -> Machine:
    return machine.with_environment(WOODFROG_SIMGPU_DRIVER_VERSION="13040", **CONTROL)


def test_the_transfer_engine_takes_the_memory_and_brings_it_back(newer: Machine) -> None:
    target = Target(newer, "import sys\n" + TARGET)
    assert target.go_on() == "True"
    before = free_mib(newer)
    helper = newer.popen([sys.executable, "-c", THERE_AND_BACK, str(target.pid)])
    assert helper.stdin is not None
    assert helper.stdout is not None
    line = helper.stdout.readline().split()
    assert line[:1] == ["out"], helper.communicate(timeout=60)
    assert int(line[1]) >= 11 * MIB
    assert free_mib(newer) >= before + 11  # nothing of the target's is on the GPU, nor of what was lent
    out, err = helper.communicate("\n", timeout=60)
    assert (out, helper.returncode) == ("back\n", 0), err
    assert target.go_on() == "True"
    target.process.stdin.close()  # type: ignore[union-attr]
    assert target.process.wait(30) == 0


def test_what_was_stored_by_a_caller_is_not_restored_without_it(newer: Machine) -> None:
    target = Target(newer, "import sys\n" + TARGET)
    code = (
        "import sys\nfrom woodfrog.driver import storage\nfrom woodfrog.driver.library import DriverError\n"
        "from woodfrog.driver.process import DriverProcess\nprocess = DriverProcess(int(sys.argv[1]))\n"
        "process.lock(10)\nwith storage.begin_checkpoint(process.pid):\n    pass\n"
        "try:\n    process.restore()\nexcept DriverError as error:\n    print(error.result, error.target_state)\n"
    )
    done = newer.python(code, str(target.pid))
    assert done.stdout == "CUDA_ERROR_INVALID_VALUE frozen\n", done.stderr
    target.process.kill()
    target.process.wait(30)


def test_without_room_for_what_is_lent_back_the_target_stays_checkpointed(newer: Machine) -> None:
    target = Target(newer, "import sys\n" + TARGET)
    code = (
        "import os, sys\nfrom woodfrog.driver import storage\nfrom woodfrog.driver.library import DriverError\n"
        "from woodfrog.driver.process import DriverProcess\nprocess = DriverProcess(int(sys.argv[1]))\n"
        "process.lock(10)\nwith storage.begin_checkpoint(process.pid):\n    pass\n"
        "from driver import *\nstart(0)\nheld = ok(driver.cuMemAlloc(250 << 20))\n"
        "try:\n    storage.begin_restore(process.pid)\nexcept DriverError as error:\n"
        "    print(error.result, process.state().name)\n"
    )
    done = newer.python(code, str(target.pid))
    assert done.stdout == "CUDA_ERROR_OUT_OF_MEMORY CHECKPOINTED\n", done.stderr
    target.process.kill()
    target.process.wait(30)


def test_a_driver_before_13_4_has_no_custom_storage_and_that_is_said(machine: Machine, control: Controller) -> None:
    target = Target(machine, "import sys\n" + TARGET)
    code = (
        "import sys\nfrom woodfrog.driver import features, storage\nfrom woodfrog.errors import RefusedError\n"
        "assert features.has('checkpoint_api')\n"
        "try:\n    storage.begin_checkpoint(int(sys.argv[1]))\nexcept RefusedError as error:\n    print(error.advice)\n"
    )
    done = machine.python(code, str(target.pid))
    assert "615" in done.stdout, done.stderr
    assert control.state(target.pid) == RUNNING
    # And its own way is as ever.
    assert [control(action, target.pid) for action in ("lock", "checkpoint")] == [0, 0]
    assert control.state(target.pid) == CHECKPOINTED
    assert [control(action, target.pid) for action in ("restore", "unlock")] == [0, 0]
    assert target.go_on() == "True"
    target.process.stdin.close()  # type: ignore[union-attr]
    assert target.process.wait(30) == 0
