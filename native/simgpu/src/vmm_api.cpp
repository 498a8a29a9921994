// Virtual memory management: reservations, physical memory, mappings, sharing by file descriptor.
#include <mutex>
#include <unordered_map>

#include <cuda.h>

#include "address_space.hpp"
#include "api.hpp"
#include "capture.hpp"
#include "config.hpp"
#include "device.hpp"
#include "physical.hpp"

namespace simgpu {
namespace {

// What cuMemCreate and cuMemImport give out. Numbers are never used twice, so a stale handle stays invalid.
struct Handles {
    struct Entry {
        std::shared_ptr<Physical> physical;
        unsigned references = 1;
    };
    std::mutex mutex;
    std::unordered_map<CUmemGenericAllocationHandle, Entry> entries;
    std::unordered_map<const Physical *, CUmemGenericAllocationHandle> numbers;
    CUmemGenericAllocationHandle next = 0x5f00000001; // no small number that an application might make up
};

Handles &handles() {
    static auto *table = new Handles;
    return *table;
}

CUmemGenericAllocationHandle new_handle(std::shared_ptr<Physical> physical) {
    std::lock_guard lock(handles().mutex);
    CUmemGenericAllocationHandle handle = handles().next++;
    handles().numbers[physical.get()] = handle;
    handles().entries[handle] = {std::move(physical), 1};
    return handle;
}

std::shared_ptr<Physical> physical_of(CUmemGenericAllocationHandle handle) {
    std::lock_guard lock(handles().mutex);
    auto it = handles().entries.find(handle);
    require(it != handles().entries.end());
    return it->second.physical;
}

bool multiple_of_granularity(size_t value) {
    return value != 0 && value % kGranularity == 0;
}

// The device that the properties name, or kHostMemory.
int device_of(const CUmemAllocationProp &properties) {
    require(properties.type == CU_MEM_ALLOCATION_TYPE_PINNED);
    switch (properties.location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        device_at(properties.location.id);
        return properties.location.id;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return kHostMemory;
    default:
        throw Error{CUDA_ERROR_INVALID_VALUE};
    }
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                     unsigned long long flags) {
    return call([&] {
        require(address != nullptr && multiple_of_granularity(size) && flags == 0);
        require(alignment == 0 || (alignment & (alignment - 1)) == 0);
        require(size <= (size_t{1} << 46), CUDA_ERROR_OUT_OF_MEMORY);
        CUdeviceptr base = AddressSpace::instance().reserve(size, std::max(alignment, kGranularity), wanted);
        AddressSpace::instance().add_reservation(base, size);
        *address = base;
    });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    return call([&] {
        AddressSpace &space = AddressSpace::instance();
        require(!space.mapped_in(address, size));
        require(space.remove_reservation(address, size));
        space.release(address, size);
    });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                             unsigned long long flags) {
    return call([&] {
        require(handle != nullptr && properties != nullptr && multiple_of_granularity(size) && flags == 0);
        if (CUresult code = injected_failure("cuMemCreate"); code != CUDA_SUCCESS)
            throw Error{code};
        int device = device_of(*properties);
        require((properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0,
                CUDA_ERROR_NOT_SUPPORTED);
        *handle = new_handle(Physical::create(size, device, *properties));
    });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    return call([&] {
        std::shared_ptr<Physical> last; // freed outside of the lock
        std::lock_guard lock(handles().mutex);
        auto it = handles().entries.find(handle);
        require(it != handles().entries.end());
        if (--it->second.references > 0)
            return;
        last = std::move(it->second.physical);
        handles().numbers.erase(last.get());
        handles().entries.erase(it);
    });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    return call([&] {
        require(offset == 0 && flags == 0 && multiple_of_granularity(size) && address % kGranularity == 0);
        if (CUresult code = injected_failure("cuMemMap"); code != CUDA_SUCCESS)
            throw Error{code};
        auto physical = physical_of(handle);
        require(size <= physical->size_bytes());
        AddressSpace &space = AddressSpace::instance();
        require(space.reserved(address, size));
        Mapping mapping;
        mapping.base = address;
        mapping.size_bytes = size;
        mapping.physical = std::move(physical);
        mapping.application_mapped = true;
        space.map(std::move(mapping));
    });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    return call([&] {
        require(multiple_of_granularity(size));
        // Work in flight may still use the memory: as on a real driver the call waits for it.
        if (auto context = current_context(); context && context->alive.load()) {
            forbid_during_capture();
            context->synchronize();
        }
        AddressSpace::instance().unmap_application(address, size);
    });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptions, size_t count) {
    return call([&] {
        require(descriptions != nullptr && count > 0 && multiple_of_granularity(size));
        for (size_t i = 0; i < count; ++i) {
            const CUmemAccessDesc &description = descriptions[i];
            require(description.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
                    description.flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                    description.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
            if (description.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
                device_at(description.location.id);
        }
        for (size_t i = 0; i < count; ++i)
            AddressSpace::instance().set_access(address, size, descriptions[i]);
    });
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    return call([&] {
        require(flags != nullptr && location != nullptr);
        auto mapping = AddressSpace::instance().mapping_at(address);
        require(mapping && mapping->application_mapped);
        const auto &table = location->type == CU_MEM_LOCATION_TYPE_DEVICE ? mapping->access : mapping->host_access;
        auto it = table.find(location->id);
        *flags = it == table.end() ? 0 : it->second;
    });
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
    return call([&] {
        require(shareable != nullptr && flags == 0);
        require(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
        if (CUresult code = injected_failure("cuMemExportToShareableHandle"); code != CUDA_SUCCESS)
            throw Error{code};
        auto physical = physical_of(handle);
        require(!physical->imported());
        require((physical->properties().requestedHandleTypes & type) != 0);
        *static_cast<int *>(shareable) = physical->duplicate_fd();
    });
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                                CUmemAllocationHandleType type) {
    return call([&] {
        require(handle != nullptr);
        require(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
        // The descriptor itself is passed where a pointer is expected.
        *handle = new_handle(Physical::import(static_cast<int>(reinterpret_cast<intptr_t>(shareable))));
    });
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                               CUmemAllocationGranularity_flags) {
    return call([&] {
        require(granularity != nullptr && properties != nullptr);
        device_of(*properties);
        *granularity = kGranularity;
    });
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                        CUmemGenericAllocationHandle handle) {
    return call([&] {
        require(properties != nullptr);
        *properties = physical_of(handle)->properties();
    });
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    return call([&] {
        require(handle != nullptr);
        auto mapping = AddressSpace::instance().mapping_at(reinterpret_cast<CUdeviceptr>(address));
        require(mapping && mapping->application_mapped);
        {
            std::lock_guard lock(handles().mutex);
            auto known = handles().numbers.find(mapping->physical.get());
            if (known != handles().numbers.end()) {
                ++handles().entries[known->second].references;
                *handle = known->second;
                return;
            }
        }
        *handle = new_handle(mapping->physical);
    });
}

CUresult CUDAAPI cuMemGetHandleForAddressRange(void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *properties,
                                           CUmulticastGranularity_flags) {
    return call([&] {
        require(config().multicast, CUDA_ERROR_NOT_SUPPORTED);
        require(granularity != nullptr && properties != nullptr);
        *granularity = kGranularity;
    });
}

// An object can be made, and no more: what counts is that a process has one.
CUresult CUDAAPI cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *properties) {
    return call([&] {
        require(config().multicast, CUDA_ERROR_NOT_SUPPORTED);
        require(handle != nullptr && properties != nullptr && multiple_of_granularity(properties->size));
        CUmemAllocationProp plain{};
        plain.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        plain.location = {CU_MEM_LOCATION_TYPE_HOST, 0};
        *handle = new_handle(Physical::create(properties->size, kHostMemory, plain));
    });
}

} // extern "C"
