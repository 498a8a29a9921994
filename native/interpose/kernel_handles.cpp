// Kernels of libraries, noted where the application gets their handles: when code is loaded, never when it runs.
#include "kernel_handles.hpp"

#include "gate.hpp"

#include <map>
#include <mutex>
#include <unordered_map>

namespace woodfrog::interpose {
namespace {

struct Handles {
    std::mutex mutex;
    std::unordered_map<CUkernel, CUlibrary> kernels;
};

Handles &handles() {
    static Handles *const instance = new Handles;
    return *instance;
}

void remember(CUkernel kernel, CUlibrary library) {
    std::lock_guard lock(handles().mutex);
    handles().kernels[kernel] = library;
}

} // namespace

bool is_kernel_handle(CUfunction function) {
    std::lock_guard lock(handles().mutex);
    return handles().kernels.contains(reinterpret_cast<CUkernel>(function));
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuLibraryGetKernel, CUkernel *pKernel, CUlibrary library, const char *name) {
    GateScope scope(Symbol::cuLibraryGetKernel);
    const CUresult result = WF_REAL(cuLibraryGetKernel)(pKernel, library, name);
    if (result == CUDA_SUCCESS)
        remember(*pKernel, library);
    return result;
}

#if CUDA_VERSION >= 12040
WF_HOOK(cuLibraryEnumerateKernels, CUkernel *kernels, unsigned int numKernels, CUlibrary lib) {
    GateScope scope(Symbol::cuLibraryEnumerateKernels);
    const CUresult result = WF_REAL(cuLibraryEnumerateKernels)(kernels, numKernels, lib);
    if (result == CUDA_SUCCESS)
        for (unsigned i = 0; i < numKernels; ++i)
            if (kernels[i] != nullptr)
                remember(kernels[i], lib);
    return result;
}
#endif

WF_HOOK(cuLibraryUnload, CUlibrary library) {
    GateScope scope(Symbol::cuLibraryUnload);
    {
        std::lock_guard lock(handles().mutex); // first: afterwards the handles may be others'
        std::erase_if(handles().kernels, [&](const auto &entry) { return entry.second == library; });
    }
    return WF_REAL(cuLibraryUnload)(library);
}
