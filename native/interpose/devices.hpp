// What a device can do, asked once. It stays true when a restore puts another GPU behind the ordinal: the driver
// restores onto GPUs of the same chip only.
#pragma once

#include "driver.hpp"

namespace woodfrog::interpose {

struct DeviceFacts {
    std::atomic<bool> known{false};
    bool owned = false;            // virtual memory management and export by descriptor: we can own its memory
    std::atomic<bool> rdma{false}; // memory made by cuMemCreate can be used for GPUDirect RDMA
    size_t granularity_bytes = 0;  // minimum for cuMemCreate and cuMemMap; 2 MiB on today's GPUs
    size_t total_bytes = 0;
};

// Never fails: a device that cannot be asked is one that we do not own memory on. Ordinals from 64 on are not known
// (CUDA enumerates no more).
const DeviceFacts &device_facts(CUdevice device);
// Memory for GPUDirect RDMA was refused: it is not asked for again.
void device_has_no_rdma(CUdevice device);

// Why devices other than the GPU may write its memory by themselves: network cards and disks that were given access
// past the driver's API. Null when none is open here.
const char *device_that_writes();

} // namespace woodfrog::interpose
