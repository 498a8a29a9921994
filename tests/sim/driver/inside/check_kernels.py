"""Modules, libraries, launches; kernels from NVRTC through cuda-core."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
from driver import PTX, Code, CUresult, code, driver, ok, read, start, write

SOURCE = """
extern "C" __global__ void scale(float* data, int count, float by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] = data[i] * by + 1.0f;
}

__device__ unsigned int total;

extern "C" __global__ void sum(const int* data, int count) {
    __shared__ int partial[128];
    int mine = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) mine += data[i];
    partial[threadIdx.x] = mine;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(&total, partial[0]);
}
"""


@pytest.fixture
def context() -> Any:
    return start(0)


def test_module_globals_have_their_initial_values_and_can_be_written(context: Any) -> None:
    kernels = Code()
    launches = kernels.variable("launches")
    assert read(kernels.variable("launches_address"), 8) == launches.to_bytes(8, "little")
    assert np.frombuffer(read(kernels.variable("factor"), 4), dtype=np.float32)[0] == 2.0
    write(launches, (40).to_bytes(4, "little"))
    for _ in range(2):
        assert kernels.launch("count_launch") == CUresult.CUDA_SUCCESS
    assert int.from_bytes(read(launches, 4), "little") == 42
    other = Code()  # a second load has variables of its own
    assert int.from_bytes(read(other.variable("launches"), 4), "little") == 0
    assert code(driver.cuModuleGetGlobal(kernels.module, b"nothing")) == CUresult.CUDA_ERROR_NOT_FOUND
    assert code(driver.cuModuleGetFunction(kernels.module, b"nothing")) == CUresult.CUDA_ERROR_NOT_FOUND
    ok(driver.cuModuleUnload(other.module))
    assert code(driver.cuModuleGetFunction(other.module, b"add")) == CUresult.CUDA_ERROR_INVALID_HANDLE


def test_functions_tell_their_parameters_and_limits(context: Any) -> None:
    function = Code().function("add")
    assert ok(driver.cuFuncGetName(function)) == b"add"
    assert [ok(driver.cuFuncGetParamInfo(function, index)) for index in range(3)] == [(0, 8), (8, 4), (12, 4)]
    assert code(driver.cuFuncGetParamInfo(function, 3)) == CUresult.CUDA_ERROR_INVALID_VALUE
    maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert ok(driver.cuFuncGetAttribute(maximum, function)) == 1024
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 256, 0)) > 0
    launch_of = driver.cuLaunchKernel
    assert code(launch_of(function, 1, 1, 1, 2048, 1, 1, 0, 0, 0, 0)) == CUresult.CUDA_ERROR_INVALID_VALUE
    assert code(launch_of(function, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0)) == CUresult.CUDA_ERROR_INVALID_VALUE


def test_a_cooperative_launch_must_fit_the_device(context: Any) -> None:
    kernels = Code()
    function = kernels.function("count_launch")
    ok(driver.cuLaunchCooperativeKernel(function, 2, 1, 1, 64, 1, 1, 0, 0, 0))
    ok(driver.cuCtxSynchronize())
    too_large = driver.cuLaunchCooperativeKernel(function, 100000, 1, 1, 64, 1, 1, 0, 0, 0)
    assert code(too_large) == CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    assert int.from_bytes(read(kernels.variable("launches"), 4), "little") == 128


def test_a_library_is_a_module_in_each_context_that_uses_it(context: Any) -> None:
    library = ok(driver.cuLibraryLoadData(PTX.encode() + b"\0", [], [], 0, [], [], 0))
    assert ok(driver.cuLibraryGetKernelCount(library)) == 4
    kernel = ok(driver.cuLibraryGetKernel(library, b"count_launch"))
    assert ok(driver.cuKernelGetName(kernel)) == b"count_launch"
    function = driver.CUfunction(int(kernel))  # a CUkernel may be launched in the place of a CUfunction
    ok(driver.cuLaunchKernel(function, 3, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    address = int(ok(driver.cuLibraryGetGlobal(library, b"launches"))[0])
    assert int.from_bytes(read(address, 4), "little") == 3
    second = start(1)
    other = int(ok(driver.cuLibraryGetGlobal(library, b"launches"))[0])
    assert other != address
    assert int.from_bytes(read(other, 4), "little") == 0
    ok(driver.cuCtxSetCurrent(context))
    assert second is not None
    ok(driver.cuLibraryUnload(library))
    assert code(driver.cuLibraryGetKernel(library, b"add")) == CUresult.CUDA_ERROR_INVALID_HANDLE


def test_what_is_no_ptx_is_refused_with_a_reason(context: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert code(driver.cuModuleLoadData(b"\x7fELF" + bytes(60))) == CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    assert "runs PTX only" in capfd.readouterr().err
    assert code(driver.cuModuleLoadData(b"hello" + bytes(60))) == CUresult.CUDA_ERROR_INVALID_IMAGE
    broken = PTX.replace("add.u32 %r7", "add.u32 %r7 %r7 %r7", 1)
    assert code(driver.cuModuleLoadData(broken.encode() + b"\0")) == CUresult.CUDA_ERROR_INVALID_PTX
    assert "line" in capfd.readouterr().err


def fatbin(payload: bytes, kind: int = 1, arch: int = 80, flags: int = 0, text_bytes: int = 0) -> bytes:
    """A container with one entry, in the layout of nvcc 13.0."""
    padded = payload + bytes(-len(payload) % 8)
    entry = struct.pack(
        "<HHIQIIIIQQQQ", kind, 0x101, 64, len(padded), len(payload), 0, 0, arch, 0, flags, 0, text_bytes
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + len(padded)) + entry + padded


def zstd(text: bytes) -> bytes:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    space = ctypes.create_string_buffer(len(text) + 1024)
    size = library.ZSTD_compress(space, ctypes.c_size_t(len(space)), text, ctypes.c_size_t(len(text)), 3)
    return space.raw[:size]


def lz4(text: bytes) -> bytes:
    library = ctypes.CDLL("liblz4.so.1")
    space = ctypes.create_string_buffer(len(text) + 1024)
    size = library.LZ4_compress_default(text, space, len(text), len(space))
    return space.raw[:size]


def test_ptx_is_found_in_a_fatbin_compressed_or_not(context: Any) -> None:
    text = PTX.encode() + b"\0"
    images = [
        fatbin(text),
        fatbin(zstd(text), flags=0x8000, text_bytes=len(text)),
        fatbin(lz4(text), flags=0x2000, text_bytes=len(text)),
    ]
    for image in images:
        module = ok(driver.cuModuleLoadFatBinary(image))
        assert ok(driver.cuModuleGetFunctionCount(module)) == 4
        ok(driver.cuModuleUnload(module))


def test_a_damaged_fatbin_is_refused(context: Any) -> None:
    text = PTX.encode() + b"\0"
    packed = zstd(text)
    good = fatbin(packed, flags=0x8000, text_bytes=len(text))
    refused = {
        "no code but a cubin": fatbin(b"\x7fELF" + bytes(60), kind=2),
        "newer than the device": fatbin(text, arch=100),
        "entry longer than the container": good[:24] + struct.pack("<Q", 1 << 40) + good[32:],
        "tiny entry header": good[:20] + struct.pack("<I", 8) + good[24:],
        "huge text": fatbin(packed, flags=0x8000, text_bytes=1 << 40),
        "wrong text size": fatbin(packed, flags=0x8000, text_bytes=len(text) - 1),
        "broken stream": fatbin(packed[:50] + bytes(50) + packed[100:], flags=0x8000, text_bytes=len(text)),
        "broken lz4 stream": fatbin(b"\xff" * 100, flags=0x2000, text_bytes=len(text)),
        "short container header": good[:6] + struct.pack("<H", 4) + good[8:],
    }
    expected = {CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, CUresult.CUDA_ERROR_INVALID_IMAGE}
    for what, image in refused.items():
        assert code(driver.cuModuleLoadFatBinary(image + bytes(64))) in expected, what


def find_nvcc() -> str | None:
    wheels = [Path(entry) / "nvidia/cu13/bin/nvcc" for entry in sys.path]
    candidates = [shutil.which("nvcc"), *map(str, wheels), "/usr/local/cuda/bin/nvcc"]
    return next((candidate for candidate in candidates if candidate and Path(candidate).exists()), None)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_a_fatbin_of_nvcc_runs(context: Any, tmp_path: Path) -> None:
    source, image = tmp_path / "code.cu", tmp_path / "code.fatbin"
    source.write_text(SOURCE)
    command = [
        str(find_nvcc()),
        "-gencode",
        "arch=compute_80,code=compute_80",
        "-fatbin",
        str(source),
        "-o",
        str(image),
    ]
    subprocess.run(command, check=True, timeout=120)
    module = ok(driver.cuModuleLoad(str(image).encode()))
    data = ok(driver.cuMemAlloc(4000))
    write(data, np.arange(1000, dtype=np.int32).tobytes())
    values = (np.array([int(data)], np.uint64), np.array([1000], np.int32))
    pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
    function = ok(driver.cuModuleGetFunction(module, b"sum"))
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, 0, pointers.ctypes.data, 0))
    total = int(ok(driver.cuModuleGetGlobal(module, b"total"))[0])
    assert int.from_bytes(read(total, 4), "little") == sum(range(1000))


FAULT = """
from driver import *
start(0)
kernels = Code()
stream = ok(driver.cuStreamCreate(0))
print(int(kernels.launch("write_to", np.uint64(0x1000), stream=stream)))
print(int(code(driver.cuStreamSynchronize(stream))))
print(int(code(driver.cuMemAlloc(16))), int(code(driver.cuCtxSynchronize())))
other = ok(driver.cuCtxCreate(None, 0, ok(driver.cuDeviceGet(0))))
ok(driver.cuMemAlloc(16))
"""


def test_an_illegal_address_makes_the_context_fail_for_good_and_no_other() -> None:
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "700", "700", "700"]
    assert "write_to" in done.stderr
    assert "0x1000" in done.stderr


def test_kernels_compiled_by_nvrtc_run_through_cuda_core() -> None:
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    program = Program(SOURCE, code_type="c++", options=ProgramOptions(arch="sm_90"))
    module = program.compile("ptx", name_expressions=())
    count = 1000
    buffer = device.allocate(count * 4, stream=stream)
    values = np.arange(count, dtype=np.float32)
    stream.sync()
    write(buffer.handle, values.tobytes())
    launch(stream, LaunchConfig(grid=8, block=128), module.get_kernel("scale"), buffer, count, np.float32(3))
    stream.sync()
    assert (np.frombuffer(read(buffer.handle, count * 4), dtype=np.float32) == values * 3 + 1).all()
    write(buffer.handle, np.arange(count, dtype=np.int32).tobytes())
    launch(stream, LaunchConfig(grid=1, block=128), module.get_kernel("sum"), buffer, count)
    stream.sync()
    buffer.close(stream)
