"""What the tests of access templates share: the corpus compiled in four ways, and the recorder program.

Both are made once and kept under build/kernels-tests, named by the content they were made from.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from once import once

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "kernels-tests"
VARIANTS = [(architecture, level) for architecture in ("sm_80", "sm_90") for level in ("O0", "O3")]
Compiled = Callable[[str, str, str], Path]


def nvcc() -> str:
    """The compiler of the virtual environment, else the one on PATH; a test without it fails and says so."""
    for folder in sys.path:
        candidate = Path(folder) / "nvidia" / "cu13" / "bin" / "nvcc"
        if candidate.is_file():
            return str(candidate)
    found = shutil.which("nvcc")
    if found is None:
        pytest.fail("there is no nvcc: install the test dependencies (nvidia-cuda-nvcc), or put the toolkit on PATH")
    return found


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.fail(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


@pytest.fixture(scope="session")
def compiled() -> Compiled:
    """(corpus file, architecture, "O0" or "O3") → the path of its PTX."""
    compiler = nvcc()

    def compile_file(name: str, architecture: str, level: str) -> Path:
        source = HERE / "corpus" / f"{name}.cu"
        flags = ["-ptx", "-std=c++17", f"-arch={architecture}", *(["-Xcicc", "-O0"] if level == "O0" else [])]
        key = hashlib.sha256(source.read_bytes() + " ".join([compiler, *flags]).encode()).hexdigest()[:16]
        target = BUILD / "ptx" / f"{name}-{architecture}-{level}-{key}.ptx"
        return once(target, lambda: run(compiler, *flags, source, "-o", target))

    return compile_file


@pytest.fixture(scope="session")
def recorder_program() -> Path:
    """The recorder, linked with the newest build of the simulated GPU's interpreter."""
    interpreter = ROOT / "native" / "simgpu" / "ptx"
    header = interpreter / "ptx.hpp"
    built = [p for p in (ROOT / "build").glob("**/libsimgpu_ptx.a") if p.stat().st_mtime > header.stat().st_mtime]
    library = max(built, key=lambda path: path.stat().st_mtime, default=None)
    if library is None:
        cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
        run(cmake, "-S", interpreter, "-B", BUILD / "interpreter", "-DCMAKE_BUILD_TYPE=Release")
        run(cmake, "--build", BUILD / "interpreter", "-j2")
        library = BUILD / "interpreter" / "libsimgpu_ptx.a"
    source = HERE / "recorder.cpp"
    key = hashlib.sha256(source.read_bytes() + header.read_bytes()).hexdigest()[:16]
    program = BUILD / f"recorder-{key}-{int(library.stat().st_mtime)}"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{interpreter}"]
    return once(program, lambda: run("c++", *flags, source, library, "-lpthread", "-o", program))
