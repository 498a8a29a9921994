"""Device, host and virtual memory; copies and memsets."""

from __future__ import annotations

import os

import numpy as np
import pytest
from driver import (
    GRANULARITY,
    POSIX_FD,
    READ,
    CUresult,
    access,
    code,
    driver,
    export,
    free_bytes,
    map_handle,
    map_new,
    ok,
    properties,
    read,
    start,
    write,
)


@pytest.fixture(autouse=True)
def context() -> None:
    start(0)


def test_small_allocations_share_a_slab_and_are_aligned_to_512_bytes() -> None:
    before = free_bytes()
    pointers = [int(ok(driver.cuMemAlloc(100))) for _ in range(64)]
    assert all(pointer % 512 == 0 for pointer in pointers)
    assert len(set(pointers)) == 64
    assert before - free_bytes() <= GRANULARITY
    for number, pointer in enumerate(pointers):
        write(pointer, bytes([number]) * 100)
    assert all(read(pointer, 100) == bytes([number]) * 100 for number, pointer in enumerate(pointers))
    for pointer in pointers:
        ok(driver.cuMemFree(pointer))
    assert free_bytes() == before


def test_freeing_gives_memory_back_at_once_and_refuses_what_is_no_allocation() -> None:
    before = free_bytes()
    pointer = int(ok(driver.cuMemAlloc(10 << 20)))
    assert free_bytes() == before - (10 << 20)
    assert code(driver.cuMemFree(pointer + 512)) == CUresult.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuMemFree(pointer))
    assert free_bytes() == before
    assert code(driver.cuMemFree(pointer)) == CUresult.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuMemFree(0))


def test_fresh_memory_is_zero() -> None:
    pointer = ok(driver.cuMemAlloc(4 << 20))
    assert not any(read(pointer, 4 << 20))
    ok(driver.cuMemFree(pointer))


def test_a_full_device_refuses_and_goes_on() -> None:
    pointer = ok(driver.cuMemAlloc(free_bytes() - GRANULARITY))
    assert code(driver.cuMemAlloc(2 * GRANULARITY)) == CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert code(driver.cuMemCreate(2 * GRANULARITY, properties(), 0)) == CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert code(driver.cuMemAlloc(1 << 60)) == CUresult.CUDA_ERROR_OUT_OF_MEMORY
    ok(driver.cuMemFree(pointer))
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(2 * GRANULARITY))))


def test_what_can_be_asked_about_an_address() -> None:
    pointer = int(ok(driver.cuMemAlloc(1000)))
    assert tuple(map(int, ok(driver.cuMemGetAddressRange(pointer + 10)))) == (pointer, 1000)
    attribute = driver.CUpointer_attribute
    memory_type = ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer))
    assert memory_type == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer + 999)) == 1000
    capable = attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    assert ok(driver.cuPointerGetAttribute(capable, pointer)) is True
    ordinal = attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert ok(driver.cuPointerGetAttributes(1, [ordinal], pointer)) == [0]
    ordinary = np.zeros(16)
    invalid = CUresult.CUDA_ERROR_INVALID_VALUE
    assert code(driver.cuPointerGetAttribute(ordinal, ordinary.ctypes.data)) == invalid
    assert ok(driver.cuPointerGetAttributes(1, [ordinal], ordinary.ctypes.data))[0] & 0xFFFFFFFF == 2**32 - 2
    ok(driver.cuMemFree(pointer))


def test_pitched_memory_and_two_dimensional_copies() -> None:
    width, height = 100, 7
    pointer, pitch = ok(driver.cuMemAllocPitch(width, height, 4))
    assert pitch >= width
    assert pitch % 512 == 0
    source = np.arange(width * height, dtype=np.uint8).reshape(height, width)
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost = source.ctypes.data
    copy.srcPitch = width
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice = pointer
    copy.dstPitch = pitch
    copy.WidthInBytes = width
    copy.Height = height
    ok(driver.cuMemcpy2D(copy))
    for row in range(height):
        assert read(int(pointer) + row * pitch, width) == source[row].tobytes()
    ok(driver.cuMemsetD2D8(pointer, pitch, 5, 10, height))
    assert read(int(pointer) + 3 * pitch, 12) == bytes([5] * 10) + source[3][10:12].tobytes()
    ok(driver.cuMemFree(pointer))


