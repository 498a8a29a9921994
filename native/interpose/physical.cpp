// Physical device memory; see physical.hpp.
#include "physical.hpp"

#include "debug.hpp"
#include "devices.hpp"
#include "spent.hpp"

#include <fcntl.h>
#include <unistd.h>

namespace woodfrog::interpose {

namespace {

constinit std::atomic<size_t> g_on_host{0};

void set_on_host(Physical *physical, bool on_host) {
    if (physical->on_host != on_host)
        g_on_host.fetch_add(on_host ? 1 : size_t(-1), std::memory_order_relaxed);
    physical->on_host = on_host;
}

// The driver knows where imported memory lies. One that does not tell has no memory of the host's behind handles.
bool lies_on_host(CUmemGenericAllocationHandle handle) {
    CUmemAllocationProp properties{};
    const spent::Scope scope(spent::What::properties_call);
    return WF_REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) == CUDA_SUCCESS &&
           properties.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

} // namespace

size_t physicals_on_host() {
    return g_on_host.load(std::memory_order_relaxed);
}

uint64_t next_physical_id() {
    static constinit std::atomic<uint64_t> last{0};
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

CUmemAllocationProp exportable_properties(CUdevice device) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.allocFlags.gpuDirectRDMACapable = device_facts(device).rdma ? 1 : 0;
    return properties;
}

CUresult create_physical(CUdevice device, size_t size_bytes, Physical *physical) {
    CUmemAllocationProp properties = exportable_properties(device);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = WF_REAL(cuMemCreate)(&handle, size_bytes, &properties, 0);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && properties.allocFlags.gpuDirectRDMACapable) {
        // The attribute promises it, but some virtual machines refuse it.
        properties.allocFlags.gpuDirectRDMACapable = 0;
        result = WF_REAL(cuMemCreate)(&handle, size_bytes, &properties, 0);
        if (result == CUDA_SUCCESS)
            device_has_no_rdma(device);
    }
    if (result != CUDA_SUCCESS)
        return result;
    *physical = Physical{};
    physical->id = next_physical_id();
    physical->handle = handle;
    physical->present = true;
    physical->size_bytes = size_bytes;
    physical->device = device;
    return CUDA_SUCCESS;
}

CUresult release_physical(Physical *physical) {
    if (physical->present) {
        const CUresult result =
            spent::timed(spent::What::release_call, [&] { return WF_REAL(cuMemRelease)(physical->handle); });
        if (result != CUDA_SUCCESS)
            return result;
        physical->present = false;
        physical->handle = 0;
    }
    physical->was_on_host = physical->on_host;
    set_on_host(physical, false);
    const spent::Scope scope(spent::What::descriptors);
    close_kept(&physical->kept);
    return CUDA_SUCCESS;
}

namespace {

// The driver opens a file of its own for each export. With forks paused.
CUresult new_fd(const Physical &physical, int *fd) {
    const CUresult result = spent::timed(spent::What::export_call, [&] {
        return WF_REAL(cuMemExportToShareableHandle)(fd, physical.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    });
    if (result != CUDA_SUCCESS)
        return result;
    if (fcntl(*fd, F_SETFD, FD_CLOEXEC) != 0) {
        close(*fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    return CUDA_SUCCESS;
}

} // namespace

bool needs_kept(const Physical &physical) {
    return physical.imported || physical.exports != 0 || physical.by_ipc;
}

CUresult keep_physical_fd(Physical *physical) {
    if (physical->kept.fd >= 0)
        return CUDA_SUCCESS;
    int first = -1;
    {
        ForkPause pause;
        if (const CUresult result = new_fd(*physical, &first); result != CUDA_SUCCESS)
            return result;
        pause.announce(first);
    }
    return keep_fd(first, &physical->kept) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult physical_fd(const Physical &physical, int *fd) {
    ForkPause pause;
    if (fd_is_ours(physical.kept)) {
        const spent::Scope scope(spent::What::descriptors);
        *fd = fcntl(physical.kept.fd, F_DUPFD_CLOEXEC, 3);
        if (*fd < 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
    } else if (physical.kept.fd >= 0 && needs_kept(physical)) {
        return CUDA_ERROR_INVALID_HANDLE; // the application has closed it
    } else if (const CUresult result = new_fd(physical, fd); result != CUDA_SUCCESS) {
        return result;
    }
    pause.announce(*fd);
    return CUDA_SUCCESS;
}

CUresult shared_fd(Physical *physical, int *fd) {
    if (physical->kept.fd >= 0 && !needs_kept(*physical) && !fd_is_ours(physical->kept))
        close_kept(&physical->kept); // the application has closed it; nobody else has that file yet
    const CUresult result = keep_physical_fd(physical);
    return result == CUDA_SUCCESS ? physical_fd(*physical, fd) : result;
}

CUresult import_physical(Physical *physical, int fd, bool same) {
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = spent::timed(spent::What::import_call, [&] {
        return WF_REAL(cuMemImportFromShareableHandle)(&handle, reinterpret_cast<void *>(static_cast<uintptr_t>(fd)),
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    });
    if (result != CUDA_SUCCESS) {
        finish_fd(fd, false);
        return result;
    }
    KeptFd kept;
    if (const int error = spent::timed(spent::What::descriptors, [&] { return keep_fd(fd, &kept); }); error != 0) {
        debug("the descriptor of returned memory cannot be kept (errno %d)", error);
        WF_REAL(cuMemRelease)(handle);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    physical->handle = handle;
    physical->present = true;
    physical->imported = true;
    physical->kept = kept;
    set_on_host(physical, same ? physical->was_on_host : physical->host_node < 0 && lies_on_host(handle));
    return CUDA_SUCCESS;
}

} // namespace woodfrog::interpose
