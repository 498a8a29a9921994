"""Helpers for code that runs inside a process with the simulated driver: short names for cuda-bindings' calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver

__all__ = [
    "GRANULARITY",
    "NON_BLOCKING",
    "POSIX_FD",
    "PTX",
    "READ",
    "READ_WRITE",
    "CUresult",
    "Code",
    "access",
    "code",
    "driver",
    "export",
    "free_bytes",
    "map_handle",
    "map_new",
    "np",
    "ok",
    "properties",
    "read",
    "start",
    "write",
]

CUresult = driver.CUresult
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
GRANULARITY = 2 << 20
NON_BLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING


def ok(result: tuple[Any, ...]) -> Any:
    """The values of a call that must succeed."""
    assert result[0] == CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


def code(result: tuple[Any, ...]) -> Any:
    """The CUresult of a call."""
    return result[0]


def start(device: int = 0) -> Any:
    """cuInit and the primary context of `device`, which is made current."""
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(device))))
    ok(driver.cuCtxSetCurrent(context))
    return context


def properties(device: int = 0) -> Any:
    """Of shareable memory on `device`."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = POSIX_FD
    return wanted


def access(device: int = 0, flags: Any = READ_WRITE) -> Any:
    wanted = driver.CUmemAccessDesc()
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.flags = flags
    return wanted


def map_new(size_bytes: int, device: int = 0) -> tuple[Any, Any]:
    """New shareable memory at a new address: (address, handle)."""
    handle = ok(driver.cuMemCreate(size_bytes, properties(device), 0))
    return map_handle(handle, size_bytes, device), handle


def map_handle(handle: Any, size_bytes: int, device: int = 0) -> Any:
    address = ok(driver.cuMemAddressReserve(size_bytes, 0, 0, 0))
    ok(driver.cuMemMap(address, size_bytes, 0, handle, 0))
    ok(driver.cuMemSetAccess(address, size_bytes, [access(device)], 1))
    return address


def export(handle: Any) -> int:
    return int(ok(driver.cuMemExportToShareableHandle(handle, POSIX_FD, 0)))


def read(address: Any, size_bytes: int) -> bytes:
    """Device memory at `address`, through the default stream."""
    buffer = np.empty(size_bytes, dtype=np.uint8)
    ok(driver.cuMemcpyDtoH(buffer.ctypes.data, int(address), size_bytes))
    return buffer.tobytes()


def write(address: Any, data: bytes) -> None:
    buffer = np.frombuffer(data, dtype=np.uint8)
    ok(driver.cuMemcpyHtoD(int(address), buffer.ctypes.data, len(data)))


def free_bytes() -> int:
    return int(ok(driver.cuMemGetInfo())[0])


# Kernels that the checks share: PTX as a person would write it, so that no compiler is needed.
PTX = """
.version 8.0
.target sm_80
.address_size 64

.visible .global .align 4 .u32 launches = 0;
.visible .global .align 8 .u64 launches_address = launches;
.visible .const .align 4 .f32 factor = 0f40000000;

.visible .entry add(.param .u64 data, .param .u32 count, .param .u32 amount)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u32 %r5, [count];
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 bra DONE;
    ld.param.u64 %rd1, [data];
    mul.wide.u32 %rd2, %r4, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.param.u32 %r6, [amount];
    ld.global.u32 %r7, [%rd3];
    add.u32 %r7, %r7, %r6;
    st.global.u32 [%rd3], %r7;
DONE:
    ret;
}

.visible .entry count_launch()
{
    .reg .b32 %r<2>;
    atom.global.add.u32 %r1, [launches], 1;
    ret;
}

.visible .entry write_to(.param .u64 address)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [address];
    st.global.u32 [%rd1], 1;
    ret;
}

.visible .entry wait_for(.param .u64 flag)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [flag];
AGAIN:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}
"""


class Code:
    """A module with the kernels above, and how they are launched."""

    def __init__(self) -> None:
        self.module = ok(driver.cuModuleLoadData(PTX.encode() + b"\0"))

    def function(self, name: str) -> Any:
        return ok(driver.cuModuleGetFunction(self.module, name.encode()))

    def variable(self, name: str) -> int:
        return int(ok(driver.cuModuleGetGlobal(self.module, name.encode()))[0])

    def launch(self, name: str, *arguments: np.generic, blocks: int = 1, threads: int = 1, stream: Any = 0) -> Any:
        """The CUresult of launching with these arguments, which are numpy scalars of the parameters' sizes."""
        keep = [np.asarray(argument) for argument in arguments]
        pointers = np.array([array.ctypes.data for array in keep], dtype=np.uint64)
        function = self.function(name)
        return driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers.ctypes.data if len(keep) else 0, 0
        )[0]

    def add(self, address: Any, count: int, amount: int, stream: Any = 0) -> Any:
        blocks = (count + 127) // 128
        arguments = (np.uint64(int(address)), np.uint32(count), np.uint32(amount))
        return self.launch("add", *arguments, blocks=blocks, threads=128, stream=stream)
