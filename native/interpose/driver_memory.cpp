// Counting what the driver owns; see driver_memory.hpp.
#include "driver_memory.hpp"

#include "capture.hpp"
#include "gate.hpp"
#include "wire.h"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

struct Tally {
    std::mutex mutex;
    std::unordered_map<uint64_t, size_t> device; // by address or handle
    std::unordered_map<uint64_t, size_t> host;
    std::vector<CUmemoryPool> pools; // made by the application
    std::set<uint64_t> managed_addresses;
};

Tally &tally() {
    static Tally *const instance = new Tally;
    return *instance;
}

constinit std::atomic<uint32_t> g_obstacles{0};
constinit std::atomic<bool> g_pools_used{false};
constinit std::atomic<bool> g_graph_memory_used{false};

void host_allocated(const void *address, size_t size_bytes) {
    if (driver_only())
        return;
    std::lock_guard lock(tally().mutex);
    tally().host[reinterpret_cast<uint64_t>(address)] = size_bytes;
}

void host_freed(const void *address) {
    if (driver_only())
        return;
    std::lock_guard lock(tally().mutex);
    tally().host.erase(reinterpret_cast<uint64_t>(address));
}

size_t element_bytes(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    default:
        return 4; // block-compressed and video formats: an estimate
    }
}

void array_allocated(const void *array, size_t width, size_t height, size_t depth, CUarray_format format,
                     unsigned channels) {
    driver_memory_allocated(reinterpret_cast<CUdeviceptr>(array), width * std::max<size_t>(height, 1) *
                                                                      std::max<size_t>(depth, 1) * channels *
                                                                      element_bytes(format));
}

uint64_t pool_bytes(CUmemoryPool pool) {
    cuuint64_t bytes = 0;
    return WF_REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes) == CUDA_SUCCESS ? bytes
                                                                                                              : 0;
}

} // namespace

void driver_memory_allocated(CUdeviceptr address, size_t size_bytes) {
    if (driver_only())
        return;
    std::lock_guard lock(tally().mutex);
    tally().device[address] = size_bytes;
}

void driver_memory_freed(CUdeviceptr address) {
    if (driver_only())
        return;
    std::lock_guard lock(tally().mutex);
    tally().device.erase(address);
    tally().managed_addresses.erase(address);
}

void mark_obstacle(uint32_t bit) {
    g_obstacles.fetch_or(bit, std::memory_order_relaxed);
}

uint32_t obstacles() {
    uint32_t bits = g_obstacles.load(std::memory_order_relaxed);
    {
        std::lock_guard lock(tally().mutex);
        if (!tally().managed_addresses.empty())
            bits |= woodfrog::wire::obstacle_managed_memory;
    }
    if (capture_active())
        bits |= woodfrog::wire::obstacle_capture_active;
    return bits;
}

DriverMemory driver_memory() {
    DriverMemory sum{0, 0};
    std::vector<CUmemoryPool> pools;
    {
        std::lock_guard lock(tally().mutex);
        for (const auto &[address, bytes] : tally().device)
            sum.device_bytes += bytes;
        for (const auto &[address, bytes] : tally().host)
            sum.host_bytes += bytes;
        pools = tally().pools;
    }
    std::vector<CUdevice> devices;
    for (const Context *context : live_contexts())
        if (std::find(devices.begin(), devices.end(), context->device) == devices.end())
            devices.push_back(context->device);
    for (const CUdevice device : devices) {
        CUmemoryPool pool = nullptr;
        if (g_pools_used.load(std::memory_order_relaxed) &&
            WF_REAL(cuDeviceGetDefaultMemPool)(&pool, device) == CUDA_SUCCESS)
            sum.device_bytes += pool_bytes(pool);
        cuuint64_t graph_bytes = 0;
        if (g_graph_memory_used.load(std::memory_order_relaxed) &&
            WF_REAL(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &graph_bytes) ==
                CUDA_SUCCESS)
            sum.device_bytes += graph_bytes;
    }
    for (const CUmemoryPool pool : pools)
        sum.device_bytes += pool_bytes(pool);
    return sum;
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuMemAllocManaged, CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    GateScope scope(Symbol::cuMemAllocManaged);
    const CUresult result = driver_memory_call([&] { return WF_REAL(cuMemAllocManaged)(dptr, bytesize, flags); });
    if (result == CUDA_SUCCESS && !driver_only()) {
        driver_memory_allocated(*dptr, bytesize);
        std::lock_guard lock(tally().mutex);
        tally().managed_addresses.insert(*dptr);
    }
    return result;
}

WF_HOOK(cuMemAllocHost_v2, void **pp, size_t bytesize) {
    GateScope scope(Symbol::cuMemAllocHost_v2);
    const CUresult result = WF_REAL(cuMemAllocHost_v2)(pp, bytesize);
    if (result == CUDA_SUCCESS)
        host_allocated(*pp, bytesize);
    return result;
}

