// What an application can ask about an address.
#include <cuda.h>

#include "address_space.hpp"
#include "api.hpp"
#include "device.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

// What lies at an address: an allocation, or memory that the application mapped itself.
struct Place {
    Allocation allocation;
    std::optional<Mapping> mapping;
};

std::optional<Place> place_at(CUdeviceptr address) {
    AddressSpace &space = AddressSpace::instance();
    Place place;
    place.mapping = space.mapping_at(address);
    if (auto allocation = space.allocation_at(address)) {
        place.allocation = *allocation;
        return place;
    }
    if (!place.mapping || !place.mapping->application_mapped)
        return std::nullopt;
    place.allocation.base = place.mapping->base;
    place.allocation.size_bytes = place.mapping->size_bytes;
    place.allocation.kind = AllocationKind::kMapped;
    place.allocation.device = place.mapping->physical->device();
    return place;
}

bool on_host(const Place &place) {
    if (place.allocation.kind == AllocationKind::kMapped)
        return place.allocation.device == kHostMemory;
    return place.allocation.kind == AllocationKind::kHostPinned ||
           place.allocation.kind == AllocationKind::kHostRegistered;
}

// False when the attribute has no value for such memory.
bool attribute_of(const Place &place, CUdeviceptr address, CUpointer_attribute attribute, void *data) {
    const Allocation &allocation = place.allocation;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: {
        auto context = allocation.context.lock();
        *static_cast<CUcontext *>(data) = context ? context->handle() : nullptr;
        return allocation.kind != AllocationKind::kMapped;
    }
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned *>(data) = on_host(place) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *static_cast<CUdeviceptr *>(data) = address;
        return true;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: {
        bool reachable = on_host(place) || allocation.kind == AllocationKind::kManaged;
        *static_cast<void **>(data) = reachable ? reinterpret_cast<void *>(address) : nullptr;
        return reachable;
    }
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *static_cast<int *>(data) = 0;
        return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *static_cast<unsigned long long *>(data) = allocation.buffer_id;
        return true;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *static_cast<int *>(data) = allocation.kind == AllocationKind::kManaged;
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int *>(data) = allocation.device == kHostMemory ? -1 : allocation.device;
        return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *static_cast<int *>(data) = allocation.kind == AllocationKind::kDevice;
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr *>(data) = allocation.base;
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *static_cast<size_t *>(data) = allocation.size_bytes;
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *static_cast<int *>(data) = 1;
        return true;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
        bool shareable = allocation.kind == AllocationKind::kMapped;
        *static_cast<cuuint64_t *>(data) =
            shareable ? static_cast<cuuint64_t>(place.mapping->physical->properties().requestedHandleTypes) : 0;
        return true;
    }
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        *static_cast<int *>(data) = 0;
        return true;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: {
        unsigned flags = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
        if (allocation.kind == AllocationKind::kMapped) {
            auto context = current_context();
            auto it = place.mapping->access.find(context ? context->device : 0);
            flags = it == place.mapping->access.end() ? 0 : static_cast<unsigned>(it->second);
        }
        *static_cast<unsigned *>(data) = flags;
        return true;
    }
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *static_cast<CUmemoryPool *>(data) = allocation.pool;
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *static_cast<size_t *>(data) = place.mapping ? place.mapping->size_bytes : allocation.size_bytes;
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *static_cast<CUdeviceptr *>(data) = place.mapping ? place.mapping->base : allocation.base;
        return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        *static_cast<unsigned long long *>(data) = place.mapping ? place.mapping->base : allocation.base;
        return true;
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
        *static_cast<unsigned *>(data) = 0;
        return true;
    default:
        throw Error{CUDA_ERROR_INVALID_VALUE};
    }
}

// For memory that no driver knows, cuPointerGetAttributes answers these instead of failing.
void attribute_of_nothing(CUpointer_attribute attribute, void *data) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        *static_cast<unsigned long long *>(data) = 0;
        return;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int *>(data) = -2;
        return;
    default:
        *static_cast<int *>(data) = 0;
        return;
    }
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    return call([&] {
        require(data != nullptr);
        auto place = place_at(address);
        require(place.has_value());
        require(attribute_of(*place, address, attribute, data));
    });
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                        CUdeviceptr address) {
    return call([&] {
        require(count > 0 && attributes != nullptr && data != nullptr);
        auto place = place_at(address);
        for (unsigned i = 0; i < count; ++i) {
            require(data[i] != nullptr);
            if (!place || !attribute_of(*place, address, attributes[i], data[i])) {
                attribute_of_nothing(attributes[i], data[i]);
            }
        }
    });
}

CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    return call([&] {
        require(value != nullptr && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
        require(place_at(address).has_value());
    });
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    return call_in_context([&](Context &) {
        auto place = place_at(address);
        require(place.has_value(), CUDA_ERROR_NOT_FOUND);
        put(base, place->allocation.base);
        put(size, place->allocation.size_bytes);
    });
}

CUresult CUDAAPI cuMemAdvise(CUdeviceptr, size_t, CUmem_advise, CUmemLocation) {
    return call_in_context([](Context &) {});
}

// Managed memory is always where it is needed: there is nothing to move.
CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr address, size_t size, CUmemLocation, unsigned int flags,
                                    CUstream stream) {
    return call([&] {
        require(flags == 0 && size > 0 && place_at(address).has_value());
        resolve_stream(stream);
    });
}

CUresult CUDAAPI cuMemRangeGetAttribute(void *, size_t, CUmem_range_attribute, CUdeviceptr, size_t) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

} // extern "C"
