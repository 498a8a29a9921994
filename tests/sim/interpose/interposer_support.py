"""What the interposer's tests share: where the libraries are, test programs compiled once, environments to run them in.

The compiled parts are those of the installed package; WOODFROG_TEST_INTERPOSER and WOODFROG_TEST_SIMGPU name others
(a build with a sanitizer, say).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from once import once

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"


def interposer() -> Path:
    """The library under test."""
    if chosen := os.environ.get("WOODFROG_TEST_INTERPOSER"):
        return Path(chosen)
    from woodfrog._native import paths

    return paths.interposer()


def simgpu_dir() -> Path:
    """The folder of the simulated libcuda.so.1."""
    if chosen := os.environ.get("WOODFROG_TEST_SIMGPU"):
        return Path(chosen)
    from woodfrog._native import paths

    return paths.simgpu_dir()


def cuda_include() -> Path:
    """The folder of cuda.h: the wheel's beside this Python, else a toolkit's."""
    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        candidates += [Path(location) / "cu13" / "include", Path(location) / "cuda_runtime" / "include"]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates.append(Path("/usr/local/cuda/include"))
    for candidate in candidates:
        if (candidate / "cuda.h").exists():
            return candidate
    raise FileNotFoundError("no cuda.h: install nvidia-cuda-runtime or set CUDA_HOME")


def compile_program(source: str, folder: Path, *options: str, link_driver: bool = True, output: str = "") -> Path:
    """Compiles a program of this folder, linked with the simulated driver as applications are with the real one."""
    program = folder / (output or Path(source).stem)
    return once(program, lambda: _compile(source, program, options, link_driver=link_driver))


def _compile(source: str, program: Path, options: tuple[str, ...], *, link_driver: bool) -> None:
    command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-isystem{cuda_include()}",
               str(PROGRAMS / source), "-o", str(program), "-pthread", *options]  # fmt: skip
    if link_driver:
        command += [f"-L{simgpu_dir()}", "-l:libcuda.so.1", "-Wl,--allow-shlib-undefined"]
    bare = {key: value for key, value in os.environ.items() if not key.startswith("LD_")}
    built = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def sanitizer_libraries() -> list[str]:
    """What this process had to preload for a library under test that is built with a sanitizer."""
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    return [path for path in preloaded if Path(path).name.startswith(("libasan", "libtsan", "libubsan", "libstdc++"))]


def environment(more: dict[str, str] | None = None, *, interposed: bool = True) -> dict[str, str]:
    """For a program under test. Nothing of the caller's woodfrog settings leaks into it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WOODFROG_", "LD_"))}
    kept["LD_LIBRARY_PATH"] = str(simgpu_dir())
    if interposed:
        kept["LD_PRELOAD"] = ":".join([*sanitizer_libraries(), str(interposer())])
    if os.environ.get("WOODFROG_TEST_TRACK"):
        kept["WOODFROG_TRACK"] = "1"  # the same tests with launches followed
    # GPUs of its own: other tests run beside.
    kept["WOODFROG_SIMGPU_MACHINE"] = f"interposer-{os.getpid()}"
    # No daemon of this machine may be reached by accident.
    kept["WOODFROG_RUNTIME_DIR"] = "/nonexistent/woodfrog-test"
    return kept | (more or {})
