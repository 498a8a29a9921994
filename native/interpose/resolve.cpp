// The ways by which an application comes to a function of the driver, other than linking with it: dlsym and dlvsym,
// and cuGetProcAddress, also when that was itself obtained from a resolver.
//
// A look-up that is not for a driver function must reach the C library as if we were not there: RTLD_NEXT and
// RTLD_DEFAULT mean "seen from the caller", which is read from the return address, so those calls are jumps
// (CMakeLists.txt compiles this file with -O2 and without sanitizers; a test asks from a library that would notice).
#include "resolve.hpp"

#include "driver.hpp"
#include "elf_lookup.hpp"
#include "gate.hpp"

#include <dlfcn.h>

namespace woodfrog::interpose {
namespace {

#ifndef WOODFROG_SANITIZED
using Dlsym = void *(void *, const char *);
using Dlvsym = void *(void *, const char *, const char *);

constinit std::atomic<Dlsym *> g_dlsym{nullptr};
constinit std::atomic<Dlvsym *> g_dlvsym{nullptr};

#if defined(__x86_64__)
constexpr char kGlibcBase[] = "GLIBC_2.2.5";
#else
constexpr char kGlibcBase[] = "GLIBC_2.17";
#endif

// The next definition after ours in the load order, so that another preloaded tool keeps its turn.
__attribute__((noinline)) void find_real_functions() {
    void *base = elf_lookup("libc.so.6", "dlvsym");
    if (base == nullptr)
        base = elf_lookup("libdl.so.2", "dlvsym"); // glibc before 2.34
    Dlvsym *const dlvsym_of_libc = reinterpret_cast<Dlvsym *>(base);
    if (dlvsym_of_libc == nullptr)
        __builtin_trap(); // not glibc: nothing in this process could be looked up any more
    void *next_dlvsym = dlvsym_of_libc(RTLD_NEXT, "dlvsym", "GLIBC_2.34");
    if (next_dlvsym == nullptr)
        next_dlvsym = dlvsym_of_libc(RTLD_NEXT, "dlvsym", kGlibcBase);
    void *next_dlsym = dlvsym_of_libc(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (next_dlsym == nullptr)
        next_dlsym = dlvsym_of_libc(RTLD_NEXT, "dlsym", kGlibcBase);
    if (next_dlsym == nullptr)
        __builtin_trap();
    g_dlvsym.store(next_dlvsym == nullptr ? dlvsym_of_libc : reinterpret_cast<Dlvsym *>(next_dlvsym),
                   std::memory_order_release);
    g_dlsym.store(reinterpret_cast<Dlsym *>(next_dlsym), std::memory_order_release);
}

inline bool is_driver_name(const char *name) {
    return name != nullptr && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
}

// A driver name looked up in all libraries of the process. Our own definition comes first there, so the answer only
// depends on whether a driver is loaded and has the function.
void *driver_function_in_default_scope(const char *name, bool *decided) {
    void *ours = our_function(name);
    *decided = ours != nullptr;
    if (ours == nullptr)
        return nullptr;
    if (!ensure_driver())
        return nullptr;
    // Through a real look-up in the driver, so that dlerror speaks when there is no such function.
    return real_function_named(name) == nullptr ? nullptr : ours;
}

__attribute__((noinline)) void *driver_function(const char *name, void *found) {
    if (found == nullptr)
        return nullptr;
    adopt_driver_of(found);
    if (our_function(name) == found) { // dlopen(NULL): ours is in front; there must be a driver behind it
        bool decided = false;
        return driver_function_in_default_scope(name, &decided);
    }
    return hook_for(found, name);
}
#endif

} // namespace

#ifdef WOODFROG_SANITIZED
// A sanitizer's runtime looks its own functions up before anything can run: it keeps the C library's dlsym, and the
// programs tested with it are linked with the driver.
void *real_dlsym(void *handle, const char *name) {
    return ::dlsym(handle, name);
}
#else
void *real_dlsym(void *handle, const char *name) {
    if (g_dlsym.load(std::memory_order_acquire) == nullptr)
        find_real_functions();
    return g_dlsym.load(std::memory_order_acquire)(handle, name);
}
#endif

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

#ifndef WOODFROG_SANITIZED
WF_EXPORT void *dlsym(void *handle, const char *name) {
    if (g_dlsym.load(std::memory_order_acquire) == nullptr) [[unlikely]]
        find_real_functions();
    Dlsym *const real = g_dlsym.load(std::memory_order_relaxed);
    // RTLD_NEXT: a caller before us in the load order is meant to find us, one after us is meant to find the driver.
    if (!is_driver_name(name) || handle == RTLD_NEXT) [[likely]]
        return real(handle, name);
    if (handle == RTLD_DEFAULT) {
        bool decided = false;
        void *function = driver_function_in_default_scope(name, &decided);
        return decided ? function : real(handle, name);
    }
    return driver_function(name, real(handle, name));
}

WF_EXPORT void *dlvsym(void *handle, const char *name, const char *version) {
    if (g_dlsym.load(std::memory_order_acquire) == nullptr) [[unlikely]]
        find_real_functions();
    Dlvsym *const real = g_dlvsym.load(std::memory_order_relaxed);
    if (!is_driver_name(name) || handle == RTLD_NEXT || handle == RTLD_DEFAULT) [[likely]]
        return real(handle, name, version);
    return driver_function(name, real(handle, name, version));
}
#endif

WF_HOOK(cuGetProcAddress_v2, const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
        CUdriverProcAddressQueryResult *symbolStatus) {
    ensure_driver();
    const CUresult result = WF_REAL(cuGetProcAddress_v2)(symbol, pfn, cudaVersion, flags, symbolStatus);
    // NULL with success is legal: a probe with an empty name, or a function that this version does not have.
    if (result == CUDA_SUCCESS && pfn != nullptr && *pfn != nullptr)
        *pfn = hook_for(*pfn, symbol);
    return result;
}

WF_HOOK(cuGetProcAddress, const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
    ensure_driver();
    const CUresult result = WF_REAL(cuGetProcAddress)(symbol, pfn, cudaVersion, flags);
    if (result == CUDA_SUCCESS && pfn != nullptr && *pfn != nullptr)
        *pfn = hook_for(*pfn, symbol);
    return result;
}
