// cuGetProcAddress and cuGetExportTable.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string_view>

#include <cuda.h>

#include "config.hpp"
#include "entry.hpp"

namespace simgpu {
namespace {

struct Match {
    void *function = nullptr;
    bool known = false; // there is such a name, if for later versions only
};

Match find(std::string_view name, int version, bool per_thread) {
    const EntryPoint *end = kEntryPoints + kEntryPointCount;
    const EntryPoint *entry =
        std::lower_bound(kEntryPoints, end, name, [](const EntryPoint &e, std::string_view wanted) {
            return std::string_view(e.name) < wanted;
        });
    Match match;
    int best = -1;
    bool best_per_thread = false;
    for (; entry != end && name == entry->name; ++entry) {
        match.known = true;
        if (entry->since > version || (entry->per_thread && !per_thread))
            continue;
        // The newest form wins; a per-thread variant wins over the plain one of the same form.
        if (entry->since < best && !(entry->per_thread && !best_per_thread))
            continue;
        if (best_per_thread && !entry->per_thread)
            continue;
        best = std::max(best, entry->since);
        best_per_thread = entry->per_thread;
        match.function = entry->function;
    }
    return match;
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *status) {
    constexpr cuuint64_t kBoth = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (symbol == nullptr || function == nullptr || (flags & ~kBoth) != 0 || flags == kBoth) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = nullptr;
    if (version > config().driver_version)
        return CUDA_ERROR_INVALID_VALUE;
    Match match = find(symbol, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
    *function = match.function;
    if (status != nullptr) {
        *status = match.function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
                  : match.known             ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return CUDA_SUCCESS;
}

// The tables are private agreements between NVIDIA's own libraries. The runtime library (cudart 13.0, shared or static)
// wants several at its start; one of them serves to prove that the driver is NVIDIA's own, which this one is not and
// will not pretend to be.
CUresult CUDAAPI cuGetExportTable(const void **table, const CUuuid *id) {
    if (table == nullptr || id == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    *table = nullptr;
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) {
        std::fputs(
            "simulated GPU: this program uses the CUDA runtime library, which works with NVIDIA's own driver only. "
            "Programs that use the driver API, cuda-bindings or cuda-core run on the simulated GPU.\n",
            stderr);
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuProfilerStart() {
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuProfilerStop() {
    return CUDA_SUCCESS;
}

} // extern "C"
