// The devices of the simulated machine as this process sees them.
//
// `device` is the ordinal of the process (after CUDA_VISIBLE_DEVICES), `index` the number of the physical device. The
// two are tied by cuInit and retied only by a restore onto another device.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <cuda.h>

namespace simgpu {

struct Device {
    int index = 0;
    bool mig = false; // stands for a MIG instance on it, in its name at least
};

// All that are visible. Filled by initialise_devices() and stable in length afterwards.
std::vector<Device> &devices();
void initialise_devices();

// The ordinal of physical device `index` here, -1 when it is not visible.
int device_with_index(int index);
// Throws CUDA_ERROR_INVALID_DEVICE.
Device &device_at(CUdevice device);

CUuuid uuid_of_index(int index);
// The physical device with this UUID, -1 when the machine has none such.
int index_of_uuid(const CUuuid &uuid);
std::string pci_bus_id(int index);
// Throws CUDA_ERROR_INVALID_VALUE for an attribute that is not known.
int device_attribute(int index, CUdevice_attribute attribute);

inline constexpr int kMultiprocessors = 4;
inline constexpr int kMaxThreadsPerBlock = 1024;
inline constexpr int kMaxThreadsPerMultiprocessor = 2048;
inline constexpr int kMaxBlocksPerMultiprocessor = 32;
// Shared memory of a block: without and with the opt-in of cuFuncSetAttribute; values of compute capability 9.0.
inline constexpr int kSharedPerBlock = 48 << 10;
inline constexpr int kSharedPerBlockOptin = 227 << 10;
inline constexpr int kSharedPerMultiprocessor = 228 << 10;

} // namespace simgpu
