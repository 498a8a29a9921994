"""Initialisation, devices, contexts, entry points."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from driver import CUresult, code, driver, ok, start


def test_two_devices_of_compute_capability_9_with_stable_distinct_uuids() -> None:
    ok(driver.cuInit(0))
    assert ok(driver.cuDeviceGetCount()) == 2
    assert ok(driver.cuDriverGetVersion()) == 13000
    uuids = set()
    for ordinal in range(2):
        device = ok(driver.cuDeviceGet(ordinal))
        assert ok(driver.cuDeviceGetName(64, device)).startswith(b"woodfrog simulated GPU")
        attribute = driver.CUdevice_attribute
        assert ok(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)) == 9
        supported = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        assert ok(driver.cuDeviceGetAttribute(supported, device)) == 1
        assert ok(driver.cuDeviceTotalMem(device)) == 256 << 20
        first, second = (bytes(ok(driver.cuDeviceGetUuid(device)).bytes) for _ in range(2))
        assert first == second
        uuids.add(first)
        bus = ok(driver.cuDeviceGetPCIBusId(16, device)).split(b"\0")[0]
        assert int(ok(driver.cuDeviceGetByPCIBusId(bus))) == ordinal
    assert len(uuids) == 2
    assert code(driver.cuDeviceGet(2)) == CUresult.CUDA_ERROR_INVALID_DEVICE


def test_primary_context_keeps_its_handle_and_is_inactive_after_the_last_release() -> None:
    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(1))
    first = ok(driver.cuDevicePrimaryCtxRetain(device))
    assert int(ok(driver.cuDevicePrimaryCtxRetain(device))) == int(first)
    ok(driver.cuDevicePrimaryCtxRelease(device))
    assert ok(driver.cuDevicePrimaryCtxGetState(device))[1] == 1
    ok(driver.cuDevicePrimaryCtxRelease(device))
    assert ok(driver.cuDevicePrimaryCtxGetState(device))[1] == 0
    assert code(driver.cuDevicePrimaryCtxRelease(device)) == CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert int(ok(driver.cuDevicePrimaryCtxRetain(device))) == int(first)


def test_contexts_are_a_stack_of_each_thread() -> None:
    primary = start(0)
    created = ok(driver.cuCtxCreate(None, 0, ok(driver.cuDeviceGet(1))))
    assert int(ok(driver.cuCtxGetCurrent())) == int(created)
    assert int(ok(driver.cuCtxGetDevice())) == 1
    assert int(ok(driver.cuCtxPopCurrent())) == int(created)
    assert int(ok(driver.cuCtxGetCurrent())) == int(primary)
    ok(driver.cuCtxPushCurrent(created))
    ok(driver.cuCtxDestroy(created))
    assert int(ok(driver.cuCtxGetCurrent())) == int(primary)
    assert code(driver.cuCtxPushCurrent(created)) == CUresult.CUDA_ERROR_INVALID_CONTEXT


def test_entry_points_are_answered_by_version_and_by_default_stream() -> None:
    ok(driver.cuInit(0))

    def find(name: bytes, version: int, flags: int = 0) -> tuple[int, int]:
        address, status = ok(driver.cuGetProcAddress(name, version, flags))
        return int(address), int(status)

    library = ctypes.CDLL("libcuda.so.1")

    def symbol(name: str) -> int | None:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    assert find(b"cuMemAlloc", 13000)[0] == symbol("cuMemAlloc_v2")
    assert find(b"cuCtxCreate", 12040)[0] == symbol("cuCtxCreate_v3")
    assert find(b"cuCtxCreate", 13000)[0] == symbol("cuCtxCreate_v4")
    assert find(b"cuLaunchKernel", 13000)[0] == symbol("cuLaunchKernel")
    assert find(b"cuLaunchKernel", 13000, 2)[0] == symbol("cuLaunchKernel_ptsz")
    assert find(b"cuMemcpyHtoD", 13000, 2)[0] == symbol("cuMemcpyHtoD_v2_ptds")
    assert find(b"cuMemAlloc", 13000, 2)[0] == symbol("cuMemAlloc_v2")
    assert find(b"cuStreamBeginCapture", 10000)[0] == symbol("cuStreamBeginCapture")
    assert find(b"cuStreamBeginCapture", 13000, 2)[0] == symbol("cuStreamBeginCapture_v2_ptsz")
    assert find(b"cuGraphInstantiate", 13000)[0] == symbol("cuGraphInstantiateWithFlags")
    assert find(b"cuGetProcAddress", 12000)[0] == symbol("cuGetProcAddress_v2")
    assert find(b"", 13000) == (0, 1)
    assert find(b"cuMemCreate", 9000) == (0, 2)
    assert code(driver.cuGetProcAddress(b"cuInit", 99000, 0)) == CUresult.CUDA_ERROR_INVALID_VALUE


def test_errors_have_names_and_descriptions() -> None:
    assert ok(driver.cuGetErrorName(CUresult.CUDA_ERROR_OUT_OF_MEMORY)) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert ok(driver.cuGetErrorString(CUresult.CUDA_ERROR_OUT_OF_MEMORY)) == b"out of memory"


def test_a_forked_child_has_no_cuda_and_none_of_its_parents_memory() -> None:
    start(0)
    ok(driver.cuMemAlloc(64 << 20))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        held = sum("simgpu" in link for link in links)
        mapped = Path("/proc/self/maps").read_text().count("memfd:simgpu")
        results = [int(code(driver.cuInit(0))), int(code(driver.cuMemAlloc(16))), int(code(driver.cuCtxSynchronize()))]
        os.write(writer, f"{held} {mapped} {results}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"0 0 [3, 3, 3]"
    ok(driver.cuCtxSynchronize())
