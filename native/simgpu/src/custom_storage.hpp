// Custom storage of CUDA 13.4, on the caller's side: the device memory of the target is mapped into this process, one
// range a device, until the caller says that it has copied it. cuda.h of CUDA 13.0 does not have the types; layouts are
// those of the documentation of CUDA 13.4 (CUcheckpointCustomStorageInfo, CUcheckpointCustomStoragePerDeviceData,
// CUcheckpointCheckpointArgs, CUcheckpointRestoreArgs).
#pragma once

#include <cstddef>

#include <cuda.h>

#include "checkpoint_service.hpp"

namespace simgpu {

struct CustomStorageDevice {
    CUdeviceptr address;
    size_t size_bytes;
    CUstream stream; // of the device's primary context; complete() waits for it
};

struct CustomStorageInfo {
    void *handle;
    CustomStorageDevice *devices;
    unsigned device_count;
};

// Where the caller wants to have the information; null for a checkpoint into the target's own memory, and always before
// CUDA 13.4, whose arguments have reserved bytes there. Throws CUDA_ERROR_INVALID_VALUE if those are not zero.
CustomStorageInfo **storage_of(const CUcheckpointCheckpointArgs *args);
CustomStorageInfo **storage_of(const CUcheckpointRestoreArgs *args);

// Makes the request and maps what the target lends. If that fails the target is as before.
CUresult lend(int pid, const CheckpointRequest &request, CustomStorageInfo **into);
// Waits for the streams, unmaps, and tells the target. The handle and the information are then gone.
CUresult complete(void *handle);

} // namespace simgpu

extern "C" CUresult CUDAAPI cuCheckpointOperationComplete(void *handle);
