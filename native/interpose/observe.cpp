// What an application can ask about memory, answered as if cuMemAlloc were the driver's: address ranges, free memory.
#include "gate.hpp"
#include "ipc.hpp"
#include "memory.hpp"

#include <algorithm>

using namespace woodfrog::interpose;

WF_HOOK(cuMemGetAddressRange_v2, CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    GateScope scope(Symbol::cuMemGetAddressRange_v2);
    if (!driver_only() && current_context() != nullptr) {
        std::lock_guard lock(memory().mutex);
        if (const Allocation *allocation = memory().find(dptr); allocation != nullptr) {
            if (pbase != nullptr)
                *pbase = allocation->address;
            if (psize != nullptr)
                *psize = allocation->size_bytes;
            return CUDA_SUCCESS;
        }
        if (memory().covers(dptr))
            return CUDA_ERROR_NOT_FOUND;
    }
    if (!driver_only() && ipc_address_range(dptr, pbase, psize))
        return CUDA_SUCCESS;
    return WF_REAL(cuMemGetAddressRange_v2)(pbase, psize, dptr);
}

WF_HOOK(cuMemGetInfo_v2, size_t *free, size_t *total) {
    GateScope scope(Symbol::cuMemGetInfo_v2);
    const CUresult result = WF_REAL(cuMemGetInfo_v2)(free, total);
    if (result != CUDA_SUCCESS || driver_only() || free == nullptr)
        return result;
    if (const Context *context = current_context(); context != nullptr) {
        std::lock_guard lock(memory().mutex);
        *free += memory().spare_bytes(context->device);
        if (physicals_on_host() != 0) // the application's own allocations are there, whatever they lie on
            *free -= std::min(*free, memory().hosted_bytes(context->device));
    }
    return result;
}
