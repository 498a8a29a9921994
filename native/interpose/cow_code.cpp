// Kernels behind the handles of launches: their names, where their parameters lie, and what in those may be an address.
//
// What a handle is, is asked once and kept until any code is unloaded: the driver may give a handle out again then.
#include "cow.hpp"

#include "capture.hpp"
#include "kernel_handles.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace woodfrog::interpose::cow {
namespace {

struct Code {
    std::mutex mutex;
    std::unordered_map<CUfunction, std::shared_ptr<const Kernel>> known;
    std::map<std::string, uint64_t> launches; // while armed
};

Code &code() {
    static Code *const instance = new Code;
    return *instance;
}

std::shared_ptr<const Kernel> ask(CUfunction function, bool of_library) {
    const RelaxedScope relaxed;
    auto kernel = std::make_shared<Kernel>();
    const char *name = nullptr;
    const CUkernel handle = reinterpret_cast<CUkernel>(function);
    const CUresult named =
        of_library ? WF_REAL(cuKernelGetName)(&name, handle) : WF_REAL(cuFuncGetName)(&name, function);
    kernel->name = named == CUDA_SUCCESS && name != nullptr ? name : "a kernel without a name";
    for (size_t index = 0;; ++index) {
        Kernel::Parameter place{};
        const CUresult result =
            of_library ? WF_REAL(cuKernelGetParamInfo)(handle, index, &place.offset_bytes, &place.size_bytes)
                       : WF_REAL(cuFuncGetParamInfo)(function, index, &place.offset_bytes, &place.size_bytes);
        if (result == CUDA_ERROR_INVALID_VALUE) { // that was the last one
            kernel->laid_out = true;
            return kernel;
        }
        if (result != CUDA_SUCCESS)
            return kernel;
        kernel->parameters.push_back(place);
    }
}

#if CUDA_VERSION >= 12000
// A tensor map (TMA) stands in a kernel's arguments by value, and what the kernel writes through it no pointer tells.
// In the maps of the drivers that are known the address stands as it is, so that it is found like any other. Of what
// the driver encodes that is looked at each time: where it does not, a kernel that may have a map may write anything.
constinit std::atomic<bool> g_maps_hide{false};

constexpr auto kReplaced = [](CUtensorMap *map, void *address) {
    const auto wanted = reinterpret_cast<uint64_t>(address);
    for (size_t at = 0; at + sizeof(uint64_t) <= sizeof(CUtensorMap); at += 4) {
        uint64_t word = 0;
        memcpy(&word, reinterpret_cast<const char *>(map) + at, sizeof(word));
        if (word == wanted)
            return;
    }
    g_maps_hide.store(true, std::memory_order_relaxed);
};
constexpr auto kEncoded = [](CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *address, auto...) {
    kReplaced(map, address);
};

bool hides_map(size_t size_bytes) {
    return size_bytes >= sizeof(CUtensorMap) && g_maps_hide.load(std::memory_order_relaxed);
}
#else
bool hides_map(size_t) {
    return false;
}
#endif

// What may be an address: no smaller one is device memory, and no address has more bits.
bool may_be_address(uint64_t word) {
    return word >= uint64_t{1} << 20 && word < uint64_t{1} << 57;
}

// Addresses in structures are aligned to 8 bytes of their own; packed ones to less.
void add_words_in(const void *from, size_t size_bytes, std::vector<uint64_t> *words) {
    const char *bytes = static_cast<const char *>(from);
    for (size_t at = 0; at + sizeof(uint64_t) <= size_bytes; at += 4) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, sizeof(word));
        if (may_be_address(word))
            words->push_back(word);
    }
}

constexpr auto kCodeLeaves = [](auto...) {
    std::lock_guard lock(code().mutex);
    code().known.clear();
};

} // namespace

std::shared_ptr<const Kernel> kernel_of(CUfunction function) {
    {
        std::lock_guard lock(code().mutex);
        if (const auto found = code().known.find(function); found != code().known.end())
            return found->second;
    }
    std::shared_ptr<const Kernel> kernel = ask(function, is_kernel_handle(function));
    std::lock_guard lock(code().mutex);
    code().known[function] = kernel;
    return kernel;
}

bool add_words(const Kernel &kernel, const LaunchArguments &launch, std::vector<uint64_t> *words) {
    if (launch.in_one_buffer()) {
        const void *buffer = nullptr;
        size_t size_bytes = 0;
        bool sized = false;
        for (void **at = launch.extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
            if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER) {
                buffer = at[1];
            } else if (*at == CU_LAUNCH_PARAM_BUFFER_SIZE) {
                size_bytes = *static_cast<const size_t *>(at[1]);
                sized = true;
            } else {
                return false; // nothing that is known here
            }
        }
        if (!sized || (buffer == nullptr && size_bytes != 0) || hides_map(size_bytes))
            return false;
        add_words_in(buffer, size_bytes, words);
        return true;
    }
    if (!kernel.laid_out)
        return false;
    if (kernel.parameters.empty())
        return true;
    if (launch.parameters == nullptr)
        return false;
    for (const Kernel::Parameter &parameter : kernel.parameters)
        if (hides_map(parameter.size_bytes))
            return false;
    for (size_t i = 0; i < kernel.parameters.size(); ++i)
        if (launch.parameters[i] != nullptr)
            add_words_in(launch.parameters[i], kernel.parameters[i].size_bytes, words);
    return true;
}

void count_launch(const Kernel &kernel) {
    std::lock_guard lock(code().mutex);
    ++code().launches[kernel.name];
}

std::vector<Launched> take_launches() {
    std::map<std::string, uint64_t> taken;
    {
        std::lock_guard lock(code().mutex);
        taken.swap(code().launches);
    }
    std::vector<Launched> all;
    for (const auto &[name, count] : taken)
        all.push_back({name, count});
    std::stable_sort(all.begin(), all.end(),
                     [](const Launched &one, const Launched &other) { return one.count > other.count; });
    return all;
}

shadow::Overrides code_overrides() {
    return {
#if CUDA_VERSION >= 12000
        WF_WRAPPED(NotedAfter, cuTensorMapEncodeTiled, kEncoded),
        WF_WRAPPED(NotedAfter, cuTensorMapEncodeIm2col, kEncoded),
        WF_WRAPPED(NotedAfter, cuTensorMapReplaceAddress, kReplaced),
#endif
#if CUDA_VERSION >= 12080
        WF_WRAPPED(NotedAfter, cuTensorMapEncodeIm2colWide, kEncoded),
#endif
        WF_WRAPPED(NotedBefore, cuLibraryUnload, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuModuleUnload, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuCtxDestroy, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuCtxDestroy_v2, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuDevicePrimaryCtxReset, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuDevicePrimaryCtxReset_v2, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuDevicePrimaryCtxRelease, kCodeLeaves),
        WF_WRAPPED(NotedBefore, cuDevicePrimaryCtxRelease_v2, kCodeLeaves),
    };
}

} // namespace woodfrog::interpose::cow
