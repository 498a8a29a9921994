// Finding the real driver and matching its pointers; see driver.hpp.
//
// No lock is held here: dlsym may run inside a constructor under the loader's lock, and a lock of ours around another
// dlsym would then be taken in the opposite order. All stores are idempotent instead: threads that fill the tables at
// the same time store the same values.
#include "driver.hpp"

#include "cow.hpp"
#include "debug.hpp"
#include "gate.hpp"
#include "resolve.hpp"
#include "shadow.hpp"
#include "unknown.hpp"

#include <cudaTypedefs.h>

#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <type_traits>

namespace woodfrog::interpose {
// What a driver without a function answers in its place. By a second name it is an object, whose address, unlike a
// function's as a void *, is a constant expression.
extern "C" __attribute__((visibility("hidden"))) CUresult woodfrog_missing_function() {
    return CUDA_ERROR_NOT_FOUND;
}
extern "C" __attribute__((visibility("hidden"))) char missing_code __asm__("woodfrog_missing_function");

namespace {

struct Entry {
    const char *name;
    void *ours;
};

const Entry kEntries[] = {
#define WF_SYMBOL(name) {#name, reinterpret_cast<void *>(&::name)},
#include "symbols.inc"
#undef WF_SYMBOL
};

// A version of a name and the exported function it is, as cudaTypedefs.h and cuda.h declare them with the same type.
struct Version {
    const char *name;
    int version;
    bool per_thread;
    Symbol symbol;
};

template <typename Pointer, typename Function> constexpr Symbol when_same_type(Symbol symbol) {
    return std::is_same_v<Pointer, Function> ? symbol : Symbol::count;
}

const Version kVersions[] = {
#define WF_VERSION(name, version, per_thread, type, symbol)                                                            \
    {name, version, per_thread != 0, when_same_type<type, decltype(&::symbol)>(Symbol::symbol)},
#include "versions.inc"
#undef WF_VERSION
};

// Pointers of the real driver → Symbol, open addressing. Only ever added to; a power of two with room for every symbol
// in two forms.
constexpr size_t kSlots = 4096;
static_assert(kSlots > 4 * kSymbols);
struct Slot {
    std::atomic<void *> pointer;
    std::atomic<uint32_t> symbol; // + 1; 0 while being written
};
constinit Slot g_slots[kSlots] = {};
constinit std::atomic<bool> g_ready{false};
constinit std::atomic<void *> g_library{nullptr};

size_t slot_of(const void *pointer) {
    // Fibonacci hashing: functions lie at multiples of 16, so the low bits alone would collide.
    return static_cast<size_t>((reinterpret_cast<uint64_t>(pointer) * 0x9e3779b97f4a7c15ULL) >> 52) % kSlots;
}

void remember(void *pointer, Symbol symbol) {
    for (size_t i = slot_of(pointer), tried = 0; tried < kSlots; i = (i + 1) % kSlots, ++tried) {
        void *expected = nullptr;
        if (g_slots[i].pointer.compare_exchange_strong(expected, pointer, std::memory_order_acq_rel) ||
            expected == pointer) {
            uint32_t empty = 0; // two names of one function: the first stays
            g_slots[i].symbol.compare_exchange_strong(empty, static_cast<uint32_t>(symbol) + 1,
                                                      std::memory_order_acq_rel);
            return;
        }
    }
}

Symbol recall(const void *pointer) {
    for (size_t i = slot_of(pointer), tried = 0; tried < kSlots; i = (i + 1) % kSlots, ++tried) {
        const void *there = g_slots[i].pointer.load(std::memory_order_acquire);
        if (there == nullptr)
            return Symbol::count;
        if (there == pointer) {
            const uint32_t symbol = g_slots[i].symbol.load(std::memory_order_acquire);
            return symbol == 0 ? Symbol::count : static_cast<Symbol>(symbol - 1);
        }
    }
    return Symbol::count;
}

bool is_libcuda(const char *path) {
    if (path == nullptr)
        return false;
    const char *slash = strrchr(path, '/');
    const char *base = slash == nullptr ? path : slash + 1;
    static constexpr char kName[] = "libcuda.so"; // libcuda.so.1 and libcuda.so.580.159.04, not libcudart.so
    return strncmp(base, kName, sizeof(kName) - 1) == 0 &&
           (base[sizeof(kName) - 1] == '\0' || base[sizeof(kName) - 1] == '.');
}

void adopt(const char *path) {
    if (g_ready.load(std::memory_order_acquire))
        return;
    // The reference that this takes keeps the driver in memory when the application calls dlclose: our table points
    // into it.
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr)
        return;
    void *none = nullptr;
    if (!g_library.compare_exchange_strong(none, library) && none != library) {
        dlclose(library); // another libcuda was first
        return;
    }
    for (size_t i = 0; i < kSymbols; ++i) {
        void *function = real_dlsym(library, kEntries[i].name);
        if (function == nullptr || function == kEntries[i].ours)
            continue;
        const Symbol symbol = static_cast<Symbol>(i);
        detail::real_functions[i].store(cow::noting(symbol, function), std::memory_order_relaxed);
        remember(function, symbol);
    }
    shadow::install();
    g_ready.store(true, std::memory_order_release);
    gate_prepare();
    debug("the driver is %s", path);
}

int visit_library(dl_phdr_info *info, size_t, void *found) {
    if (!is_libcuda(info->dlpi_name))
        return 0;
    *static_cast<const char **>(found) = info->dlpi_name;
    return 1;
}

// cuGetProcAddress may return entry points that are not exported. They are recognised by asking the real one for every
// version of the name that we know.
void learn_versions(const char *name) {
    if (!driver_has(Symbol::cuGetProcAddress_v2))
        return;
    for (const Version &version : kVersions) {
        if (version.symbol == Symbol::count || strcmp(version.name, name) != 0)
            continue;
        void *function = nullptr;
        CUdriverProcAddressQueryResult status{};
        const cuuint64_t flags =
            version.per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
        const CUresult result = WF_REAL(cuGetProcAddress_v2)(name, &function, version.version, flags, &status);
        if (result != CUDA_SUCCESS || function == nullptr || recall(function) != Symbol::count)
            continue;
        if (!driver_has(version.symbol)) {
            std::lock_guard lock(table_mutex());
            detail::real_functions[static_cast<size_t>(version.symbol)].store(cow::noting(version.symbol, function),
                                                                              std::memory_order_relaxed);
            shadow::install_one(version.symbol);
            cow::install_one(version.symbol);
        }
        remember(function, version.symbol);
    }
}

} // namespace

