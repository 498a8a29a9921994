// Peer access: memory made by cuMemAlloc becomes accessible to a context that enables access to its owner. Memory of
// the virtual memory API has to be opened to the device explicitly, so ours is, for what exists and what will be made.
#include "debug.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

Context *context_of(CUcontext handle) { // with the lock held
    const auto found = memory().contexts.find(handle);
    return found == memory().contexts.end() ? nullptr : found->second.get();
}

// Sets the access of `device` to everything that `owner` has.
void set_access_of(Context *owner, CUdevice device, CUmemAccess_flags flags) {
    std::vector<std::unique_ptr<Block>> unused;
    {
        Memory &all = memory();
        std::lock_guard lock(all.mutex);
        unused = all.take_spare(owner, -1); // their access would be out of date
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
        for (const auto &[address, block] : all.blocks) {
            if (block->owner != owner || !block->mapped)
                continue;
            const CUresult result = WF_REAL(cuMemSetAccess)(block->address, block->size_bytes, &access, 1);
            if (result != CUDA_SUCCESS)
                debug("access of device %d to a block of device %d cannot be set: %d", device, owner->device, result);
        }
    }
    for (auto &block : unused)
        destroy_block(std::move(block));
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuCtxEnablePeerAccess, CUcontext peerContext, unsigned int Flags) {
    GateScope scope(Symbol::cuCtxEnablePeerAccess);
    const CUresult result = WF_REAL(cuCtxEnablePeerAccess)(peerContext, Flags);
    if (result != CUDA_SUCCESS || driver_only())
        return result;
    Context *reader = current_context();
    Context *owner = nullptr;
    if (reader != nullptr) {
        std::lock_guard lock(memory().mutex);
        owner = context_of(peerContext);
        if (owner != nullptr)
            owner->readers.push_back(reader);
    }
    if (owner != nullptr && owner->device != reader->device)
        set_access_of(owner, reader->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return result;
}

WF_HOOK(cuCtxDisablePeerAccess, CUcontext peerContext) {
    GateScope scope(Symbol::cuCtxDisablePeerAccess);
    const CUresult result = WF_REAL(cuCtxDisablePeerAccess)(peerContext);
    if (result != CUDA_SUCCESS || driver_only())
        return result;
    Context *reader = current_context();
    Context *owner = nullptr;
    bool still = true;
    if (reader != nullptr) {
        std::lock_guard lock(memory().mutex);
        owner = context_of(peerContext);
        if (owner != nullptr) {
            std::erase(owner->readers, reader);
            const std::vector<CUdevice> left = reader_devices(*owner);
            still = std::find(left.begin(), left.end(), reader->device) != left.end();
        }
    }
    if (owner != nullptr && owner->device != reader->device && !still)
        set_access_of(owner, reader->device, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    return result;
}
