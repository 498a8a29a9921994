// cuPointerGetAttribute(s) for memory of cuMemAlloc: the answers that the driver gives for its own.
//
// What depends on the driver and the device (whether such memory can be used for legacy IPC, for RDMA …) is not known
// here but asked once of a real allocation of the driver's.
#include "capture.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

namespace woodfrog::interpose {
namespace {

// The attributes whose values are copied from an allocation of the driver's own.
constexpr CUpointer_attribute kCopied[] = {
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
#if CUDA_VERSION >= 12080
    CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE,
#endif
};
constexpr size_t kCopiedCount = std::size(kCopied);

// All attributes fit; cuda.h documents none larger than the two P2P tokens.
union Value {
    uint64_t words[4];
    unsigned char bytes[32];
};

struct Sample {
    bool known = false;
    CUresult results[kCopiedCount] = {};
    Value values[kCopiedCount] = {};
};

std::map<const Context *, Sample> &samples() { // guarded by memory().mutex
    static auto *const instance = new std::map<const Context *, Sample>;
    return *instance;
}

// How many bytes the attribute writes.
size_t size_of(CUpointer_attribute attribute) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
        return sizeof(CUDA_POINTER_ATTRIBUTE_P2P_TOKENS);
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        return sizeof(uint64_t);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        return sizeof(bool); // documented as boolean: an application may pass one byte
    default:
        return sizeof(unsigned);
    }
}

// Asks an allocation of the driver's. None can be made while a capture is active: then there is no sample yet.
void take_sample(const Context *context) {
    if (capture_active())
        return;
    Sample sample;
    CUdeviceptr address = 0;
    {
        CurrentScope current(context->handle);
        if (current.result() != CUDA_SUCCESS || WF_REAL(cuMemAlloc_v2)(&address, kSmallAlignment) != CUDA_SUCCESS)
            return;
        for (size_t i = 0; i < kCopiedCount; ++i)
            sample.results[i] = WF_REAL(cuPointerGetAttribute)(&sample.values[i], kCopied[i], address);
        WF_REAL(cuMemFree_v2)(address);
    }
    sample.known = true;
    std::lock_guard lock(memory().mutex);
    samples()[context] = sample;
}

template <typename T> CUresult answer(void *data, T value) {
    memcpy(data, &value, sizeof(value));
    return CUDA_SUCCESS;
}

struct Found {
    Allocation allocation;
    Context *owner;
    std::vector<CUdevice> readers;
};

std::optional<Found> find_allocation(CUdeviceptr address) {
    if (driver_only())
        return std::nullopt;
    std::lock_guard lock(memory().mutex);
    const Allocation *allocation = memory().find(address);
    if (allocation == nullptr)
        return std::nullopt;
    Context *owner = allocation->block->owner;
    return Found{*allocation, owner, reader_devices(*owner)};
}

unsigned access_flags(const Found &found) {
    CUdevice device = found.owner->device;
    if (WF_REAL(cuCtxGetDevice)(&device) != CUDA_SUCCESS || device == found.owner->device ||
        std::find(found.readers.begin(), found.readers.end(), device) != found.readers.end())
        return CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
    return CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE;
}

CUresult copied(void *data, CUpointer_attribute attribute, const Found &found) {
    const size_t index = static_cast<size_t>(std::find(kCopied, kCopied + kCopiedCount, attribute) - kCopied);
    for (int attempt = 0; attempt < 2; ++attempt) {
        {
            std::lock_guard lock(memory().mutex);
            if (const Sample &sample = samples()[found.owner]; sample.known) {
                if (sample.results[index] == CUDA_SUCCESS)
                    memcpy(data, &sample.values[index], size_of(attribute));
                return sample.results[index];
            }
        }
        take_sample(found.owner);
    }
    // Inside a capture, before any sample: what drivers answer for plain device memory.
    memset(data, 0, size_of(attribute));
    if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
        *static_cast<bool *>(data) = true;
    return CUDA_SUCCESS;
}

CUresult attribute_of(void *data, CUpointer_attribute attribute, CUdeviceptr address, const Found &found) {
    if (std::find(kCopied, kCopied + kCopiedCount, attribute) != kCopied + kCopiedCount)
        return copied(data, attribute, found);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return answer(data, found.owner->handle);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return answer(data, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return answer(data, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return CUDA_ERROR_INVALID_VALUE; // the host cannot reach it
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return answer(data, found.allocation.buffer_id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return answer(data, false);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return answer(data, static_cast<int>(found.owner->device));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return answer(data, found.allocation.address);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return answer(data, found.allocation.size_bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return answer(data, true);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return answer(data, access_flags(found));
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return answer(data, CUmemoryPool{nullptr});
    default: // tokens, SYNC_MEMOPS, the mapping that lies beneath: true of the memory as it is
        return WF_REAL(cuPointerGetAttribute)(data, attribute, address);
    }
}

// Memory of the application's own cuMemCreate: true as the driver tells it, but for the handle type that was added.
bool requested_types(CUdeviceptr address, uint64_t *types) {
    if (driver_only())
        return false;
    std::lock_guard lock(memory().mutex);
    const auto after = memory().virtual_mappings.upper_bound(address);
    if (after == memory().virtual_mappings.begin())
        return false;
    const VirtualMapping &mapping = std::prev(after)->second;
    *types = static_cast<uint64_t>(mapping.handle->properties.requestedHandleTypes);
    return address - mapping.address < mapping.size_bytes;
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuPointerGetAttribute, void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    GateScope scope(Symbol::cuPointerGetAttribute);
    const std::optional<Found> found = data == nullptr ? std::nullopt : find_allocation(ptr);
    if (found)
        return attribute_of(data, attribute, ptr, *found);
    const CUresult result = WF_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    uint64_t types = 0;
    if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES &&
        requested_types(ptr, &types))
        memcpy(data, &types, sizeof(types));
    return result;
}

WF_HOOK(cuPointerGetAttributes, unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
        CUdeviceptr ptr) {
    GateScope scope(Symbol::cuPointerGetAttributes);
    // The real one judges the arguments, and fills in whatever is not answered here.
    const CUresult result = WF_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (result != CUDA_SUCCESS)
        return result;
    const std::optional<Found> found = find_allocation(ptr);
    if (!found) {
        uint64_t types = 0;
        for (unsigned i = 0; i < numAttributes; ++i)
            if (attributes[i] == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES && requested_types(ptr, &types))
                memcpy(data[i], &types, sizeof(types));
        return result;
    }
    for (unsigned i = 0; i < numAttributes; ++i) {
        Value value{};
        if (attribute_of(&value, attributes[i], ptr, *found) == CUDA_SUCCESS)
            memcpy(data[i], &value, size_of(attributes[i]));
        else
            memset(data[i], 0, size_of(attributes[i])); // what has no value is answered with zero, not with an error
    }
    return CUDA_SUCCESS;
}
