"""Whichever way an application comes to a driver function, it gets the interposer's; everything else is untouched."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import interposer_support as support
import pytest

# What cudart asks for, and more of each kind.
NAMES = ["cuInit", "cuMemAlloc", "cuMemFree", "cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyHtoDAsync", "cuCtxCreate",
         "cuStreamBeginCapture", "cuGraphLaunch", "cuStreamSynchronize", "cuEventRecord", "cuMemCreate"]  # fmt: skip


@pytest.fixture(scope="session")
def resolve(programs: Path) -> Path:
    return support.compile_program("resolve.cpp", programs, "-ldl", link_driver=False)


@pytest.fixture(scope="session")
def stub_driver(programs: Path) -> Path:
    """The folder of a libcuda.so.1 that is not the simulated one."""
    folder = programs / "stub"
    support.compile_program(
        "stub_driver.cpp", folder, "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1",
        link_driver=False, output="libcuda.so.1",
    )  # fmt: skip
    return folder


def run(program: Path, *arguments: str, **settings: str) -> list[str]:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [program, *arguments], env=support.environment(settings), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return list(done.stdout.splitlines())


def dynamic_symbols(library: Path, *options: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", *options, library], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def test_the_library_needs_nothing_but_the_c_library() -> None:
    listed = subprocess.run(["readelf", "-d", support.interposer()], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listed)
    assert needed
    for name in needed:
        assert re.match(r"(libc|libdl|libpthread|ld-linux.*)\.so", name), needed


def test_the_library_exports_driver_functions_the_lookups_and_two_memory_calls_only() -> None:
    exported = dynamic_symbols(support.interposer(), "--defined-only")
    assert len(exported) > 500
    assert [name for name in exported if not re.match(r"cu[A-Z]", name)] == [
        "dlsym",
        "dlvsym",
        "mmap",
        "mmap64",
        "munmap",
    ]


NEWER = {"cuCheckpointOperationComplete"}  # of CUDA 13.4: the headers that we are built with do not know it


def test_every_function_that_the_driver_exports_is_one_of_ours() -> None:
    driver = dynamic_symbols(support.simgpu_dir() / "libcuda.so.1", "--defined-only")
    functions = {name for name in driver if re.match(r"cu[A-Z]", name)}
    assert len(functions) > 100
    assert functions - set(dynamic_symbols(support.interposer(), "--defined-only")) == NEWER


def test_a_function_looked_up_in_the_driver_library_is_ours_and_starts_no_thread(resolve: Path) -> None:
    exact = ["cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuGetProcAddress_v2"]
    lines = run(resolve, "dlopen", *exact, "cuNoSuchFunction")
    assert lines == [f"{name} ours" for name in exact] + ["cuNoSuchFunction null", "threads 1"]


@pytest.mark.parametrize("version", ["12000", "13000"])
@pytest.mark.parametrize("flags", ["0", "2"])  # 2: per-thread default streams
def test_a_function_asked_of_cu_get_proc_address_is_ours(resolve: Path, version: str, flags: str) -> None:
    probe, itself, *lines = run(resolve, "proc", version, flags, *NAMES)
    assert probe == "probe 0 null" or re.match(r"probe \d+ null", probe)
    assert itself == "itself 0 ours"
    assert lines == [f"{name} 0 ours" for name in NAMES]


def test_a_process_without_a_driver_finds_none_and_gets_none_loaded(resolve: Path) -> None:
    assert run(resolve, "default", "cuInit", "cuMemAlloc_v2") == ["cuInit null", "cuMemAlloc_v2 null", "loaded 0"]
    # A weak reference is bound to our cuInit, which says what a machine without a GPU says.
    assert run(resolve, "weak") == ["100", "loaded 0"]


def test_a_linked_driver_is_found_behind_our_functions_in_the_default_scope(programs: Path) -> None:
    linked = support.compile_program("resolve.cpp", programs, "-ldl", "-Wl,--no-as-needed", output="resolve_linked")
    lines = run(linked, "default", "cuInit", "cuLaunchKernel", "cuNoSuchFunction")
    assert lines == ["cuInit ours", "cuLaunchKernel ours", "cuNoSuchFunction null", "loaded 1"]


def test_other_lookups_see_what_their_caller_would_see_without_us(resolve: Path, programs: Path) -> None:
    shared = ("-shared", "-fPIC")
    next_library = support.compile_program("who.cpp", programs, *shared, link_driver=False, output="libwho.so")
    asking = support.compile_program(
        "next.cpp", programs, *shared, f"-L{programs}", "-Wl,--no-as-needed", "-lwho", f"-Wl,-rpath,{programs}",
        link_driver=False, output="libnext.so",
    )  # fmt: skip
    assert next_library.exists()
    expected = ["next the next library", "local found", "error 1", "error 1"]
    bare = run(resolve, "next", str(asking), LD_PRELOAD="")
    assert bare == expected
    assert run(resolve, "next", str(asking)) == expected


def test_an_entry_point_that_is_not_exported_is_hooked_and_one_nobody_knows_is_gated_as_it_is(
    resolve: Path, stub_driver: Path
) -> None:
    lines = run(
        resolve, "proc", "12000", "0", "cuInit", "cuCtxGetFlags", "cuBrandNew", "cuMemAlloc",
        LD_LIBRARY_PATH=str(stub_driver),
    )  # fmt: skip
    assert lines == [
        "probe 0 null",
        "itself 0 ours",
        "cuInit 0 ours",
        "cuCtxGetFlags 0 ours",
        "called 4711",  # through the gate to the very function that the driver had returned
        "cuBrandNew 0 ours",
        *["sum 506"] * 3,  # 1*1 + 2*2 + … + 11*11: every argument arrives, in registers and on the stack
        "cuMemAlloc 0 null",
    ]


def test_a_driver_that_the_application_closes_stays_usable(resolve: Path) -> None:
    assert run(resolve, "close") == ["0 a version"]


def test_a_library_may_use_the_driver_before_our_own_constructors_run(programs: Path) -> None:
    shared = ("-shared", "-fPIC", "-DLIBRARY")
    support.compile_program("early.cpp", programs, *shared, output="libearly.so")
    program = support.compile_program(
        "early.cpp", programs, f"-L{programs}", "-learly", f"-Wl,-rpath,{programs}", output="early"
    )
    assert run(program) == ["library 0 0", "main 0 0"]
