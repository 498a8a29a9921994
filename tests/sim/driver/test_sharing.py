"""Memory shared between processes by file descriptor, and the accounting of it."""

from __future__ import annotations

import os
import signal
import socket
import sys

from simulated import Machine, free_mib

CREATOR = """
from driver import *
import os, signal, socket
start(0)
address, handle = map_new(32 << 20)
write(address, b"from the dead")
fd = export(handle)
channel = socket.socket(fileno=int(os.environ["CHANNEL"]))
socket.send_fds(channel, [b"fd"], [fd])
signal.pause()
"""

IMPORTER = """
from driver import *
import os
start(0)
fd = int(os.environ["SHARED"])
handle = ok(driver.cuMemImportFromShareableHandle(fd, POSIX_FD))
os.close(fd)
address = map_handle(handle, 32 << 20)
print(read(address, 13).decode(), free_bytes() >> 20)
"""


def test_a_descriptor_keeps_memory_whose_creator_was_killed(machine: Machine) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            creator = machine.with_environment(CHANNEL=str(theirs.fileno())).popen(
                [sys.executable, "-c", CREATOR], pass_fds=[theirs.fileno()]
            )
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
    creator.send_signal(signal.SIGKILL)
    creator.wait()
    assert free_mib(machine) == 256 - 32  # nobody but this process, which has no CUDA, holds it
    importer = machine.with_environment(SHARED=str(fd)).popen([sys.executable, "-c", IMPORTER], pass_fds=[fd])
    os.close(fd)
    out, err = importer.communicate(timeout=60)
    assert out.split("\n")[0] == f"from the dead {256 - 32}", err
    assert free_mib(machine) == 256


def test_processes_compete_for_one_device(machine: Machine) -> None:
    hold = "from driver import *; start(0); p = ok(driver.cuMemAlloc(200 << 20)); print('held', flush=True); input()"
    holder = machine.popen([sys.executable, "-c", hold])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    attempt = (
        "from driver import *; start(0); print(int(code(driver.cuMemAlloc(100 << 20))),"
        " int(code(driver.cuMemAlloc(50 << 20))))"
    )
    assert machine.python(attempt).stdout.split() == ["2", "0"]
    holder.kill()
    holder.wait()
    assert machine.python(attempt).stdout.split() == ["0", "0"]


def test_machines_of_different_names_share_nothing(machine: Machine) -> None:
    hold = "from driver import *; start(0); p = ok(driver.cuMemAlloc(200 << 20)); print('held', flush=True); input()"
    holder = machine.popen([sys.executable, "-c", hold])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert free_mib(machine) == 56
    assert free_mib(machine.with_environment(WOODFROG_SIMGPU_MACHINE="another")) == 256
    holder.kill()
    holder.wait()


def test_visible_devices_are_chosen_by_number_and_by_uuid(machine: Machine) -> None:
    three = machine.with_environment(WOODFROG_SIMGPU_DEVICES="3")
    code = (
        "from driver import *; print(int(driver.cuInit(0)[0]), flush=True); n = ok(driver.cuDeviceGetCount())\n"
        "print(*(bytes(ok(driver.cuDeviceGetUuid(i)).bytes).hex() for i in range(n)))"
    )
    everything = three.python(code).stdout.split()[1:]
    assert len(everything) == 3

    def visible(value: str) -> list[str]:
        return three.with_environment(CUDA_VISIBLE_DEVICES=value).python(code).stdout.split()

    assert visible("2,0") == ["0", everything[2], everything[0]]
    assert visible("1,7,0") == ["0", everything[1]]
    raw = everything[1]
    uuid = f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"
    assert visible(uuid) == ["0", everything[1]]
    assert visible("") == ["100"]
