// Our numbers for the application's handles, and mapping again after a return; see virtual_memory.hpp.
#include "virtual_memory.hpp"

#include "memory.hpp"
#include "spent.hpp"

namespace woodfrog::interpose {
namespace {
// The driver's handles are addresses or small integers; ours carry a mark no user-space address has.
constexpr uint64_t kNumberMark = 0x5746000000000000ULL; // "WF"
constexpr uint64_t kMarkMask = 0xffff000000000000ULL;

// A device through which the process can reach host memory.
CUdevice reaching_device() {
    const Context *context = current_context();
    return context == nullptr ? 0 : context->device;
}
} // namespace

bool is_virtual_number(CUmemGenericAllocationHandle number) {
    return (number & kMarkMask) == kNumberMark;
}

CUmemGenericAllocationHandle new_virtual_number() {
    static constinit std::atomic<uint64_t> last{0};
    return kNumberMark | (last.fetch_add(1, std::memory_order_relaxed) + 1);
}

VirtualHandle *find_virtual_handle(CUmemGenericAllocationHandle number) {
    if (!is_virtual_number(number))
        return nullptr;
    const auto found = memory().virtual_handles.find(number);
    return found == memory().virtual_handles.end() || found->second->references == 0 ? nullptr : found->second.get();
}

CUmemGenericAllocationHandle real_handle(CUmemGenericAllocationHandle number) {
    const VirtualHandle *handle = find_virtual_handle(number);
    return handle == nullptr ? number : handle->physical.handle;
}

bool can_own_virtual(const CUmemAllocationProp &properties, unsigned long long flags) {
    if (flags != 0 || properties.type != CU_MEM_ALLOCATION_TYPE_PINNED || driver_only() ||
        (properties.allocFlags.usage & CU_MEM_CREATE_USAGE_TILE_POOL) != 0)
        return false;
    if (properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return device_facts(properties.location.id).owned;
    // Host memory that can be exported: the driver's restore fails with it. Other host memory it saves itself.
    return properties.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA &&
           (properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0 &&
           device_facts(reaching_device()).owned;
}

void place_physical(const CUmemAllocationProp &properties, Physical *physical) {
    const bool host = properties.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    physical->device = host ? reaching_device() : properties.location.id;
    physical->host_node = host ? properties.location.id : -1;
}

bool VirtualMapping::host_reaches() const {
    for (const VirtualAccess &one : access)
        if (one.access.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return true;
    return false;
}

CUmemGenericAllocationHandle add_virtual_handle(std::unique_ptr<VirtualHandle> handle) {
    handle->number = new_virtual_number();
    const CUmemGenericAllocationHandle number = handle->number;
    std::lock_guard lock(memory().mutex);
    memory().virtual_handles.emplace(number, std::move(handle));
    return number;
}

CUresult map_again(VirtualMapping *mapping) {
    CUresult result = spent::timed(spent::What::map_call, [&] {
        return WF_REAL(cuMemMap)(mapping->address, mapping->size_bytes, mapping->offset_bytes,
                                 mapping->handle->physical.handle, mapping->flags);
    });
    if (result != CUDA_SUCCESS)
        return result;
    mapping->present = true;
    for (const VirtualAccess &one : mapping->access) {
        result = spent::timed(spent::What::access_call,
                              [&] { return WF_REAL(cuMemSetAccess)(one.address, one.size_bytes, &one.access, 1); });
        if (result != CUDA_SUCCESS) {
            mapping->present = WF_REAL(cuMemUnmap)(mapping->address, mapping->size_bytes) != CUDA_SUCCESS;
            return result; // a return that is repeated begins anew
        }
    }
    return CUDA_SUCCESS;
}

} // namespace woodfrog::interpose
