"""Builds the interpreter's tests and runs them: kernels that nvcc compiles in four ways, and PTX texts of every kind.

The programs are C++ (see CMakeLists.txt beside this file), because they test a C++ library without a driver around it.
The library itself is the one that `make build` has left in the build folder; without it, it is built here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def _tool(name: str) -> str:
    """A build tool from the virtual environment or from the system."""
    beside_python = Path(sysconfig.get_path("scripts")) / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    assert found, f"there is no {name}: run scripts/setup.sh"
    return found


def _nvcc() -> str:
    """nvcc of an installed toolkit, else of the nvidia-cuda-nvcc wheel."""
    for candidate in (shutil.which("nvcc"), shutil.which("/usr/local/cuda/bin/nvcc")):
        if candidate:
            return candidate
    import nvidia  # type: ignore[import-untyped]

    for location in nvidia.__path__:
        if (found := Path(location) / "cu13" / "bin" / "nvcc").exists():
            return str(found)
    raise AssertionError("there is no nvcc: install nvidia-cuda-nvcc and nvidia-cuda-cccl, or put the toolkit on PATH")


def _built_library() -> Path | None:
    """The interpreter of the installed package's own build, whichever tag the build folder carries."""
    found = sorted(ROOT.glob("build/cp*/native/simgpu/ptx/libsimgpu_ptx.a"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the two test programs and the PTX files."""
    if ready := os.environ.get("SIMGPU_PTX_TESTS"):
        return Path(ready)
    folder = tmp_path_factory.mktemp("ptx")
    library = _built_library()
    _run(
        _tool("cmake"), "-S", HERE, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        f"-DWOODFROG_NVCC={_nvcc()}", *([f"-DSIMGPU_PTX_LIBRARY={library}"] if library else []),
    )  # fmt: skip
    _run(_tool("cmake"), "--build", folder, "--parallel", "2")
    return folder


# The first of these tests builds: two minutes where two cores have nothing else to do.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", ["sm_80_ON", "sm_80_OFF", "sm_90_ON", "sm_90_OFF"])
def test_compiled_kernels_compute_what_the_host_computes(programs: Path, variant: str) -> None:
    assert "0 of 76 cases failed" in _run(programs / "simgpu_ptx_test", programs / f"{variant}.ptx")


@pytest.mark.timeout(1200)
def test_texts_are_read_or_refused_and_rare_instructions_work(programs: Path) -> None:
    output = _run(programs / "simgpu_ptx_text_test", *sorted(programs.glob("*.ptx")))
    assert "0 of 15 cases failed" in output