def test_copies_between_two_devices() -> None:
    first_context = ok(driver.cuCtxGetCurrent())
    source = ok(driver.cuMemAlloc(GRANULARITY))
    write(source, b"across" * 100)
    second_context = start(1)
    target = ok(driver.cuMemAlloc(GRANULARITY))
    ok(driver.cuMemcpyPeer(target, second_context, source, first_context, 600))
    assert read(target, 600) == b"across" * 100
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert ok(driver.cuPointerGetAttribute(ordinal, target)) == 1
    assert ok(driver.cuPointerGetAttribute(ordinal, source)) == 0
    ok(driver.cuMemFree(target))
    ok(driver.cuMemFree(source))
    ok(driver.cuCtxSetCurrent(first_context))


def test_memsets_of_every_width() -> None:
    pointer = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemsetD8(pointer, 0xAB, 64))
    ok(driver.cuMemsetD16(int(pointer) + 16, 0x1234, 8))
    ok(driver.cuMemsetD32(int(pointer) + 32, 0xDEADBEEF, 4))
    expected = b"\xab" * 16 + b"\x34\x12" * 8 + b"\xef\xbe\xad\xde" * 4 + b"\xab" * 16
    assert read(pointer, 64) == expected
    assert code(driver.cuMemsetD32(int(pointer) + 2, 0, 1)) == CUresult.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuMemFree(pointer))


def test_copies_outside_of_memory_are_refused() -> None:
    address, handle = map_new(GRANULARITY)
    buffer = np.zeros(16, dtype=np.uint8)
    end = int(address) + GRANULARITY
    assert code(driver.cuMemcpyHtoD(end - 8, buffer.ctypes.data, 16)) == CUresult.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuMemcpyHtoD(end - 16, buffer.ctypes.data, 16))
    ok(driver.cuMemUnmap(address, GRANULARITY))
    assert code(driver.cuMemcpyHtoD(address, buffer.ctypes.data, 16)) == CUresult.CUDA_ERROR_INVALID_VALUE
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemAddressFree(address, GRANULARITY))