WF_HOOK(cuMemHostAlloc, void **pp, size_t bytesize, unsigned int Flags) {
    GateScope scope(Symbol::cuMemHostAlloc);
    const CUresult result = WF_REAL(cuMemHostAlloc)(pp, bytesize, Flags);
    if (result == CUDA_SUCCESS)
        host_allocated(*pp, bytesize);
    return result;
}

WF_HOOK(cuMemFreeHost, void *p) {
    GateScope scope(Symbol::cuMemFreeHost);
    const CUresult result = WF_REAL(cuMemFreeHost)(p);
    if (result == CUDA_SUCCESS)
        host_freed(p);
    return result;
}

WF_HOOK(cuMemAllocAsync, CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    GateScope scope(Symbol::cuMemAllocAsync);
    g_pools_used.store(true, std::memory_order_relaxed);
    if (capture_active())
        g_graph_memory_used.store(true, std::memory_order_relaxed);
    return driver_memory_call([&] { return WF_REAL(cuMemAllocAsync)(dptr, bytesize, hStream); });
}

WF_HOOK(cuMemAllocAsync_ptsz, CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    GateScope scope(Symbol::cuMemAllocAsync_ptsz);
    g_pools_used.store(true, std::memory_order_relaxed);
    if (capture_active())
        g_graph_memory_used.store(true, std::memory_order_relaxed);
    return driver_memory_call([&] { return WF_REAL(cuMemAllocAsync_ptsz)(dptr, bytesize, hStream); });
}

WF_HOOK(cuGraphAddMemAllocNode, CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
        size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams) {
    GateScope scope(Symbol::cuGraphAddMemAllocNode);
    g_graph_memory_used.store(true, std::memory_order_relaxed);
    return WF_REAL(cuGraphAddMemAllocNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

WF_HOOK(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
    GateScope scope(Symbol::cuMemPoolCreate);
    const CUresult result = WF_REAL(cuMemPoolCreate)(pool, poolProps);
    if (result == CUDA_SUCCESS && !driver_only()) {
        std::lock_guard lock(tally().mutex);
        tally().pools.push_back(*pool);
    }
    return result;
}

WF_HOOK(cuMemPoolDestroy, CUmemoryPool pool) {
    GateScope scope(Symbol::cuMemPoolDestroy);
    if (!driver_only()) {
        std::lock_guard lock(tally().mutex);
        std::erase(tally().pools, pool);
    }
    return WF_REAL(cuMemPoolDestroy)(pool);
}

WF_HOOK(cuArrayCreate_v2, CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray) {
    GateScope scope(Symbol::cuArrayCreate_v2);
    const CUresult result = driver_memory_call([&] { return WF_REAL(cuArrayCreate_v2)(pHandle, pAllocateArray); });
    if (result == CUDA_SUCCESS)
        array_allocated(*pHandle, pAllocateArray->Width, pAllocateArray->Height, 1, pAllocateArray->Format,
                        pAllocateArray->NumChannels);
    return result;
}

WF_HOOK(cuArray3DCreate_v2, CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray) {
    GateScope scope(Symbol::cuArray3DCreate_v2);
    const CUresult result = driver_memory_call([&] { return WF_REAL(cuArray3DCreate_v2)(pHandle, pAllocateArray); });
    if (result == CUDA_SUCCESS)
        array_allocated(*pHandle, pAllocateArray->Width, pAllocateArray->Height, pAllocateArray->Depth,
                        pAllocateArray->Format, pAllocateArray->NumChannels);
    return result;
}

WF_HOOK(cuArrayDestroy, CUarray hArray) {
    GateScope scope(Symbol::cuArrayDestroy);
    const CUresult result = WF_REAL(cuArrayDestroy)(hArray);
    if (result == CUDA_SUCCESS)
        driver_memory_freed(reinterpret_cast<CUdeviceptr>(hArray));
    return result;
}

WF_HOOK(cuMemPoolImportFromShareableHandle, CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType,
        unsigned long long flags) {
    GateScope scope(Symbol::cuMemPoolImportFromShareableHandle);
    const CUresult result = WF_REAL(cuMemPoolImportFromShareableHandle)(pool_out, handle, handleType, flags);
    if (result == CUDA_SUCCESS)
        mark_obstacle(woodfrog::wire::obstacle_imported_memory);
    return result;
}

WF_HOOK(cuMulticastCreate, CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop) {
    GateScope scope(Symbol::cuMulticastCreate);
    const CUresult result = WF_REAL(cuMulticastCreate)(mcHandle, prop);
    if (result == CUDA_SUCCESS)
        mark_obstacle(woodfrog::wire::obstacle_multicast);
    return result;
}
