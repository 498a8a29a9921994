// Earlier versions of functions whose arguments have changed since. Programs built with older headers, and
// cuGetProcAddress with an older version number, get these.
#define __CUDA_API_VERSION_INTERNAL // makes cuda.h declare every version
#include <cuda.h>

#include "api.hpp"
#include "graph_api.hpp"

using namespace simgpu;

namespace {

CUDA_KERNEL_NODE_PARAMS_v2 widened(const CUDA_KERNEL_NODE_PARAMS_v1 &p) {
    return {p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ, p.blockDimX, p.blockDimY,
            p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra,    nullptr,     nullptr};
}

} // namespace

extern "C" {

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    return cuDevicePrimaryCtxRelease_v2(device);
}
CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device) {
    return cuDevicePrimaryCtxReset_v2(device);
}
CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
    return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream) {
    return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *dependencies, size_t count,
                                                   unsigned int flags) {
    return cuStreamUpdateCaptureDependencies_v2(stream, dependencies, nullptr, count, flags);
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return cuStreamWriteValue32_v2(stream, address, value, flags);
}
CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return cuStreamWriteValue64_v2(stream, address, value, flags);
}
CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return cuStreamWaitValue32_v2(stream, address, value, flags);
}
CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return cuStreamWaitValue64_v2(stream, address, value, flags);
}
CUresult CUDAAPI cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list,
                                    unsigned int flags) {
    return cuStreamBatchMemOp_v2(stream, count, list, flags);
}

CUresult CUDAAPI cuMemAdvise(CUdeviceptr address, size_t size, CUmem_advise advice, CUdevice device) {
    return cuMemAdvise_v2(address, size, advice, {CU_MEM_LOCATION_TYPE_DEVICE, {device}});
}

CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr address, size_t size, CUdevice device, CUstream stream) {
    return cuMemPrefetchAsync_v2(address, size, {CU_MEM_LOCATION_TYPE_DEVICE, {device}}, 0, stream);
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    auto wide = widened(*parameters);
    return cuGraphAddKernelNode_v2(result, graph, dependencies, count, &wide);
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_KERNEL_NODE_PARAMS_v2 p{};
    CUresult code = cuGraphKernelNodeGetParams_v2(node, &p);
    if (code != CUDA_SUCCESS)
        return code;
    auto function = p.func != nullptr ? p.func : reinterpret_cast<CUfunction>(p.kern);
    *parameters = {function,    p.gridDimX,  p.gridDimY,       p.gridDimZ,     p.blockDimX,
                   p.blockDimY, p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra};
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    auto wide = widened(*parameters);
    return cuGraphKernelNodeSetParams_v2(node, &wide);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    if (parameters == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    auto wide = widened(*parameters);
    return cuGraphExecKernelNodeSetParams_v2(exec, node, &wide);
}

CUresult CUDAAPI cuGraphAddNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUgraphNodeParams *parameters) {
    return cuGraphAddNode_v2(result, graph, dependencies, nullptr, count, parameters);
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node,
                                   CUgraphExecUpdateResult *result) {
    CUgraphExecUpdateResultInfo info{};
    CUresult code = cuGraphExecUpdate_v2(exec, graph, &info);
    put(result, info.result);
    put(error_node, info.errorNode);
    return code;
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    return cuGraphGetEdges_v2(graph, from, to, nullptr, count);
}
CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *list, size_t *count) {
    return cuGraphNodeGetDependencies_v2(node, list, nullptr, count);
}
CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *list, size_t *count) {
    return cuGraphNodeGetDependentNodes_v2(node, list, nullptr, count);
}
CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count) {
    return cuGraphAddDependencies_v2(graph, from, to, nullptr, count);
}
CUresult CUDAAPI cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                           size_t count) {
    return cuGraphRemoveDependencies_v2(graph, from, to, nullptr, count);
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *result, CUgraph graph, CUgraphNode *, char *log, size_t log_bytes) {
    if (log != nullptr && log_bytes > 0)
        log[0] = '\0';
    return cuGraphInstantiateWithFlags(result, graph, 0);
}
CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *result, CUgraph graph, CUgraphNode *, char *log, size_t log_bytes) {
    if (log != nullptr && log_bytes > 0)
        log[0] = '\0';
    return cuGraphInstantiateWithFlags(result, graph, 0);
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    CUdriverProcAddressQueryResult status{};
    CUresult code = cuGetProcAddress_v2(symbol, function, version, flags, &status);
    if (code == CUDA_SUCCESS && status != CU_GET_PROC_ADDRESS_SUCCESS)
        return CUDA_ERROR_NOT_FOUND;
    return code;
}

} // extern "C"