namespace detail {
// Constant-initialised: the application may call a wrapper before any constructor of ours has run, and one that ran
// then would empty the table again.
#define WF_SYMBOL(name) {&missing_code},
constinit std::atomic<void *> real_functions[kSymbols] = {
#include "symbols.inc"
};
#undef WF_SYMBOL
} // namespace detail

std::mutex &table_mutex() {
    static std::mutex *const instance = new std::mutex;
    return *instance;
}

const char *symbol_name(Symbol symbol) {
    return symbol < Symbol::count ? kEntries[static_cast<size_t>(symbol)].name : "an unknown function";
}

bool driver_has(Symbol symbol) {
    return detail::real_functions[static_cast<size_t>(symbol)].load(std::memory_order_relaxed) != &missing_code;
}

bool ensure_driver() {
    if (g_ready.load(std::memory_order_acquire))
        return true;
    const char *path = nullptr;
    dl_iterate_phdr(&visit_library, &path);
    if (path != nullptr)
        adopt(path);
    return g_ready.load(std::memory_order_acquire);
}

void adopt_driver_of(void *function) {
    if (g_ready.load(std::memory_order_acquire))
        return;
    Dl_info info{};
    if (dladdr(function, &info) != 0 && is_libcuda(info.dli_fname))
        adopt(info.dli_fname);
}

void *hook_for(void *function, const char *name) {
    if (function == nullptr)
        return nullptr;
    Symbol symbol = recall(function);
    if (symbol == Symbol::count) {
        Dl_info info{};
        if (name == nullptr || dladdr(function, &info) == 0 || !is_libcuda(info.dli_fname))
            return function; // ours already, or a library that merely has a function of this name
        learn_versions(name);
        symbol = recall(function);
    }
    if (symbol == Symbol::count) {
        debug("%s is newer than this build: its calls are gated without being understood", name);
        return gate_unknown(function);
    }
    return kEntries[static_cast<size_t>(symbol)].ours;
}

void *real_function_named(const char *name) {
    void *library = g_library.load(std::memory_order_acquire);
    return library == nullptr ? nullptr : real_dlsym(library, name);
}

void *our_function(const char *name) {
    size_t low = 0, high = kSymbols; // symbols.inc is sorted by name
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const int order = strcmp(kEntries[middle].name, name);
        if (order == 0)
            return kEntries[middle].ours;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return nullptr;
}

} // namespace woodfrog::interpose
