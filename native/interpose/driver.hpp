// The real driver as the interposer calls it: a table of its functions, filled when the application has loaded it, and
// the way back from a pointer of the real driver to our function for it.
//
// Nothing here may load libcuda into a process that does not use it, or decide by a name what a pointer is: a hook is
// chosen because the real resolver returned exactly the address of a function that we know.
#pragma once

// With this, cuda.h declares every version of every function under its exported name and renames none.
#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>
#if __has_include(<cudaProfiler.h>)
#include <cudaProfiler.h>
#endif

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#define WF_EXPORT extern "C" __attribute__((visibility("default")))
// A function of the driver that this library answers by hand; generate.py finds these and writes no wrapper for them.
#define WF_HOOK(name, ...) WF_EXPORT CUresult name(__VA_ARGS__)

namespace woodfrog::interpose {

enum class Symbol : uint16_t {
#define WF_SYMBOL(name) name,
#include "symbols.inc"
#undef WF_SYMBOL
    count
};
inline constexpr size_t kSymbols = static_cast<size_t>(Symbol::count);

namespace detail {
// Never null: before the driver is known, and for what the driver lacks, an entry is a function that answers
// CUDA_ERROR_NOT_FOUND whatever its arguments.
extern std::atomic<void *> real_functions[kSymbols];
} // namespace detail

template <typename F> F *real_function(Symbol symbol) {
    return reinterpret_cast<F *>(detail::real_functions[static_cast<size_t>(symbol)].load(std::memory_order_relaxed));
}
// The real driver's function of that exact exported name, to be called.
#define WF_REAL(name) (::woodfrog::interpose::real_function<decltype(::name)>(::woodfrog::interpose::Symbol::name))

// Held by whoever puts functions into the table once the driver is known. Never around a look-up of symbols.
std::mutex &table_mutex();

const char *symbol_name(Symbol symbol);
bool driver_has(Symbol symbol);

// True once the real driver is in the table. Looks for a libcuda that the process has loaded; never loads one.
bool ensure_driver();

// If `function` lies in a libcuda.so*, makes that library the real driver (the first one found stays).
void adopt_driver_of(void *function);

// What the application gets instead of `function`, a pointer that a resolver of the real driver returned: our function
// when it is one that we know, `function` itself otherwise. `name` is what was asked for.
void *hook_for(void *function, const char *name);

// Our exported function of that name, null when we have none.
void *our_function(const char *name);

// A look-up of `name` in the real driver itself; sets dlerror when it has none. Null when no driver is loaded.
void *real_function_named(const char *name);

} // namespace woodfrog::interpose
