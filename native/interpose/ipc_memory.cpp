// cuIpcGetMemHandle, cuIpcOpenMemHandle and cuIpcCloseMemHandle; see ipc.hpp.
//
// As with the driver, a process that opens memory of one block several times maps it once, gets the same address for
// the same allocation, and unmaps it with the last close.
#include "ipc.hpp"

#include "cow.hpp"
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "memory.hpp"
#include "shadow.hpp"
#include "wire.h"

#include <cstring>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr uint64_t kMagic = 0x3143504947524657ULL; // "WFRGIPC1"

// A block of another process, mapped here.
struct Opened {
    VirtualHandle *handle = nullptr;
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
    std::map<uint64_t, std::pair<size_t, unsigned>> allocations; // by offset: size, how often opened
};

struct Table {
    std::mutex opening;                                     // one at a time, so that a block is mapped once
    std::mutex mutex;                                       // of `opened`
    std::map<std::pair<uint64_t, uint64_t>, Opened> opened; // by process and block
};

Table &table() {
    static Table *const instance = new Table;
    return *instance;
}

CUresult make_handle(CUipcMemHandle *out, CUdeviceptr address, bool *ours) {
    {
        std::lock_guard lock(memory().mutex);
        *ours = memory().covers(address);
    }
    if (!*ours)
        return CUDA_SUCCESS;
    const uint64_t process = serve_ipc();
    if (process == 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    cow::will_be_shared();
    std::lock_guard lock(memory().mutex);
    Allocation *allocation = memory().find(address);
    if (allocation == nullptr || out == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    Physical &physical = allocation->block->physical;
    int fd = -1; // the first time this makes the descriptor that is kept, of which the thread gives copies
    if (const CUresult result = shared_fd(&physical, &fd); result != CUDA_SUCCESS)
        return result;
    finish_fd(fd, false);
    physical.by_ipc = true;
    IpcHandle handle{};
    handle.magic = kMagic;
    handle.process = process;
    handle.block = physical.id;
    handle.block_bytes = physical.size_bytes;
    handle.offset_bytes = allocation->address - allocation->block->address;
    handle.size_bytes = allocation->size_bytes;
    handle.pid = static_cast<uint32_t>(getpid());
    memcpy(out, &handle, sizeof(handle));
    return CUDA_SUCCESS;
}

CUresult set_access(const Opened &opened, CUdevice device) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUresult result = WF_REAL(cuMemSetAccess)(opened.address, opened.size_bytes, &access, 1);
    if (result != CUDA_SUCCESS)
        return result;
    std::lock_guard lock(memory().mutex);
    auto &known = memory().virtual_mappings[opened.address].access;
    for (const VirtualAccess &one : known)
        if (one.access.location.id == device)
            return CUDA_SUCCESS;
    known.push_back({opened.address, opened.size_bytes, access});
    return CUDA_SUCCESS;
}

// Unmaps a block and gives it up.
CUresult forget(const Opened &opened) {
    const CUresult result = WF_REAL(cuMemUnmap)(opened.address, opened.size_bytes);
    if (result != CUDA_SUCCESS)
        return result;
    std::unique_ptr<VirtualHandle> unused;
    {
        std::lock_guard lock(memory().mutex);
        memory().virtual_mappings.erase(opened.address);
        --opened.handle->mappings;
        if (opened.handle->references == 0 && opened.handle->mappings == 0) {
            const auto found = memory().virtual_handles.find(opened.handle->number);
            unused = std::move(found->second);
            memory().virtual_handles.erase(found);
        }
    }
    shadow::virtual_memory_unmapped();
    if (unused != nullptr)
        if (const CUresult released = release_physical(&unused->physical); released != CUDA_SUCCESS)
            debug("memory of another process could not be released: %d", released);
    return WF_REAL(cuMemAddressFree)(opened.address, opened.size_bytes);
}

// Imports the block and maps it, without access. Nothing is left behind on failure.
CUresult map_block_of(const IpcHandle &wanted, Opened *opened) {
    const int fd = ask_for_block(wanted);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE; // freed, or the process has ended
    auto handle = std::make_unique<VirtualHandle>();
    Physical &physical = handle->physical;
    if (const CUresult result = import_physical(&physical, fd); result != CUDA_SUCCESS)
        return result;
    CUresult result = WF_REAL(cuMemGetAllocationPropertiesFromHandle)(&handle->properties, physical.handle);
    physical.id = next_physical_id();
    physical.size_bytes = wanted.block_bytes;
    place_physical(handle->properties, &physical);
    handle->foreign = true;
    handle->exporter = static_cast<int>(wanted.pid);
    handle->references = 0; // the application knows only the address
    handle->mappings = 1;
    opened->size_bytes = wanted.block_bytes;
    if (result == CUDA_SUCCESS)
        result = WF_REAL(cuMemAddressReserve)(&opened->address, opened->size_bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = WF_REAL(cuMemMap)(opened->address, opened->size_bytes, 0, physical.handle, 0);
        if (result != CUDA_SUCCESS)
            WF_REAL(cuMemAddressFree)(opened->address, opened->size_bytes);
    }
    if (result != CUDA_SUCCESS) {
        if (const CUresult undone = release_physical(&physical); undone != CUDA_SUCCESS)
            debug("memory of another process could not be released: %d", undone);
        return result;
    }
    opened->handle = handle.get();
    add_virtual_handle(std::move(handle));
    VirtualMapping mapping;
    mapping.address = opened->address;
    mapping.size_bytes = opened->size_bytes;
    mapping.handle = opened->handle;
    std::lock_guard lock(memory().mutex);
    memory().virtual_mappings[opened->address] = mapping;
    return CUDA_SUCCESS;
}

CUresult open_handle(CUdeviceptr *out, const IpcHandle &wanted) {
    const Context *context = current_context();
    if (context == nullptr || is_own_ipc(wanted.process))
        return CUDA_ERROR_INVALID_CONTEXT; // as the driver answers a process that opens its own handle
    if (out == nullptr || wanted.offset_bytes >= wanted.block_bytes ||
        wanted.size_bytes > wanted.block_bytes - wanted.offset_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    const std::pair key{wanted.process, wanted.block};
    std::lock_guard one_at_a_time(table().opening);
    Opened opened;
    bool known = false;
    {
        std::lock_guard lock(table().mutex);
        if (const auto found = table().opened.find(key); found != table().opened.end()) {
            known = true;
            opened = found->second;
        }
    }
    if (!known)
        if (const CUresult result = map_block_of(wanted, &opened); result != CUDA_SUCCESS)
            return result;
    if (const CUresult result = set_access(opened, context->device); result != CUDA_SUCCESS) {
        if (!known)
            forget(opened);
        return result;
    }
    std::lock_guard lock(table().mutex);
    Opened &entry = table().opened.emplace(key, opened).first->second;
    auto &[size_bytes, count] = entry.allocations[wanted.offset_bytes];
    size_bytes = wanted.size_bytes;
    ++count;
    *out = entry.address + wanted.offset_bytes;
    return CUDA_SUCCESS;
}

CUresult close_handle(CUdeviceptr address, bool *ours) {
    std::lock_guard one_at_a_time(table().opening);
    Opened last;
    {
        std::lock_guard lock(table().mutex);
        auto entry = table().opened.begin();
        while (entry != table().opened.end() && address - entry->second.address >= entry->second.size_bytes)
            ++entry;
        *ours = entry != table().opened.end();
        if (!*ours)
            return CUDA_SUCCESS;
        auto &allocations = entry->second.allocations;
        const auto allocation = allocations.find(address - entry->second.address);
        if (allocation == allocations.end())
            return CUDA_ERROR_INVALID_VALUE;
        if (--allocation->second.second == 0)
            allocations.erase(allocation);
        if (!allocations.empty())
            return CUDA_SUCCESS;
        last = std::move(entry->second);
        table().opened.erase(entry);
    }
    return forget(last);
}

template <typename Real>
CUresult open_either(CUdeviceptr *out, const CUipcMemHandle &handle, unsigned flags, Real real) {
    IpcHandle ours{};
    memcpy(&ours, &handle, sizeof(ours));
    if (!driver_only() && ours.magic == kMagic)
        return open_handle(out, ours);
    const CUresult result = real(out, handle, flags);
    if (result == CUDA_SUCCESS)
        mark_obstacle(wire::obstacle_legacy_ipc);
    return result;
}

} // namespace

bool ipc_address_range(CUdeviceptr address, CUdeviceptr *base, size_t *size_bytes) {
    std::lock_guard lock(table().mutex);
    for (const auto &[key, opened] : table().opened) {
        if (address - opened.address >= opened.size_bytes)
            continue;
        for (const auto &[offset, allocation] : opened.allocations) {
            if (address - opened.address - offset >= allocation.first)
                continue;
            if (base != nullptr)
                *base = opened.address + offset;
            if (size_bytes != nullptr)
                *size_bytes = allocation.first;
            return true;
        }
    }
    return false;
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuIpcGetMemHandle, CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    GateScope scope(Symbol::cuIpcGetMemHandle);
    if (!driver_only()) {
        bool ours = false;
        const CUresult result = make_handle(pHandle, dptr, &ours);
        if (ours)
            return result;
    }
    const CUresult result = WF_REAL(cuIpcGetMemHandle)(pHandle, dptr);
    if (result == CUDA_SUCCESS)
        mark_obstacle(woodfrog::wire::obstacle_legacy_ipc);
    return result;
}

WF_HOOK(cuIpcOpenMemHandle, CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    GateScope scope(Symbol::cuIpcOpenMemHandle);
    return open_either(pdptr, handle, Flags, WF_REAL(cuIpcOpenMemHandle));
}

WF_HOOK(cuIpcOpenMemHandle_v2, CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    GateScope scope(Symbol::cuIpcOpenMemHandle_v2);
    return open_either(pdptr, handle, Flags, WF_REAL(cuIpcOpenMemHandle_v2));
}

WF_HOOK(cuIpcCloseMemHandle, CUdeviceptr dptr) {
    GateScope scope(Symbol::cuIpcCloseMemHandle);
    if (!driver_only()) {
        bool ours = false;
        const CUresult result = close_handle(dptr, &ours);
        if (ours)
            return result;
    }
    return WF_REAL(cuIpcCloseMemHandle)(dptr);
}
