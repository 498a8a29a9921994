"""Fixtures for the tests of the simulated driver.

Every test works in processes of its own, on a simulated machine of its own (WOODFROG_SIMGPU_MACHINE): the memory of the
devices is shared by all processes that name the same machine, and tests may run beside each other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from once import once, session_folder
from simulated import HERE, Controller, Machine, cuda_include, library_directory


@pytest.fixture
def machine() -> Machine:
    directory = library_directory()
    assert (directory / "libcuda.so.1").exists(), f"the simulated driver was not built: {directory}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("WOODFROG_SIMGPU_", "CUDA_VISIBLE"))
    }
    environment |= {
        "LD_LIBRARY_PATH": str(directory),
        "PYTHONPATH": str(HERE / "inside"),
        "WOODFROG_SIMGPU_MACHINE": uuid.uuid4().hex[:12],
        "WOODFROG_SIMGPU_MEMORY": "256MiB",
    }
    return Machine(directory, environment)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles programs/NAME.cpp against the simulated driver, once."""
    folder = session_folder(tmp_path_factory) / "driver-programs"

    def build(name: str) -> Path:
        target = folder / name
        return once(target, lambda: compile_program(name, target))

    def compile_program(name: str, target: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler is not None, "no C++ compiler"
        command = [compiler, "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-o", str(target)]
        command += [str(HERE / "programs" / f"{name}.cpp"), *cuda_include(), "-pthread"]
        command += [f"-L{library_directory()}", "-l:libcuda.so.1"]
        subprocess.run(command, check=True, timeout=120)

    return build


@pytest.fixture
def control(machine: Machine) -> Iterator[Controller]:
    controller = Controller(machine)
    yield controller
    controller.close()
