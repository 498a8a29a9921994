// Registered shared host memory around a checkpoint; see registered.hpp.
#include "registered.hpp"

#include "gate.hpp"
#include "memory.hpp"

#include <cinttypes>
#include <cstdio>

namespace woodfrog::interpose {
namespace {

struct Registration {
    size_t size_bytes = 0;
    unsigned flags = 0;
    CUcontext context = nullptr;
    bool away = false;
};

struct Registrations {
    std::mutex mutex;
    std::map<void *, Registration> shared; // by address
};

Registrations &registrations() {
    static Registrations *const instance = new Registrations;
    return *instance;
}

// Whether any of it lies in a mapping that is shared with other processes, or could be.
bool is_shared_mapping(const void *address, size_t size_bytes) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == nullptr)
        return true; // to be on the safe side: private memory can be registered again as well
    const auto begin = reinterpret_cast<uint64_t>(address), end = begin + size_bytes;
    bool shared = false;
    char line[512];
    bool whole = true; // the line's beginning: long paths come in pieces
    while (!shared && fgets(line, sizeof(line), maps) != nullptr) {
        uint64_t low = 0, high = 0;
        char permissions[8] = {};
        if (whole && sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &low, &high, permissions) == 3)
            shared = low < end && begin < high && permissions[3] == 's';
        whole = false;
        for (const char *at = line; *at != '\0'; ++at)
            whole = *at == '\n';
    }
    fclose(maps);
    return shared;
}

void remember(void *address, size_t size_bytes, unsigned flags) {
    CUcontext context = nullptr;
    if (driver_only() || (flags & CU_MEMHOSTREGISTER_IOMEMORY) != 0 || !is_shared_mapping(address, size_bytes) ||
        WF_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return;
    std::lock_guard lock(registrations().mutex);
    registrations().shared[address] = {size_bytes, flags, context, false};
}

Outcome failed(const char *call, CUresult result, const void *address, size_t size_bytes) {
    char text[160];
    snprintf(text, sizeof(text), "%s of the shared host memory at %p (%zu bytes) failed", call, address, size_bytes);
    return driver_failure(result, text, 0);
}

} // namespace

Outcome check_registered() {
    std::lock_guard lock(registrations().mutex);
    for (const auto &[address, one] : registrations().shared) {
        const CurrentScope current(one.context);
        CUdeviceptr device = 0;
        if (WF_REAL(cuMemHostGetDevicePointer_v2)(&device, address, 0) == CUDA_SUCCESS &&
            device != reinterpret_cast<CUdeviceptr>(address))
            return {wire::Status::unsupported, CUDA_SUCCESS, 0,
                    "shared host memory is registered at another address for the GPU than for the processor"};
    }
    return {};
}

Outcome unregister_shared(bool *changed) {
    std::lock_guard lock(registrations().mutex);
    for (auto entry = registrations().shared.begin(); entry != registrations().shared.end();) {
        Registration &one = entry->second;
        const CurrentScope current(one.context);
        const CUresult result = one.away ? CUDA_SUCCESS : WF_REAL(cuMemHostUnregister)(entry->first);
        if (result == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED || result == CUDA_ERROR_INVALID_CONTEXT ||
            result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
            entry = registrations().shared.erase(entry); // it went with its context
            continue;
        }
        if (result != CUDA_SUCCESS)
            return failed("cuMemHostUnregister", result, entry->first, one.size_bytes);
        one.away = *changed = true;
        ++entry;
    }
    return {};
}

Outcome register_again() {
    std::lock_guard lock(registrations().mutex);
    for (auto &[address, one] : registrations().shared) {
        if (!one.away)
            continue;
        const CurrentScope current(one.context);
        const CUresult result = WF_REAL(cuMemHostRegister_v2)(address, one.size_bytes, one.flags);
        if (result != CUDA_SUCCESS)
            return failed("cuMemHostRegister", result, address, one.size_bytes);
        one.away = false;
    }
    return {};
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuMemHostRegister_v2, void *p, size_t bytesize, unsigned int Flags) {
    GateScope scope(Symbol::cuMemHostRegister_v2);
    const CUresult result = WF_REAL(cuMemHostRegister_v2)(p, bytesize, Flags);
    if (result == CUDA_SUCCESS)
        remember(p, bytesize, Flags);
    return result;
}

WF_HOOK(cuMemHostRegister, void *p, size_t bytesize, unsigned int Flags) {
    GateScope scope(Symbol::cuMemHostRegister);
    const CUresult result = WF_REAL(cuMemHostRegister)(p, bytesize, Flags);
    if (result == CUDA_SUCCESS)
        remember(p, bytesize, Flags);
    return result;
}

WF_HOOK(cuMemHostUnregister, void *p) {
    GateScope scope(Symbol::cuMemHostUnregister);
    const CUresult result = WF_REAL(cuMemHostUnregister)(p);
    if (result == CUDA_SUCCESS && !driver_only()) {
        std::lock_guard lock(registrations().mutex);
        registrations().shared.erase(p);
    }
    return result;
}
