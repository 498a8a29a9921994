// The application's own use of the virtual memory API (expandable segments, NCCL, sleeping servers): cuMemCreate and
// everything that names a handle; exporting and importing are in shared_handles.cpp.
//
// A handle that we do not own (host memory that cannot be exported, sparse tiles, anything the driver made differently)
// keeps the driver's number and passes through unchanged.
#include "capture.hpp"
#include "cow.hpp"
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "memory.hpp"
#include "shadow.hpp"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

constexpr auto kPosixFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// With the lock held: when neither the application nor a mapping uses it, takes it out of the table.
std::unique_ptr<VirtualHandle> take_if_unused(VirtualHandle *handle) {
    if (handle->references != 0 || handle->mappings != 0)
        return nullptr;
    const auto found = memory().virtual_handles.find(handle->number);
    std::unique_ptr<VirtualHandle> taken = std::move(found->second);
    memory().virtual_handles.erase(found);
    return taken;
}

CUresult release_taken(std::unique_ptr<VirtualHandle> handle) {
    return handle == nullptr ? CUDA_SUCCESS : release_physical(&handle->physical);
}

// The mappings that lie in [address, address + size). With the lock held.
template <typename Visit> void each_mapping(CUdeviceptr address, size_t size_bytes, Visit visit) {
    auto &mappings = memory().virtual_mappings;
    auto first = mappings.upper_bound(address);
    if (first != mappings.begin() && std::prev(first)->second.address + std::prev(first)->second.size_bytes > address)
        --first;
    for (auto entry = first; entry != mappings.end() && entry->first < address + size_bytes;) {
        auto next = std::next(entry);
        visit(entry);
        entry = next;
    }
}

void remember_access(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc *access, size_t count) {
    std::lock_guard lock(memory().mutex);
    each_mapping(address, size_bytes, [&](auto entry) {
        VirtualMapping &mapping = entry->second;
        const CUdeviceptr start = std::max(address, mapping.address);
        const CUdeviceptr end = std::min(address + size_bytes, mapping.address + mapping.size_bytes);
        for (size_t i = 0; i < count; ++i) {
            const CUmemLocation &where = access[i].location;
            // What is set again for the same range and place replaces the old; the order keeps the rest right.
            std::erase_if(mapping.access, [&](const VirtualAccess &old) {
                return old.address >= start && old.address + old.size_bytes <= end &&
                       old.access.location.type == where.type && old.access.location.id == where.id;
            });
            mapping.access.push_back({start, end - start, access[i]});
        }
    });
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuMemCreate, CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
        unsigned long long flags) {
    GateScope scope(Symbol::cuMemCreate);
    const auto leave = [&] {
        return driver_memory_call([&] { return WF_REAL(cuMemCreate)(handle, size, prop, flags); });
    };
    if (handle == nullptr || prop == nullptr || scope.nested() || !can_own_virtual(*prop, flags))
        return leave();
    // The driver's own verdict on the arguments comes first: with one more handle type they could be judged otherwise.
    CUmemAllocationProp wanted = *prop;
    wanted.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(wanted.requestedHandleTypes | kPosixFd);
    CUmemGenericAllocationHandle real = 0;
    const CUresult result = driver_memory_call([&] { return WF_REAL(cuMemCreate)(&real, size, &wanted, flags); });
    if (result != CUDA_SUCCESS)
        return result == CUDA_ERROR_OUT_OF_MEMORY ? result : leave();
    Physical physical;
    physical.id = next_physical_id();
    physical.handle = real;
    physical.present = true;
    physical.size_bytes = size;
    place_physical(*prop, &physical);
    auto made = std::make_unique<VirtualHandle>();
    made->physical = physical;
    made->properties = *prop;
    *handle = add_virtual_handle(std::move(made));
    return CUDA_SUCCESS;
}

WF_HOOK(cuMemRelease, CUmemGenericAllocationHandle handle) {
    GateScope scope(Symbol::cuMemRelease);
    if (!is_virtual_number(handle) || driver_only())
        return WF_REAL(cuMemRelease)(handle);
    std::unique_ptr<VirtualHandle> unused;
    {
        std::lock_guard lock(memory().mutex);
        VirtualHandle *known = find_virtual_handle(handle);
        if (known == nullptr)
            return CUDA_ERROR_INVALID_VALUE;
        --known->references;
        unused = take_if_unused(known);
    }
    return release_taken(std::move(unused));
}

WF_HOOK(cuMemMap, CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
        unsigned long long flags) {
    GateScope scope(Symbol::cuMemMap);
    if (!is_virtual_number(handle) || driver_only())
        return WF_REAL(cuMemMap)(ptr, size, offset, handle, flags);
    CUmemGenericAllocationHandle real = 0;
    VirtualHandle *known = nullptr;
    {
        std::lock_guard lock(memory().mutex);
        known = find_virtual_handle(handle);
        if (known == nullptr)
            return CUDA_ERROR_INVALID_VALUE;
        ++known->mappings; // keeps it alive while the driver maps
        real = known->physical.handle;
    }
    const CUresult result = WF_REAL(cuMemMap)(ptr, size, offset, real, flags);
    std::unique_ptr<VirtualHandle> unused;
    {
        std::lock_guard lock(memory().mutex);
        if (result == CUDA_SUCCESS) {
            VirtualMapping mapping;
            mapping.address = ptr;
            mapping.size_bytes = size;
            mapping.offset_bytes = offset;
            mapping.flags = flags;
            mapping.handle = known;
            memory().virtual_mappings[ptr] = mapping;
            // The size of imported memory is not told by the driver; a mapping shows it.
            known->physical.size_bytes = std::max(known->physical.size_bytes, offset + size);
        } else {
            --known->mappings;
            unused = take_if_unused(known);
        }
    }
    if (const CUresult released = release_taken(std::move(unused)); released != CUDA_SUCCESS)
        debug("a handle released during a failing cuMemMap is lost: %d", released);
    return result;
}