def test_host_memory_can_be_allocated_and_registered() -> None:
    memory = ok(driver.cuMemHostAlloc(8192, driver.CU_MEMHOSTALLOC_DEVICEMAP))
    assert int(ok(driver.cuMemHostGetDevicePointer(memory, 0))) == int(memory)
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(driver.cuPointerGetAttribute(kind, memory)) == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    ok(driver.cuMemFreeHost(memory))
    own = np.zeros(1 << 16, dtype=np.uint8)
    ok(driver.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    again = CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    assert code(driver.cuMemHostRegister(own.ctypes.data, own.nbytes, 0)) == again
    ok(driver.cuMemsetD8(own.ctypes.data, 3, own.nbytes))
    assert (own == 3).all()
    ok(driver.cuMemHostUnregister(own.ctypes.data))
    assert code(driver.cuMemHostUnregister(own.ctypes.data)) == CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED


def test_stream_ordered_memory_is_freed_in_stream_order() -> None:
    before = free_bytes()
    stream = ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAllocAsync(4 << 20, stream))
    ok(driver.cuMemsetD8Async(pointer, 9, 4 << 20, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read(pointer, 3) == b"\x09\x09\x09"
    ok(driver.cuMemFreeAsync(pointer, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert free_bytes() == before
    ok(driver.cuStreamDestroy(stream))


def test_pools_of_the_application_hand_out_memory_of_their_device() -> None:
    wanted = driver.CUmemPoolProps()
    wanted.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = ok(driver.cuMemPoolCreate(wanted))
    stream = ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAllocFromPoolAsync(5000, pool, stream))
    ok(driver.cuMemsetD8Async(pointer, 4, 5000, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert read(pointer, 5000) == b"\x04" * 5000
    ok(driver.cuMemFreeAsync(pointer, stream))
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemPoolDestroy(pool))
    invalid = CUresult.CUDA_ERROR_INVALID_VALUE
    assert code(driver.cuMemPoolDestroy(pool)) == invalid
    assert code(driver.cuMemPoolDestroy(ok(driver.cuDeviceGetDefaultMemPool(0)))) == invalid


class TestVirtualMemory:
    def test_sizes_and_offsets_follow_the_granularity(self) -> None:
        invalid = CUresult.CUDA_ERROR_INVALID_VALUE
        assert ok(driver.cuMemGetAllocationGranularity(properties(), driver.CUmemAllocationGranularity_flags(0))) == (
            GRANULARITY
        )
        assert code(driver.cuMemCreate(GRANULARITY + 4096, properties(), 0)) == invalid
        assert code(driver.cuMemAddressReserve(4096, 0, 0, 0)) == invalid
        address = ok(driver.cuMemAddressReserve(4 * GRANULARITY, 0, 0, 0))
        handle = ok(driver.cuMemCreate(2 * GRANULARITY, properties(), 0))
        assert code(driver.cuMemMap(address, GRANULARITY, GRANULARITY, handle, 0)) == invalid
        assert code(driver.cuMemMap(int(address) + 4096, GRANULARITY, 0, handle, 0)) == invalid
        assert code(driver.cuMemMap(int(address) + 3 * GRANULARITY, 2 * GRANULARITY, 0, handle, 0)) == invalid
        ok(driver.cuMemMap(address, 2 * GRANULARITY, 0, handle, 0))
        assert code(driver.cuMemMap(address, 2 * GRANULARITY, 0, handle, 0)) == invalid
        assert code(driver.cuMemUnmap(address, GRANULARITY)) == invalid
        assert code(driver.cuMemAddressFree(address, 4 * GRANULARITY)) == invalid
        ok(driver.cuMemUnmap(address, 2 * GRANULARITY))
        ok(driver.cuMemAddressFree(address, 4 * GRANULARITY))
        ok(driver.cuMemRelease(handle))
        assert code(driver.cuMemRelease(handle)) == invalid

    def test_memory_cannot_be_used_before_access_is_set(self) -> None:
        address = ok(driver.cuMemAddressReserve(GRANULARITY, 0, 0, 0))
        handle = ok(driver.cuMemCreate(GRANULARITY, properties(), 0))
        ok(driver.cuMemMap(address, GRANULARITY, 0, handle, 0))
        assert code(driver.cuMemsetD8(address, 1, 16)) == CUresult.CUDA_ERROR_INVALID_VALUE
        ok(driver.cuMemSetAccess(address, GRANULARITY, [access(0, READ)], 1))
        assert code(driver.cuMemsetD8(address, 1, 16)) == CUresult.CUDA_ERROR_INVALID_VALUE
        assert read(address, 16) == bytes(16)
        ok(driver.cuMemSetAccess(address, GRANULARITY, [access(0)], 1))
        ok(driver.cuMemsetD8(address, 1, 16))
        assert ok(driver.cuMemGetAccess(access(0).location, address)) == 3
        ok(driver.cuMemUnmap(address, GRANULARITY))
        ok(driver.cuMemRelease(handle))
        ok(driver.cuMemAddressFree(address, GRANULARITY))

    def test_a_released_handle_lives_on_in_its_mapping_and_can_be_retained(self) -> None:
        before = free_bytes()
        address, handle = map_new(GRANULARITY)
        write(address, b"kept")
        ok(driver.cuMemRelease(handle))
        assert free_bytes() == before - GRANULARITY
        again = ok(driver.cuMemRetainAllocationHandle(address))
        second = map_handle(again, GRANULARITY)
        assert read(second, 4) == b"kept"
        write(second, b"both")
        assert read(address, 4) == b"both"
        for mapped in (address, second):
            ok(driver.cuMemUnmap(mapped, GRANULARITY))
            ok(driver.cuMemAddressFree(mapped, GRANULARITY))
        assert free_bytes() == before - GRANULARITY
        ok(driver.cuMemRelease(again))
        assert free_bytes() == before

    def test_a_file_descriptor_alone_keeps_memory_and_contents(self) -> None:
        before = free_bytes()
        address, handle = map_new(GRANULARITY)
        write(address, b"in the descriptor")
        fd = export(handle)
        ok(driver.cuMemUnmap(address, GRANULARITY))
        ok(driver.cuMemRelease(handle))
        assert free_bytes() == before - GRANULARITY
        imported = ok(driver.cuMemImportFromShareableHandle(fd, POSIX_FD))
        os.close(fd)
        ok(driver.cuMemMap(address, GRANULARITY, 0, imported, 0))
        ok(driver.cuMemSetAccess(address, GRANULARITY, [access(0)], 1))
        assert read(address, 17) == b"in the descriptor"
        invalid = CUresult.CUDA_ERROR_INVALID_VALUE
        assert code(driver.cuMemExportToShareableHandle(imported, POSIX_FD, 0)) == invalid
        ok(driver.cuMemUnmap(address, GRANULARITY))
        ok(driver.cuMemRelease(imported))
        ok(driver.cuMemAddressFree(address, GRANULARITY))
        assert free_bytes() == before

    def test_only_memory_of_a_simulated_device_can_be_imported(self) -> None:
        fd = os.memfd_create("something else")
        os.ftruncate(fd, GRANULARITY)
        assert code(driver.cuMemImportFromShareableHandle(fd, POSIX_FD)) == CUresult.CUDA_ERROR_INVALID_VALUE
        os.close(fd)
        assert code(driver.cuMemImportFromShareableHandle(fd, POSIX_FD)) == CUresult.CUDA_ERROR_INVALID_VALUE

    def test_host_memory_can_be_mapped_at_a_device_address(self) -> None:
        wanted = properties()
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        before = free_bytes()
        handle = ok(driver.cuMemCreate(GRANULARITY, wanted, 0))
        address = map_handle(handle, GRANULARITY)
        write(address, b"from the host")
        assert free_bytes() == before
        ok(driver.cuMemUnmap(address, GRANULARITY))
        replacement = ok(driver.cuMemCreate(GRANULARITY, properties(), 0))
        ok(driver.cuMemMap(address, GRANULARITY, 0, replacement, 0))
        ok(driver.cuMemSetAccess(address, GRANULARITY, [access(0)], 1))
        assert read(address, 4) == bytes(4)
        ok(driver.cuMemUnmap(address, GRANULARITY))
        ok(driver.cuMemAddressFree(address, GRANULARITY))
        ok(driver.cuMemRelease(handle))
        ok(driver.cuMemRelease(replacement))

    def test_two_thousand_pieces_are_possible(self) -> None:
        handles = [ok(driver.cuMemCreate(GRANULARITY, properties(), 0)) for _ in range(50)]
        address = int(ok(driver.cuMemAddressReserve(2000 * GRANULARITY, 0, 0, 0)))
        for index in range(2000):
            ok(driver.cuMemMap(address + index * GRANULARITY, GRANULARITY, 0, handles[index % 50], 0))
        ok(driver.cuMemSetAccess(address, 2000 * GRANULARITY, [access(0)], 1))
        write(address + 50 * GRANULARITY, b"alias")
        assert read(address + 1900 * GRANULARITY, 5) == b"alias"
        ok(driver.cuMemUnmap(address, 2000 * GRANULARITY))
        ok(driver.cuMemAddressFree(address, 2000 * GRANULARITY))
        for handle in handles:
            ok(driver.cuMemRelease(handle))
