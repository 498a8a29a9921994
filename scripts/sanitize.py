"""Builds the compiled parts with sanitizers and runs their tests on the simulated GPU with them.

    python scripts/sanitize.py [address] [thread]

`address` (with undefined-behaviour checks) covers keeper, transfer engine, interposer and woodfrog-enter (not the code
that it puts into processes); `thread` the transfer engine and the interposer. The simulated GPU itself is the ordinary
build. The Python side sees the sanitized parts through a package folder of links in build/sanitize-*/package; the
installed package is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The editable install's finder comes before PYTHONPATH; without it the links below are what is imported.
SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


@dataclass(frozen=True)
class Sanitizer:
    """One build, and what is run with it. `inside` files run in a process that has the simulated driver; `followed` are
    run with a target whose launches are followed, as with `woodfrog run --track`."""

    name: str
    flags: str
    options: tuple[str, ...]  # more for CMake
    libraries: tuple[str, ...]
    environment: dict[str, str]
    tests: tuple[str, ...]
    followed: tuple[str, ...]
    inside: tuple[str, ...]


SANITIZERS = {
    "address": Sanitizer(
        "address",
        "address,undefined",
        # Undefined behaviour ends the process by a trap instead of a text, which compiles in two thirds of the time; no
        # kernels, because nothing here runs them.
        ("-DCMAKE_CXX_FLAGS=-fsanitize-undefined-trap-on-error", "-DWOODFROG_KERNELS=OFF"),
        ("libasan.so",),
        {
            # Python itself keeps memory until its end: leaks are looked for in the keeper, whose test asks for it.
            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=1",
        },
        (
            "tests/unit/native",
            "--ignore=tests/unit/native/test_blake3.py",  # compiled without sanitizers
            "--ignore=tests/unit/native/test_kernel_build.py",  # nvcc does not bear a preloaded library
            "tests/sim/interpose/test_handover.py",
            "tests/sim/interpose/test_quiesce.py",
            "tests/sim/interpose/test_guard.py",  # copy-on-write
            "tests/sim/interpose/test_ipc.py",
            "tests/sim/interpose/test_sharing.py",
            "tests/sim/interpose/test_conformance.py",
            "tests/sim/interpose/test_control_copy.py",
            "tests/sim/enter",
        ),
        ("tests/sim/interpose/test_quiesce.py", "tests/sim/interpose/test_guard.py"),
        ("check_memory.py", "check_copies.py", "check_packs.py", "check_files.py", "check_staging.py"),
    ),
    "thread": Sanitizer(
        "thread",
        "thread",
        (),
        ("libtsan.so",),
        {"TSAN_OPTIONS": f"halt_on_error=1:report_signal_unsafe=0:suppressions={ROOT}/scripts/tsan.suppressions"},
        (
            "tests/unit/native/test_uring.py",
            "tests/unit/native/test_guard.py",
            "tests/sim/interpose/test_quiesce.py",
            "tests/sim/interpose/test_guard.py",
            "tests/sim/interpose/test_control_copy.py",
        ),
        ("tests/sim/interpose/test_quiesce.py", "tests/sim/interpose/test_guard.py"),
        # One of the gather kernel's tests: under this sanitizer the others take a minute and show it nothing more.
        (
            "check_copies.py",
            "check_chunk_drain.py::test_chunks_of_two_gpus_take_slots_in_the_order_of_the_pieces",
        ),
    ),
}


def main(names: list[str]) -> int:
    """Returns the exit status: 0 if every build and every test passed."""
    failed = []
    for name in names or list(SANITIZERS):
        begin_s = time.monotonic()
        if not run(SANITIZERS[name]):
            failed.append(name)
        print(f"sanitize: {name} took {time.monotonic() - begin_s:.0f} s", flush=True)
    if failed:
        print(f"sanitize: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(sanitizer: Sanitizer) -> bool:
    """Build and test with one sanitizer."""
    build = ROOT / "build" / f"sanitize-{sanitizer.name}"
    compile_parts(build, sanitizer)
    package = link_package(build)
    libraries = [library_path(name) for name in (*sanitizer.libraries, "libstdc++.so.6")]
    environment = {
        **os.environ,
        **sanitizer.environment,
        "PYTHONPATH": str(package),
        "LD_PRELOAD": ":".join(libraries),
        "WOODFROG_TEST_INTERPOSER": str(package / "woodfrog/_native/libwoodfrog_interpose.so"),
    }
    passed = pytest(list(sanitizer.tests), environment)
    passed = pytest(list(sanitizer.followed), environment | {"WOODFROG_TEST_TRACK": "1"}) and passed
    inside = environment | {
        "LD_LIBRARY_PATH": str(package / "woodfrog/_native/simgpu"),
        "WOODFROG_SIMGPU_MEMORY": "512MiB",
        "WOODFROG_SIMGPU_DEVICES": "2",
    }
    for file in sanitizer.inside:
        machine = {"WOODFROG_SIMGPU_MACHINE": f"sanitize-{os.getpid()}-{file.partition('.')[0]}"}
        passed = pytest([f"tests/sim/transfer/inside/{file}"], inside | machine) and passed
    return passed


def compile_parts(build: Path, sanitizer: Sanitizer) -> None:
    """Configure and build everything but the simulated GPU."""
    tools = Path(sys.executable).parent
    subprocess.run(
        [
            tools / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}", f"-DWOODFROG_SANITIZE={sanitizer.flags}",
            # Instrumented code has false warnings (gcc says so of maybe-uninitialized); the ordinary build has none.
            "-DWOODFROG_SIMGPU=OFF", "-DWOODFROG_WERROR=OFF", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            # Lines for the reports, and no more optimisation than makes the tests quick: compiling is most of the time.
            "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1", "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1",
            *sanitizer.options,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run([tools / "ninja", "-C", build, "-j2", "--quiet"], check=True)


def link_package(build: Path) -> Path:
    """A folder for PYTHONPATH whose `woodfrog` has this tree's Python and that build's compiled parts."""
    from woodfrog._native import paths

    package = build / "package"
    shutil.rmtree(package, ignore_errors=True)
    native = package / "woodfrog" / "_native"
    native.mkdir(parents=True)
    (package / "sitecustomize.py").write_text(SITE)
    for entry in (ROOT / "src" / "woodfrog").iterdir():
        if entry.name != "_native":
            (package / "woodfrog" / entry.name).symlink_to(entry)
    for entry in (ROOT / "src" / "woodfrog" / "_native").glob("*.py"):
        (native / entry.name).symlink_to(entry)
    # Copied, not linked: the parts find each other by the place that they are loaded from.
    for pattern in (
        "native/*/*.cpython-*.so",
        "native/interpose/libwoodfrog_interpose.so",
        "native/keeper/woodfrog-keeper",
        "native/enter/woodfrog-enter",
    ):
        for built in build.glob(pattern):
            shutil.copy2(built, native / built.name)
    (native / "simgpu").symlink_to(paths.simgpu_dir())
    return package


def library_path(name: str) -> str:
    """The compiler's own copy of a run-time library."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return str(Path(done.stdout.strip()).resolve())


def pytest(arguments: list[str], environment: dict[str, str]) -> bool:
    """Whether these tests pass; their closing lines are printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
