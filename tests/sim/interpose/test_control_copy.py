"""Threads that help the driver's copies, without the rest of the product: also what sanitizers see of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import interposer_support as support
import pytest
from interposer_agents import DEADLINE_S, Listener, Target

MIB = 1 << 20
STATE_BYTES = 24 * MIB + 4096
CYCLES = 5
# The driver's own checkpoint and restore, by another process; the simulated one checks each word that it gets back.
CYCLE = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0
for step in ("Lock", "Checkpoint", "Restore", "Unlock"):
    arguments = ctypes.create_string_buffer(64)
    code = getattr(driver, "cuCheckpointProcess" + step)(int(sys.argv[1]), ctypes.byref(arguments))
    if code:
        sys.exit(f"{step} failed: {code}")
"""


@pytest.fixture
def target(target_program: Path, listener: Listener) -> Iterator[Target]:
    settings = {"WOODFROG_CONTROL_COPIES": "3", "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES)}
    with Target(target_program, listener.directory, **settings) as running:
        yield running


def driver_cycle(pid: int) -> None:
    of_target = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if one)
    machine = of_target["WOODFROG_SIMGPU_MACHINE"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(support.simgpu_dir()), "WOODFROG_SIMGPU_MACHINE": machine}
    environment.pop("LD_PRELOAD", None)
    subprocess.run([sys.executable, "-c", CYCLE, str(pid)], env=environment, check=True, timeout=DEADLINE_S)


def helpers(pid: int) -> int:
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    return names.count("woodfrog-copy")


def test_what_the_driver_gets_back_is_what_it_saved(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    with listener.accept() as link:
        for _ in range(CYCLES):
            assert link.offer_control_memory(STATE_BYTES) >= STATE_BYTES
            assert helpers(link.pid) >= 3  # and whoever of the cycle before has not ended yet
            driver_cycle(link.pid)
            link.withdraw_control_memory()
    assert target.ask("check") == "ok"


def test_a_child_that_is_forked_meanwhile_is_none_of_theirs(target: Target, listener: Listener) -> None:
    with listener.accept() as link:
        assert link.offer_control_memory(STATE_BYTES) >= STATE_BYTES
        assert target.ask("fork").startswith("child ")
        driver_cycle(link.pid)
        link.withdraw_control_memory()
    assert target.ask("check") == "ok"
