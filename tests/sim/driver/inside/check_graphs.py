"""Stream capture and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import NON_BLOCKING, Code, CUresult, code, driver, ok, read, start, write

MODE = driver.CUstreamCaptureMode
STATUS = driver.CUstreamCaptureStatus
GLOBAL = MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = MODE.CU_STREAM_CAPTURE_MODE_RELAXED
UNSUPPORTED = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
INVALIDATED = CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


@pytest.fixture
def kernels() -> Code:
    start(0)
    return Code()


@pytest.fixture
def stream(kernels: Code) -> Any:
    return ok(driver.cuStreamCreate(NON_BLOCKING))


def capturing(stream: Any) -> Any:
    return ok(driver.cuStreamIsCapturing(stream))


def nodes(graph: Any) -> list[Any]:
    count = ok(driver.cuGraphGetNodes(graph, 0))[1]
    return list(ok(driver.cuGraphGetNodes(graph, count))[0])[:count]


def test_captured_work_runs_when_the_graph_is_launched_and_not_before(kernels: Code, stream: Any) -> None:
    data = ok(driver.cuMemAlloc(1024))
    ok(driver.cuMemsetD8(data, 0, 1024))
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    assert kernels.add(data, 256, 3, stream) == CUresult.CUDA_SUCCESS
    assert kernels.add(data, 256, 4, stream) == CUresult.CUDA_SUCCESS
    graph = ok(driver.cuStreamEndCapture(stream))
    assert read(data, 4) == bytes(4)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    for _ in range(5):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert (np.frombuffer(read(data, 1024), dtype=np.uint32) == 35).all()
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))
    assert code(driver.cuGraphLaunch(executable, stream)) == CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("call", ["synchronize", "query", "allocate", "free", "copy", "context", "event"])
def test_calls_that_are_unsafe_during_a_capture_invalidate_it(kernels: Code, stream: Any, call: str) -> None:
    data = ok(driver.cuMemAlloc(64))
    host = np.zeros(64, dtype=np.uint8)
    event = ok(driver.cuEventCreate(0))
    calls = {
        "synchronize": lambda: driver.cuStreamSynchronize(stream),
        "query": lambda: driver.cuStreamQuery(stream),
        "allocate": lambda: driver.cuMemAlloc(64),
        "free": lambda: driver.cuMemFree(data),
        "copy": lambda: driver.cuMemcpyDtoH(host.ctypes.data, data, 64),
        "context": lambda: driver.cuCtxSynchronize(),
        "event": lambda: driver.cuEventQuery(event),
    }
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    assert code(calls[call]()) == UNSUPPORTED
    assert capturing(stream) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert kernels.add(data, 1, 1, stream) == INVALIDATED
    assert code(driver.cuStreamEndCapture(stream)) == INVALIDATED
    assert capturing(stream) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemFree(data))


def test_a_relaxed_capture_and_a_relaxed_thread_may_allocate(kernels: Code, stream: Any) -> None:
    ok(driver.cuStreamBeginCapture(stream, RELAXED))
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(64))))
    ok(driver.cuStreamEndCapture(stream))
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    before = ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED))
    assert before == GLOBAL
    pointer = ok(driver.cuMemAlloc(64))
    assert ok(driver.cuThreadExchangeStreamCaptureMode(before)) == RELAXED
    assert capturing(stream) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    ok(driver.cuStreamEndCapture(stream))
    ok(driver.cuMemFree(pointer))


def test_the_legacy_stream_may_not_be_used_beside_a_blocking_capture(kernels: Code) -> None:
    blocking = ok(driver.cuStreamCreate(0))
    data = ok(driver.cuMemAlloc(64))
    ok(driver.cuStreamBeginCapture(blocking, RELAXED))
    implicit = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert code(driver.cuMemsetD8Async(data, 1, 64, 0)) == implicit
    assert code(driver.cuStreamEndCapture(blocking)) == INVALIDATED
    assert code(driver.cuStreamBeginCapture(0, RELAXED)) == UNSUPPORTED
    ok(driver.cuMemFree(data))


def test_events_fork_and_join_streams_into_one_capture(kernels: Code, stream: Any) -> None:
    side = ok(driver.cuStreamCreate(NON_BLOCKING))
    fork, join = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    data = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemsetD8(data, 0, 64))
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    kernels.add(data, 1, 1, stream)
    ok(driver.cuEventRecord(fork, stream))
    assert code(driver.cuEventQuery(fork)) == CUresult.CUDA_ERROR_CAPTURED_EVENT
    ok(driver.cuStreamWaitEvent(side, fork, 0))
    kernels.add(int(data) + 4, 1, 2, side)
    ok(driver.cuEventRecord(join, side))
    ok(driver.cuStreamWaitEvent(stream, join, 0))
    kernels.add(data, 2, 4, stream)
    graph = ok(driver.cuStreamEndCapture(stream))
    assert capturing(side) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    assert len(nodes(graph)) == 3
    assert ok(driver.cuGraphGetEdges(graph, 0))[3] == 3
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert list(np.frombuffer(read(data, 8), dtype=np.uint32)) == [5, 6]


def test_a_capture_that_was_forked_and_not_joined_is_refused(kernels: Code, stream: Any) -> None:
    side = ok(driver.cuStreamCreate(NON_BLOCKING))
    fork = ok(driver.cuEventCreate(0))
    data = ok(driver.cuMemAlloc(64))
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    ok(driver.cuEventRecord(fork, stream))
    ok(driver.cuStreamWaitEvent(side, fork, 0))
    kernels.add(data, 1, 1, side)
    assert code(driver.cuStreamEndCapture(side)) == CUresult.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    assert code(driver.cuStreamEndCapture(stream)) != CUresult.CUDA_SUCCESS
    ok(driver.cuStreamBeginCapture(stream, GLOBAL))
    ok(driver.cuEventRecord(fork, stream))
    ok(driver.cuStreamWaitEvent(side, fork, 0))
    kernels.add(data, 1, 1, side)
    assert code(driver.cuStreamEndCapture(stream)) == CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    assert capturing(side) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE


def kernel_node(kernels: Code, graph: Any, after: list[Any], data: int, amount: int) -> tuple[Any, Any]:
    values = (np.array([data], np.uint64), np.array([4], np.uint32), np.array([amount], np.uint32))
    pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
    parameters = driver.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = kernels.function("add")
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = 32, 1, 1
    parameters.kernelParams = pointers.ctypes.data
    if graph is None:
        return (values, pointers), parameters
    return ok(driver.cuGraphAddKernelNode(graph, after, len(after), parameters)), parameters


def test_a_graph_built_by_hand_with_every_type_of_node(kernels: Code, stream: Any) -> None:
    data = int(ok(driver.cuMemAlloc(64)))
    graph = ok(driver.cuGraphCreate(0))
    memset = driver.CUDA_MEMSET_NODE_PARAMS()
    memset.dst, memset.value, memset.elementSize, memset.width, memset.height = data, 10, 4, 4, 1
    context = ok(driver.cuCtxGetCurrent())
    first = ok(driver.cuGraphAddMemsetNode(graph, [], 0, memset, context))
    second, _ = kernel_node(kernels, graph, [first], data, 5)
    event = ok(driver.cuEventCreate(0))
    record = ok(driver.cuGraphAddEventRecordNode(graph, [second], 1, event))
    empty = ok(driver.cuGraphAddEmptyNode(graph, [record], 1))
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice, copy.WidthInBytes, copy.Height, copy.Depth = data, data + 16, 16, 1, 1
    third = ok(driver.cuGraphAddMemcpyNode(graph, [empty], 1, copy, context))
    child = ok(driver.cuGraphCreate(0))
    kernel_node(kernels, child, [], data + 16, 100)
    ok(driver.cuGraphAddChildGraphNode(graph, [third], 1, child))
    ok(driver.cuGraphDestroy(child))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamSynchronize(stream))
    assert list(np.frombuffer(read(data, 32), dtype=np.uint32)) == [15] * 4 + [115] * 4
    kind = driver.CUgraphNodeType
    assert [ok(driver.cuGraphNodeGetType(node)) for node in nodes(graph)] == [
        kind.CU_GRAPH_NODE_TYPE_MEMSET,
        kind.CU_GRAPH_NODE_TYPE_KERNEL,
        kind.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        kind.CU_GRAPH_NODE_TYPE_EMPTY,
        kind.CU_GRAPH_NODE_TYPE_MEMCPY,
        kind.CU_GRAPH_NODE_TYPE_GRAPH,
    ]
    # A cycle cannot be instantiated.
    ok(driver.cuGraphAddDependencies(graph, [third], [first], None, 1))
    assert code(driver.cuGraphInstantiate(graph, 0)) == CUresult.CUDA_ERROR_INVALID_VALUE


def test_parameters_of_an_instantiated_graph_can_be_changed(kernels: Code, stream: Any) -> None:
    data = int(ok(driver.cuMemAlloc(64)))
    write(data, bytes(64))
    graph = ok(driver.cuGraphCreate(0))
    node, _ = kernel_node(kernels, graph, [], data, 1)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    _keep, changed = kernel_node(kernels, None, [], data, 50)
    ok(driver.cuGraphExecKernelNodeSetParams(executable, node, changed))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert np.frombuffer(read(data, 4), dtype=np.uint32)[0] == 50
    ok(driver.cuGraphNodeSetEnabled(executable, node, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert np.frombuffer(read(data, 4), dtype=np.uint32)[0] == 50
    other = ok(driver.cuGraphCreate(0))
    kernel_node(kernels, other, [], data, 7)
    ok(driver.cuGraphNodeSetEnabled(executable, node, 1))
    assert ok(driver.cuGraphExecUpdate(executable, other)).result == (
        driver.CUgraphExecUpdateResult.CU_GRAPH_EXEC_UPDATE_SUCCESS
    )
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert np.frombuffer(read(data, 4), dtype=np.uint32)[0] == 57
    kernel_node(kernels, other, [], data, 7)
    assert code(driver.cuGraphExecUpdate(executable, other)) == CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
