// What an application can ask about memory, answered as if cuMemAlloc were the driver's: address ranges, free memory,
// legacy IPC.
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "memory.hpp"
#include "wire.h"

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
    }
    return result;
}

// The driver refuses legacy IPC for memory of the virtual memory API. README.md says what to do about it.
WF_HOOK(cuIpcGetMemHandle, CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    GateScope scope(Symbol::cuIpcGetMemHandle);
    bool ours = false;
    if (!driver_only()) {
        std::lock_guard lock(memory().mutex);
        ours = memory().covers(dptr);
    }
    if (ours) {
        debug("cuIpcGetMemHandle is not supported for memory that woodfrog owns: start with WOODFROG_DRIVER_ALLOC=1");
        mark_obstacle(woodfrog::wire::obstacle_legacy_ipc);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    const CUresult result = WF_REAL(cuIpcGetMemHandle)(pHandle, dptr);
    if (result == CUDA_SUCCESS)
        mark_obstacle(woodfrog::wire::obstacle_legacy_ipc);
    return result;
}
