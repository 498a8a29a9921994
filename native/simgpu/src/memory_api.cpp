// cuMemAlloc and its relatives: device memory, managed memory, host memory, and stream-ordered memory.
#include <map>
#include <mutex>
#include <sys/mman.h>

#include <cstdio>
#include <fstream>
#include <string>

#include <cuda.h>

#include "address_space.hpp"
#include "api.hpp"
#include "capture.hpp"
#include "config.hpp"
#include "device.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

constexpr size_t kPage = 4096;

void enter(Context &context, CUdeviceptr base, size_t size, AllocationKind kind, unsigned flags = 0,
           bool shared = false) {
    Allocation allocation;
    allocation.base = base;
    allocation.size_bytes = size;
    allocation.kind = kind;
    allocation.context = context.weak_from_this();
    allocation.device = context.device;
    allocation.flags = flags;
    allocation.shared = shared;
    AddressSpace::instance().add_allocation(std::move(allocation));
}

CUdeviceptr allocate(Context &context, size_t size, AllocationKind kind) {
    if (CUresult code = injected_failure("cuMemAlloc"); code != CUDA_SUCCESS)
        throw Error{code};
    CUdeviceptr base = context.heap.allocate(size);
    enter(context, base, size, kind);
    return base;
}

bool in_device_heap(AllocationKind kind) {
    return kind == AllocationKind::kDevice || kind == AllocationKind::kPool || kind == AllocationKind::kManaged;
}

void free_now(CUdeviceptr base) {
    auto allocation = AddressSpace::instance().remove_allocation(base);
    if (!allocation)
        return; // its context was destroyed meanwhile
    if (auto context = allocation->context.lock())
        context->heap.free(base);
}

void add_host_mapping(CUdeviceptr base, size_t size) {
    Mapping mapping;
    mapping.base = base;
    mapping.size_bytes = size;
    AddressSpace::instance().map(std::move(mapping));
}

bool is_shared_mapping(CUdeviceptr base, size_t size) {
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        unsigned long long begin = 0, end = 0;
        char permissions[5] = {};
        if (std::sscanf(line.c_str(), "%llx-%llx %4s", &begin, &end, permissions) == 3 && begin < base + size &&
            base < end && permissions[3] == 's')
            return true;
    }
    return false;
}

void host_allocate(Context &context, void **result, size_t size, unsigned flags) {
    require(result != nullptr && size > 0);
    forbid_during_capture();
    size_t whole = (size + kPage - 1) / kPage * kPage;
    require(whole >= size, CUDA_ERROR_OUT_OF_MEMORY);
    void *memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    auto base = reinterpret_cast<CUdeviceptr>(memory);
    add_host_mapping(base, whole);
    enter(context, base, size, AllocationKind::kHostPinned, flags);
    *result = memory;
}

// A pool keeps no memory: what is freed goes back to the device. It only stands for a device and counts.
struct Pool {
    int device = 0;
};

HandleTable<Pool> &pools() {
    static auto *table = new HandleTable<Pool>;
    return *table;
}

CUmemoryPool default_pool(int device) {
    static std::mutex &mutex = *new std::mutex;
    static auto &handles = *new std::map<int, CUmemoryPool>;
    std::lock_guard lock(mutex);
    CUmemoryPool &handle = handles[device];
    if (handle == nullptr)
        handle = reinterpret_cast<CUmemoryPool>(pools().add(std::make_shared<Pool>(Pool{device})));
    return handle;
}

int device_of_pool(CUmemoryPool pool) {
    return pools().get(pool, CUDA_ERROR_INVALID_VALUE)->device;
}

