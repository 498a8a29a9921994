"""Streams, events, callbacks, memory operations."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from driver import NON_BLOCKING, CUresult, code, driver, ok, read, start

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def context() -> Any:
    return start(0)


class Blocker:
    """Work that keeps a stream busy until it is let go."""

    def __init__(self, stream: Any) -> None:
        self.started = threading.Event()
        self.release = threading.Event()
        self.callback = CALLBACK(self._run)
        ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(ctypes.cast(self.callback, ctypes.c_void_p).value), 0))

    def _run(self, _: Any) -> None:
        self.started.set()
        assert self.release.wait(30)


def test_work_is_asynchronous_and_streams_are_independent() -> None:
    busy, free = ok(driver.cuStreamCreate(0)), ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAlloc(64))
    blocker = Blocker(busy)
    ok(driver.cuMemsetD8Async(pointer, 1, 32, busy))
    assert code(driver.cuStreamQuery(busy)) == CUresult.CUDA_ERROR_NOT_READY
    ok(driver.cuMemsetD8Async(int(pointer) + 32, 2, 32, free))
    ok(driver.cuStreamSynchronize(free))
    assert blocker.started.wait(30)
    blocker.release.set()
    ok(driver.cuStreamSynchronize(busy))
    assert read(pointer, 64) == b"\x01" * 32 + b"\x02" * 32
    ok(driver.cuStreamDestroy(busy))
    assert code(driver.cuStreamQuery(busy)) == CUresult.CUDA_ERROR_INVALID_HANDLE


def test_the_legacy_default_stream_waits_for_blocking_streams_only() -> None:
    blocking, non_blocking = ok(driver.cuStreamCreate(0)), ok(driver.cuStreamCreate(NON_BLOCKING))
    pointer = ok(driver.cuMemAlloc(64))
    aside = Blocker(non_blocking)
    ok(driver.cuMemsetD8(pointer, 1, 64))  # does not wait for the non-blocking stream
    blocker = Blocker(blocking)
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuMemsetD8Async(pointer, 2, 64, 0))
    ok(driver.cuEventRecord(event, 0))
    assert code(driver.cuEventQuery(event)) == CUresult.CUDA_ERROR_NOT_READY
    other = ok(driver.cuStreamCreate(0))
    ok(driver.cuMemsetD8Async(pointer, 3, 64, other))  # after the legacy stream, so after `blocking` too
    assert code(driver.cuStreamQuery(other)) == CUresult.CUDA_ERROR_NOT_READY
    blocker.release.set()
    ok(driver.cuStreamSynchronize(other))
    assert code(driver.cuStreamQuery(non_blocking)) == CUresult.CUDA_ERROR_NOT_READY
    aside.release.set()
    ok(driver.cuCtxSynchronize())
    assert read(pointer, 4) == b"\x03" * 4


def test_events_order_streams_and_measure_time() -> None:
    first, second = ok(driver.cuStreamCreate(NON_BLOCKING)), ok(driver.cuStreamCreate(NON_BLOCKING))
    pointer = ok(driver.cuMemAlloc(8))
    start_event, end_event = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    assert code(driver.cuEventQuery(start_event)) == CUresult.CUDA_SUCCESS  # never recorded
    assert code(driver.cuEventElapsedTime(start_event, end_event)) == CUresult.CUDA_ERROR_INVALID_HANDLE
    blocker = Blocker(first)
    ok(driver.cuEventRecord(start_event, first))
    ok(driver.cuStreamWaitEvent(second, start_event, 0))
    ok(driver.cuMemsetD8Async(pointer, 5, 8, second))
    ok(driver.cuEventRecord(end_event, second))
    assert code(driver.cuEventElapsedTime(start_event, end_event)) == CUresult.CUDA_ERROR_NOT_READY
    assert code(driver.cuStreamQuery(second)) == CUresult.CUDA_ERROR_NOT_READY
    blocker.release.set()
    ok(driver.cuEventSynchronize(end_event))
    assert read(pointer, 1) == b"\x05"
    assert ok(driver.cuEventElapsedTime(start_event, end_event)) >= 0
    no_timing = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    ok(driver.cuEventRecord(no_timing, first))
    assert code(driver.cuEventElapsedTime(start_event, no_timing)) == CUresult.CUDA_ERROR_INVALID_HANDLE
    ok(driver.cuEventDestroy(no_timing))
    assert code(driver.cuEventQuery(no_timing)) == CUresult.CUDA_ERROR_INVALID_HANDLE


def test_a_callback_may_not_call_the_driver() -> None:
    seen: list[Any] = []

    def call_back(_: Any) -> None:
        seen.append(code(driver.cuMemAlloc(16)))

    callback = CALLBACK(call_back)
    stream = ok(driver.cuStreamCreate(0))
    ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0))
    ok(driver.cuStreamSynchronize(stream))
    assert seen == [CUresult.CUDA_ERROR_NOT_PERMITTED]


def test_a_stream_waits_for_a_value_that_another_stream_writes() -> None:
    waiting, writing = ok(driver.cuStreamCreate(NON_BLOCKING)), ok(driver.cuStreamCreate(NON_BLOCKING))
    flag = ok(driver.cuMemAlloc(16))
    ok(driver.cuMemsetD8(flag, 0, 16))
    ok(driver.cuStreamWaitValue32(waiting, flag, 7, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ))
    ok(driver.cuMemsetD8Async(int(flag) + 8, 1, 1, waiting))
    assert code(driver.cuStreamQuery(waiting)) == CUresult.CUDA_ERROR_NOT_READY
    ok(driver.cuStreamWriteValue32(writing, flag, 9, 0))
    ok(driver.cuStreamSynchronize(waiting))
    assert read(int(flag) + 8, 1) == b"\x01"
    assert np.frombuffer(read(flag, 4), dtype=np.uint32)[0] == 9


def test_pageable_memory_may_be_reused_as_soon_as_the_copy_was_submitted() -> None:
    stream = ok(driver.cuStreamCreate(0))
    pointer = ok(driver.cuMemAlloc(4096))
    blocker = Blocker(stream)
    source = np.full(4096, 6, dtype=np.uint8)
    ok(driver.cuMemcpyHtoDAsync(pointer, source.ctypes.data, 4096, stream))
    source[:] = 0
    blocker.release.set()
    ok(driver.cuStreamSynchronize(stream))
    assert read(pointer, 4096) == b"\x06" * 4096


def test_each_thread_has_a_default_stream_of_its_own() -> None:
    per_thread = driver.CUstream(driver.CU_STREAM_PER_THREAD)
    blocker = Blocker(per_thread)
    result: list[Any] = []

    def other() -> None:
        start(0)
        result.append(code(driver.cuStreamQuery(per_thread)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert result == [CUresult.CUDA_SUCCESS]
    assert code(driver.cuStreamQuery(per_thread)) == CUresult.CUDA_ERROR_NOT_READY
    blocker.release.set()
    ok(driver.cuStreamSynchronize(per_thread))
