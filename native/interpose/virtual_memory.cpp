// Our numbers for the application's handles, and mapping again after a return; see virtual_memory.hpp.
#include "virtual_memory.hpp"

#include "memory.hpp"

namespace woodfrog::interpose {
namespace {
// The driver's handles are addresses or small integers; ours carry a mark no user-space address has.
constexpr uint64_t kNumberMark = 0x5746000000000000ULL; // "WF"
constexpr uint64_t kMarkMask = 0xffff000000000000ULL;
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

CUresult map_again(VirtualMapping *mapping) {
    CUresult result = WF_REAL(cuMemMap)(mapping->address, mapping->size_bytes, mapping->offset_bytes,
                                        mapping->handle->physical.handle, mapping->flags);
    if (result != CUDA_SUCCESS)
        return result;
    mapping->present = true;
    for (const VirtualAccess &one : mapping->access) {
        result = WF_REAL(cuMemSetAccess)(one.address, one.size_bytes, &one.access, 1);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

} // namespace woodfrog::interpose
