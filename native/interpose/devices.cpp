// Asking devices; see devices.hpp.
#include "devices.hpp"

#include "debug.hpp"

#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <mutex>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr int kMaxDevices = 64;
constexpr size_t kSmallestUsefulGranularity = size_t{4} << 10;

bool attribute(CUdevice_attribute which, CUdevice device) {
    int value = 0;
    return WF_REAL(cuDeviceGetAttribute)(&value, which, device) == CUDA_SUCCESS && value != 0;
}

bool left_to_driver() {
    const char *value = getenv("WOODFROG_DRIVER_ALLOC");
    return value != nullptr && strcmp(value, "1") == 0;
}

void ask(CUdevice device, DeviceFacts &facts) {
    if (WF_REAL(cuDeviceTotalMem_v2)(&facts.total_bytes, device) != CUDA_SUCCESS)
        facts.total_bytes = 0;
    facts.rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
    if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) ||
        !attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device)) {
        debug("device %d cannot export memory: its allocations stay with the driver", device);
        return;
    }
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.allocFlags.gpuDirectRDMACapable = facts.rdma ? 1 : 0;
    if (WF_REAL(cuMemGetAllocationGranularity)(&facts.granularity_bytes, &properties,
                                               CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
        facts.granularity_bytes < kSmallestUsefulGranularity)
        return;
    facts.owned = !left_to_driver();
}

DeviceFacts *all_facts() {
    static DeviceFacts *const all = new DeviceFacts[kMaxDevices];
    return all;
}

} // namespace

const DeviceFacts &device_facts(CUdevice device) {
    static const DeviceFacts unknown;
    static std::mutex *const mutex = new std::mutex;
    if (device < 0 || device >= kMaxDevices)
        return unknown;
    DeviceFacts &facts = all_facts()[device];
    if (facts.known.load(std::memory_order_acquire))
        return facts;
    std::lock_guard lock(*mutex);
    if (!facts.known.load(std::memory_order_relaxed)) {
        ask(device, facts);
        facts.known.store(true, std::memory_order_release);
    }
    return facts;
}

void device_has_no_rdma(CUdevice device) {
    all_facts()[device].rdma = false;
}

const char *device_that_writes() {
    static constexpr const char *kDevices[] = {"/dev/infiniband/", "/dev/gdrdrv", "/dev/nvidia-fs"};
    DIR *folder = opendir("/proc/self/fd");
    if (folder == nullptr)
        return "the descriptors of this process cannot be listed";
    const char *found = nullptr;
    while (const dirent *entry = readdir(folder)) {
        char target[256] = {};
        if (readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1) <= 0)
            continue;
        for (const char *device : kDevices)
            if (strncmp(target, device, strlen(device)) == 0)
                found = "a device other than the GPU may write its memory (RDMA or GPUDirect is open)";
    }
    closedir(folder);
    return found;
}

} // namespace woodfrog::interpose
