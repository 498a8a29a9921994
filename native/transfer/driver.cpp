// Finds and initialises the driver; see driver.hpp.
#include "driver.hpp"

#include <cerrno>
#include <dlfcn.h>

namespace woodfrog::transfer {
namespace {

#define WF_STRING_OF(name) #name
#define WF_STRING(name) WF_STRING_OF(name) // after cuda.h's renaming

Driver load() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); // never closed: the driver cannot be unloaded
    if (!library) {
        const char *reason = dlerror();
        throw TransferError(-ENOENT, "dlopen", reason ? reason : "libcuda.so.1 cannot be loaded");
    }
    Driver table{};
#define WF_DRIVER_LOOK_UP(name) table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, WF_STRING(name)));
    WF_DRIVER_FUNCTIONS(WF_DRIVER_LOOK_UP)
    return table;
}

} // namespace

const Driver &driver_library() {
    static const Driver table = load(); // tried again next time if it throws
    return table;
}

const Driver &driver() {
    static const Driver *const table = [] {
        const Driver &found = driver_library();
        check(try_call("cuInit", found.cuInit, 0u), "cuInit");
        return &found;
    }();
    return *table;
}

void check(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS)
        return;
    const Driver &found = driver_library();
    const char *name = nullptr, *sentence = nullptr;
    if (found.cuGetErrorName)
        found.cuGetErrorName(result, &name);
    if (found.cuGetErrorString)
        found.cuGetErrorString(result, &sentence);
    throw TransferError(result, call,
                        std::string(sentence ? sentence : "unknown error") + " (" + (name ? name : "CUresult ") +
                            (name ? "" : std::to_string(result)) + ")");
}

void throw_missing(const char *call) {
    throw TransferError(CUDA_ERROR_NOT_FOUND, call,
                        "this driver has no such function; woodfrog needs driver 570 or newer");
}

} // namespace woodfrog::transfer
