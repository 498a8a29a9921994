// Exporting and importing memory of the virtual memory API: what the processes of a job share with each other.
//
// The driver opens a new file for each export, and nothing about such a file tells which memory it is. So all exports
// of an allocation are copies of one descriptor that is kept, an importer keeps a copy of what it got, and whoever has
// the descriptors of both (the daemon, at a handover) sees that they are one open file. The exporter also signs that
// file with its process number (the kernel's owner for SIGIO, which nothing else uses), so that an importer can say
// where its memory came from.
#include "capture.hpp"
#include "cow.hpp"
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "memory.hpp"
#include "wire.h"

#include <fcntl.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr auto kPosixFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// An export for the application: the driver's answer for anything out of the ordinary, else a copy of the kept one.
CUresult export_handle(void *shareable, CUmemGenericAllocationHandle number, CUmemAllocationHandleType type,
                       unsigned long long flags) {
    cow::will_be_shared();
    std::lock_guard lock(memory().mutex);
    VirtualHandle *known = find_virtual_handle(number);
    // The types the application asked for are those it may export, not the one that was added.
    if (known == nullptr || (!known->foreign && (known->properties.requestedHandleTypes & type) == 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (known->foreign || type != kPosixFd || flags != 0 || shareable == nullptr) {
        const CUresult result = WF_REAL(cuMemExportToShareableHandle)(shareable, known->physical.handle, type, flags);
        if (result == CUDA_SUCCESS) {
            ++known->physical.exports;
            mark_obstacle(woodfrog::wire::obstacle_imported_memory); // by a way that is not followed
        }
        return result;
    }
    int fd = -1;
    if (const CUresult result = shared_fd(&known->physical, &fd); result != CUDA_SUCCESS)
        return result;
    if (fcntl(fd, F_SETOWN, getpid()) != 0)
        debug("an exported descriptor could not be signed: its importers will not know where it is from");
    finish_fd(fd, true);   // the application's from here on
    fcntl(fd, F_SETFD, 0); // the driver's descriptors are inherited
    *static_cast<int *>(shareable) = fd;
    ++known->physical.exports;
    return CUDA_SUCCESS;
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuMemExportToShareableHandle, void *shareableHandle, CUmemGenericAllocationHandle handle,
        CUmemAllocationHandleType handleType, unsigned long long flags) {
    GateScope scope(Symbol::cuMemExportToShareableHandle);
    if (!is_virtual_number(handle) || driver_only())
        return WF_REAL(cuMemExportToShareableHandle)(shareableHandle, handle, handleType, flags);
    return export_handle(shareableHandle, handle, handleType, flags);
}

WF_HOOK(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *handle, void *osHandle,
        CUmemAllocationHandleType shHandleType) {
    GateScope scope(Symbol::cuMemImportFromShareableHandle);
    CUresult result = WF_REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    if (result != CUDA_SUCCESS || driver_only())
        return result;
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(osHandle));
    CUmemAllocationProp properties{};
    auto imported = std::make_unique<VirtualHandle>();
    Physical &physical = imported->physical;
    int copy = -1;
    if (shHandleType == kPosixFd &&
        WF_REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, *handle) == CUDA_SUCCESS &&
        can_own_virtual(properties, 0))
        copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0 || keep_fd(copy, &physical.kept) != 0) {
        mark_obstacle(woodfrog::wire::obstacle_imported_memory); // the handle stays the driver's
        return result;
    }
    const int exporter = fcntl(fd, F_GETOWN);
    imported->exporter = exporter > 0 ? exporter : 0;
    imported->properties = properties;
    imported->foreign = true;
    physical.id = next_physical_id();
    physical.handle = *handle;
    physical.present = true;
    place_physical(properties, &physical);
    physical.imported = true;
    // The driver does not tell the size; the first mapping does. Until then: the least that it can be.
    physical.size_bytes = device_facts(physical.device).granularity_bytes;
    *handle = add_virtual_handle(std::move(imported));
    return result;
}
