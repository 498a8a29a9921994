"""What the interposer costs, printed (pytest -s), with limits far above what a quiet machine shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import interposer_support as support
import pytest

# 2 to 4 ns are seen on a quiet machine; a shared lock or an atomic operation in the path would cost 20 and more.
MOST_NS = 15.0


@pytest.fixture(scope="session")
def overhead(programs: Path) -> Path:
    return support.compile_program("overhead.cpp", programs, "-O2", "-ldl", link_driver=False)


@pytest.fixture(scope="session")
def stub_folder(programs: Path) -> Path:
    folder = programs / "stub-overhead"
    support.compile_program(
        "stub_driver.cpp", folder, "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1",
        link_driver=False, output="libcuda.so.1",
    )  # fmt: skip
    return folder


def measure(program: Path, *arguments: str, interposed: bool, **settings: str) -> float:
    done = subprocess.run(
        [program, *arguments], env=support.environment(settings, interposed=interposed), capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout)


def test_an_open_gate_costs_nanoseconds(overhead: Path, stub_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, gated = (
        min(measure(overhead, "calls", interposed=interposed, LD_LIBRARY_PATH=str(stub_folder)) for _ in range(3))
        for interposed in (False, True)
    )
    with capsys.disabled():
        print(f"\n  a call of the driver: {bare:.2f} ns bare, {gated:.2f} ns gated: {gated - bare:.2f} ns")
    assert gated - bare < MOST_NS


@pytest.mark.parametrize("size_bytes", [4096, 2 << 20, 8 << 20])
def test_allocations_of_reusable_sizes_are_no_slower_than_the_drivers(
    overhead: Path, size_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, ours = (measure(overhead, "pairs", str(size_bytes), interposed=interposed) for interposed in (False, True))
    with capsys.disabled():
        print(f"\n  cuMemAlloc + cuMemFree of {size_bytes} bytes: {bare:.0f} pairs/s bare, {ours:.0f} interposed")
    assert ours > 0.5 * bare
