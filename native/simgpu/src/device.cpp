// See device.hpp.
#include "device.hpp"

#include <cctype>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "config.hpp"
#include "error.hpp"

namespace simgpu {
namespace {

std::string uuid_text(const CUuuid &uuid) {
    char text[64];
    const auto *b = reinterpret_cast<const unsigned char *>(uuid.bytes);
    std::snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                  b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return text;
}

// The physical device that is number `ordinal` before CUDA_VISIBLE_DEVICES; -1 when there is none.
int index_of_ordinal(int ordinal) {
    if (ordinal >= config().device_count)
        return -1;
    const bool backwards = config().last_is_fastest && !config().pci_order;
    return backwards ? config().device_count - 1 - ordinal : ordinal;
}

// One entry of CUDA_VISIBLE_DEVICES; -1 when it names nothing. A UUID may be shortened as long as it is unique.
int index_of_entry(const std::string &entry) {
    if (entry.rfind("GPU-", 0) == 0) {
        int found = -1;
        for (int index = 0; index < config().device_count; ++index) {
            if (uuid_text(uuid_of_index(index)).rfind(entry, 0) != 0)
                continue;
            if (found >= 0)
                return -1;
            found = index;
        }
        return found;
    }
    if (entry.empty())
        return -1;
    int index = 0;
    for (char c : entry) {
        if (!std::isdigit(static_cast<unsigned char>(c)) || index > 1000)
            return -1;
        index = index * 10 + (c - '0');
    }
    return index_of_ordinal(index);
}

const std::unordered_map<int, int> &attribute_table() {
    // What an H100 answers, scaled to kMultiprocessors, less what this driver does not do (textures and arrays,
    // managed memory beyond the minimum, clusters, RDMA, multicast).
    static const auto *table = new std::unordered_map<int, int>{
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kMaxThreadsPerBlock},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, kSharedPerBlock},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
        {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kMultiprocessors},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 64},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, kMaxThreadsPerMultiprocessor},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, kSharedPerMultiprocessor},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID, 0},
        {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, kSharedPerBlockOptin},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, kMaxBlocksPerMultiprocessor},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0},
        {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
        {CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, config().multicast ? 1 : 0},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    };
    return *table;
}

} // namespace

std::vector<Device> &devices() {
    static std::vector<Device> *list = new std::vector<Device>;
    return *list;
}

void initialise_devices() {
    auto &list = devices();
    if (!config().visible) {
        for (int ordinal = 0; ordinal < config().device_count; ++ordinal)
            list.push_back({index_of_ordinal(ordinal)});
        return;
    }
    // The first entry that names nothing, or a device named before, ends the list, as CUDA documents it.
    const std::string &text = *config().visible;
    for (size_t start = 0; start <= text.size();) {
        size_t comma = std::min(text.find(',', start), text.size());
        std::string entry = text.substr(start, comma - start);
        start = comma + 1;
        while (!entry.empty() && entry.front() == ' ')
            entry.erase(0, 1);
        while (!entry.empty() && entry.back() == ' ')
            entry.pop_back();
        const bool mig = entry.rfind("MIG-", 0) == 0; // MIG-GPU-UUID, of any instance
        int index = index_of_entry(mig ? entry.substr(4) : entry);
        if (index < 0 || device_with_index(index) >= 0)
            break;
        list.push_back({index, mig});
    }
}

int device_with_index(int index) {
    const auto &list = devices();
    for (size_t device = 0; device < list.size(); ++device) {
        if (list[device].index == index)
            return static_cast<int>(device);
    }
    return -1;
}

Device &device_at(CUdevice device) {
    require(device >= 0 && static_cast<size_t>(device) < devices().size(), CUDA_ERROR_INVALID_DEVICE);
    return devices()[static_cast<size_t>(device)];
}

CUuuid uuid_of_index(int index) {
    // Stable over processes and reboots, and different for machines of different names.
    unsigned hash = 2166136261u; // FNV-1a, 32 bit
    for (char c : config().machine)
        hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    hash = (hash ^ static_cast<unsigned>(index)) * 16777619u; // so that a shortened UUID can tell devices apart
    CUuuid uuid{};
    std::memcpy(uuid.bytes, "frogsimgpu", 10);
    std::memcpy(uuid.bytes + 10, &hash, 4);
    uuid.bytes[14] = static_cast<char>(index >> 8);
    uuid.bytes[15] = static_cast<char>(index);
    return uuid;
}

int index_of_uuid(const CUuuid &uuid) {
    for (int index = 0; index < config().device_count; ++index) {
        CUuuid candidate = uuid_of_index(index);
        if (std::memcmp(candidate.bytes, uuid.bytes, sizeof uuid.bytes) == 0)
            return index;
    }
    return -1;
}

std::string pci_bus_id(int index) {
    char text[32];
    std::snprintf(text, sizeof text, "0000:%02X:00.0", 0x10 + index);
    return text;
}

int device_attribute(int index, CUdevice_attribute attribute) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return 0x10 + index;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        return 0;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        return CU_MEM_HANDLE_TYPE_NONE;
    default:
        break;
    }
    auto it = attribute_table().find(attribute);
    if (it != attribute_table().end())
        return it->second;
    require(attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX);
    return 0; // known to CUDA, not a feature of this device
}

} // namespace simgpu
