"""The benchmarks' switch past the interposer (bench/targets/driver_calls.py): calls made past it are not seen by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from product import ROOT, Product, Stepper

import woodfrog

pytestmark = pytest.mark.usefixtures("environment")

TARGET = """
import signal, sys
sys.path.insert(0, {targets!r})
from cuda.bindings import driver
import driver_calls

PTX = b'.version 8.0 .target sm_80 .address_size 64 .visible .entry idle() { ret; }\\0'

def ok(answer):
    assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else None

ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b'idle'))

def launch(count):
    for _ in range(count):
        ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    ok(driver.cuCtxSynchronize())

calls = driver_calls.DriverCalls()
alternating = driver_calls.Alternating(2)
launch(5)
calls.use(direct=True)
launch(7)
calls.use(direct=False)
launch(3)
kinds = []
for _ in range(8):
    alternating.begin()
    kinds.append(alternating.end())
print('step 1', ''.join('pt'[not kind['direct']] for kind in kinds), sum(kind['cold'] for kind in kinds), flush=True)
signal.sigwait({signal.SIGTERM})
"""


def test_calls_past_the_interposer_are_not_counted_by_it(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [ROOT / "bench" / "targets" / "driver_calls.cpp", ROOT / "native" / "interpose" / "elf_lookup.cpp"]
    library = tmp_path / "libdriver_calls.so"
    subprocess.run(["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-o", library, *sources, "-ldl"], check=True)
    monkeypatch.setenv("WOODFROG_BENCH_BINARIES", str(tmp_path))
    script = tmp_path / "target.py"
    script.write_text(TARGET.replace("{targets!r}", repr(str(ROOT / "bench" / "targets"))))
    target = woodfrog.run([sys.executable, str(script)], name="switching", env=dict(os.environ))
    stepper = Stepper(target.pid, Path(target.log))
    product._targets.append(stepper)
    stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
    # Through, past, past, through in blocks of two; the first step of each block is marked.
    assert stepper.lines()[-1].split()[2:] == ["ttpppptt", "4"]
    assert [row.launches for row in woodfrog.ps()] == [5 + 3]