void allocate_ordered(CUdeviceptr *result, size_t size, CUstream handle) {
    require(result != nullptr && size > 0);
    auto stream = resolve_stream(handle);
    // Graph memory nodes are not imitated.
    if (capture_status(*stream) != CU_STREAM_CAPTURE_STATUS_NONE)
        forbid_on_capturing(*stream);
    auto context = stream->context();
    // The memory is there at once, which is a legal order for what is only promised in stream order.
    *result = allocate(*context, size, AllocationKind::kPool);
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *result, size_t size) {
    return call_in_context([&](Context &context) {
        require(result != nullptr && size > 0);
        forbid_during_capture();
        *result = allocate(context, size, AllocationKind::kDevice);
    });
}

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr *result, size_t *pitch, size_t width, size_t height, unsigned element) {
    return call_in_context([&](Context &context) {
        require(result != nullptr && pitch != nullptr && width > 0 && height > 0);
        require(element == 4 || element == 8 || element == 16);
        forbid_during_capture();
        size_t row = (width + 511) / 512 * 512;
        require(row >= width && row <= (size_t{1} << 46) / height, CUDA_ERROR_OUT_OF_MEMORY);
        *result = allocate(context, row * height, AllocationKind::kDevice);
        *pitch = row;
    });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr base) {
    return call_in_context([&](Context &) {
        if (base == 0)
            return;
        auto allocation = AddressSpace::instance().allocation_at(base);
        require(allocation && allocation->base == base && in_device_heap(allocation->kind));
        forbid_during_capture();
        auto owner = allocation->context.lock();
        require(owner != nullptr, CUDA_ERROR_INVALID_CONTEXT);
        owner->synchronize();
        free_now(base);
    });
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *result, size_t size, unsigned int flags) {
    return call_in_context([&](Context &context) {
        require(result != nullptr && size > 0 && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
        forbid_during_capture();
        *result = allocate(context, size, AllocationKind::kManaged);
    });
}

CUresult CUDAAPI cuMemAllocHost(void **result, size_t size) {
    return call_in_context([&](Context &context) { host_allocate(context, result, size, 0); });
}

CUresult CUDAAPI cuMemHostAlloc(void **result, size_t size, unsigned int flags) {
    return call_in_context([&](Context &context) {
        require((flags & ~7u) == 0); // PORTABLE, DEVICEMAP, WRITECOMBINED
        host_allocate(context, result, size, flags);
    });
}

CUresult CUDAAPI cuMemFreeHost(void *memory) {
    return call_in_context([&](Context &context) {
        if (memory == nullptr)
            return;
        auto base = reinterpret_cast<CUdeviceptr>(memory);
        auto allocation = AddressSpace::instance().allocation_at(base);
        require(allocation && allocation->base == base && allocation->kind == AllocationKind::kHostPinned);
        forbid_during_capture();
        context.synchronize();
        AddressSpace::instance().remove_allocation(base);
        AddressSpace::instance().unmap(base);
        munmap(memory, (allocation->size_bytes + kPage - 1) / kPage * kPage);
    });
}

CUresult CUDAAPI cuMemHostRegister(void *memory, size_t size, unsigned int flags) {
    return call_in_context([&](Context &context) {
        require(memory != nullptr && size > 0);
        forbid_during_capture();
        auto base = reinterpret_cast<CUdeviceptr>(memory);
        require(!AddressSpace::instance().mapped_in(base, size), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        add_host_mapping(base, size);
        enter(context, base, size, AllocationKind::kHostRegistered, flags, is_shared_mapping(base, size));
    });
}

CUresult CUDAAPI cuMemHostUnregister(void *memory) {
    return call_in_context([&](Context &context) {
        auto base = reinterpret_cast<CUdeviceptr>(memory);
        auto allocation = AddressSpace::instance().allocation_at(base);
        require(allocation && allocation->base == base && allocation->kind == AllocationKind::kHostRegistered,
                CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        forbid_during_capture();
        context.synchronize();
        AddressSpace::instance().remove_allocation(base);
        AddressSpace::instance().unmap(base);
    });
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *result, void *memory, unsigned int flags) {
    return call_in_context([&](Context &) {
        require(result != nullptr && flags == 0);
        auto base = reinterpret_cast<CUdeviceptr>(memory);
        auto allocation = AddressSpace::instance().allocation_at(base);
        require(allocation && (allocation->kind == AllocationKind::kHostPinned ||
                               allocation->kind == AllocationKind::kHostRegistered));
        *result = base;
    });
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned int *flags, void *memory) {
    return call_in_context([&](Context &) {
        require(flags != nullptr);
        auto allocation = AddressSpace::instance().allocation_at(reinterpret_cast<CUdeviceptr>(memory));
        require(allocation && allocation->kind == AllocationKind::kHostPinned);
        *flags = allocation->flags | CU_MEMHOSTALLOC_DEVICEMAP;
    });
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *result, size_t size, CUstream stream) {
    return call([&] { allocate_ordered(result, size, stream); });
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *result, size_t size, CUmemoryPool pool, CUstream stream) {
    return call([&] {
        device_of_pool(pool);
        allocate_ordered(result, size, stream);
    });
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr base, CUstream handle) {
    return call([&] {
        auto stream = resolve_stream(handle);
        if (capture_status(*stream) != CU_STREAM_CAPTURE_STATUS_NONE)
            forbid_on_capturing(*stream);
        if (base == 0)
            return;
        auto allocation = AddressSpace::instance().allocation_at(base);
        require(allocation && allocation->base == base && in_device_heap(allocation->kind));
        submit(*stream, std::make_shared<InternalWork>([base](Context &) { free_now(base); }));
    });
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    return call([&] {
        require(pool != nullptr);
        device_at(device);
        *pool = default_pool(device);
    });
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    return cuDeviceGetDefaultMemPool(pool, device);
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    return call([&] {
        device_at(device);
        require(device_of_pool(pool) == device);
        require(pool == default_pool(device), CUDA_ERROR_NOT_SUPPORTED);
        require(pool == default_pool(device), CUDA_ERROR_NOT_SUPPORTED);
    });
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    return call([&] {
        require(pool != nullptr && properties != nullptr);
        require(properties->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
                    properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE,
                CUDA_ERROR_NOT_SUPPORTED);
        device_at(properties->location.id);
        *pool = reinterpret_cast<CUmemoryPool>(pools().add(std::make_shared<Pool>(Pool{properties->location.id})));
    });
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool) {
    return call([&] {
        require(default_pool(device_of_pool(pool)) != pool);
        pools().remove(pool);
    });
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    return call([&] { device_of_pool(pool); });
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    return call([&] {
        require(value != nullptr);
        int device = device_of_pool(pool);
        switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
            *static_cast<int *>(value) = 1;
            return;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
            *static_cast<cuuint64_t *>(value) = 0;
            return;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
            *static_cast<cuuint64_t *>(value) = AddressSpace::instance().pool_bytes(device);
            return;
        default:
            throw Error{CUDA_ERROR_NOT_SUPPORTED};
        }
    });
}

// Accepted and without effect: nothing is kept in the pool that could be reused or released.
CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute, void *value) {
    return call([&] {
        require(value != nullptr);
        device_of_pool(pool);
    });
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *descriptions, size_t count) {
    return call([&] {
        require(descriptions != nullptr && count > 0);
        device_of_pool(pool);
    });
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *) {
    return call([&] {
        require(flags != nullptr);
        device_of_pool(pool);
        *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    });
}

// Legacy IPC is what woodfrog's own handover replaces; the simulated driver has none.
CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *, CUipcMemHandle, unsigned int) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle *, CUevent) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult CUDAAPI cuIpcOpenEventHandle(CUevent *, CUipcEventHandle) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

} // extern "C"