WF_HOOK(cuMemUnmap, CUdeviceptr ptr, size_t size) {
    GateScope scope(Symbol::cuMemUnmap);
    CUresult result = WF_REAL(cuMemUnmap)(ptr, size);
    if (result != CUDA_SUCCESS || driver_only())
        return result;
    std::vector<std::unique_ptr<VirtualHandle>> unused;
    {
        std::lock_guard lock(memory().mutex);
        each_mapping(ptr, size, [&](auto entry) {
            VirtualHandle *handle = entry->second.handle;
            --handle->mappings;
            memory().virtual_mappings.erase(entry);
            if (auto taken = take_if_unused(handle); taken != nullptr)
                unused.push_back(std::move(taken));
        });
    }
    shadow::virtual_memory_unmapped();
    for (auto &handle : unused)
        if (const CUresult released = release_taken(std::move(handle)); released != CUDA_SUCCESS)
            result = released;
    return result;
}

WF_HOOK(cuMemSetAccess, CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    GateScope scope(Symbol::cuMemSetAccess);
    const CUresult result = WF_REAL(cuMemSetAccess)(ptr, size, desc, count);
    if (result == CUDA_SUCCESS && !driver_only()) {
        remember_access(ptr, size, desc, count);
        for (size_t i = 0; i < count; ++i)
            if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
                shadow::wrote_everything_for_good("device memory that the processor can write");
                cow::will_be_shared();
            }
    }
    return result;
}

WF_HOOK(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    GateScope scope(Symbol::cuMemGetAllocationPropertiesFromHandle);
    if (!is_virtual_number(handle) || driver_only())
        return WF_REAL(cuMemGetAllocationPropertiesFromHandle)(prop, handle);
    std::lock_guard lock(memory().mutex);
    const VirtualHandle *known = find_virtual_handle(handle);
    if (known == nullptr || prop == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = WF_REAL(cuMemGetAllocationPropertiesFromHandle)(prop, known->physical.handle);
    if (result == CUDA_SUCCESS)
        prop->requestedHandleTypes = known->properties.requestedHandleTypes;
    return result;
}

WF_HOOK(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *handle, void *addr) {
    GateScope scope(Symbol::cuMemRetainAllocationHandle);
    if (!driver_only()) {
        const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(addr);
        std::lock_guard lock(memory().mutex);
        if (memory().covers(address))
            return CUDA_ERROR_INVALID_VALUE; // the application believes that cuMemAlloc made it
        VirtualHandle *found = nullptr;
        each_mapping(address, 1, [&](auto entry) { found = entry->second.handle; });
        if (found != nullptr && handle != nullptr) {
            ++found->references;
            *handle = found->number;
            return CUDA_SUCCESS;
        }
    }
    return WF_REAL(cuMemRetainAllocationHandle)(handle, addr);
}

namespace {

// Sparse arrays keep their tiles by handle: such memory cannot be taken away and stays where it is.
CUresult map_arrays(CUarrayMapInfo *list, unsigned count, CUstream stream,
                    CUresult (*real)(CUarrayMapInfo *, unsigned, CUstream)) {
    if (list == nullptr || driver_only())
        return real(list, count, stream);
    std::vector<CUarrayMapInfo> translated(list, list + count);
    {
        std::lock_guard lock(memory().mutex);
        for (CUarrayMapInfo &one : translated) {
            if (one.memHandleType != CU_MEM_HANDLE_TYPE_GENERIC)
                continue;
            if (VirtualHandle *handle = find_virtual_handle(one.memHandle.memHandle); handle != nullptr)
                handle->pinned = true;
            one.memHandle.memHandle = real_handle(one.memHandle.memHandle);
        }
    }
    return real(translated.data(), count, stream);
}

CUmemGenericAllocationHandle pin_for_multicast(CUmemGenericAllocationHandle number) {
    if (driver_only())
        return number;
    std::lock_guard lock(memory().mutex);
    VirtualHandle *handle = find_virtual_handle(number);
    if (handle != nullptr)
        handle->pinned = true;
    return real_handle(number);
}

} // namespace

WF_HOOK(cuMemMapArrayAsync, CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    GateScope scope(Symbol::cuMemMapArrayAsync);
    return map_arrays(mapInfoList, count, hStream, WF_REAL(cuMemMapArrayAsync));
}

WF_HOOK(cuMemMapArrayAsync_ptsz, CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    GateScope scope(Symbol::cuMemMapArrayAsync_ptsz);
    return map_arrays(mapInfoList, count, hStream, WF_REAL(cuMemMapArrayAsync_ptsz));
}

WF_HOOK(cuMulticastBindMem, CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
        CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, unsigned long long flags) {
    GateScope scope(Symbol::cuMulticastBindMem);
    return WF_REAL(cuMulticastBindMem)(mcHandle, mcOffset, pin_for_multicast(memHandle), memOffset, size, flags);
}
