// Shadow execution: what every launch, copy and fill may write is told on the CPU, beside the application, so that a
// checkpoint need not hash memory that nothing can have written (README.md, "Shadow execution").
//
// Off (no WOODFROG_TRACK=1) none of it exists: the table of real functions points at the driver. On, the table's
// entries of functions that can write memory, or that load code, point at functions of these files, which note what
// the call may write and then call the driver.
//
// The one property: what is reported clean cannot have been written. Whatever is not understood counts as a write of
// everything until the next checkpoint. shadow_note() and its kin are called by application threads inside the gate.
#pragma once

#include "driver.hpp"
#include "gate.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace woodfrog::interpose::shadow {

namespace detail {
extern std::atomic<bool> g_on;
extern std::atomic<void *> driver_functions[kSymbols];
} // namespace detail

// True once WOODFROG_TRACK=1 has put the table in place; false again in a forked child.
inline bool on() {
    return detail::g_on.load(std::memory_order_relaxed);
}

// The driver's own function, whatever stands in the table of real functions.
template <typename F> F *driver_function(Symbol symbol) {
    return reinterpret_cast<F *>(detail::driver_functions[static_cast<size_t>(symbol)].load(std::memory_order_relaxed));
}
#define WF_DRIVER(name)                                                                                                \
    (::woodfrog::interpose::shadow::driver_function<decltype(::name)>(::woodfrog::interpose::Symbol::name))

// Called by driver.cpp when the table of real functions has been filled, and for an entry point learnt later.
void install();
void install_one(Symbol symbol);
// The thread that evaluates; called once cuInit has succeeded.
void start();
void in_forked_child();

// Everything owned counts as written until the next checkpoint, or from now on for good. `why` is a text that lives as
// long as the process; `kernel` a name, or null.
void wrote_everything(const char *why, const char *kernel = nullptr);
void wrote_everything_for_good(const char *why);
// [address, address + size_bytes) may be written; any address, also of host memory.
void wrote(CUdeviceptr address, size_t size_bytes);

// An address of the application's own virtual memory has lost its mapping: what was written through it before cannot be
// told by its address any more. Called with memory().mutex not held.
void virtual_memory_unmapped();

// A function that no header of the build knows: what it does, and what it has made possible, cannot be followed.
void called_unknown_function();

// ── for the tables of the other files ──

struct Override {
    Symbol symbol;
    void *function;
};

// A function for the table: `record(arguments…)`, then the driver's function.
template <auto record, Symbol symbol, typename Function> struct Before;
template <auto record, Symbol symbol, typename... Arguments> struct Before<record, symbol, CUresult(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        if (on())
            record(arguments...);
        return driver_function<CUresult(Arguments...)>(symbol)(arguments...);
    }
};
// The same the other way round; `record(arguments…)` runs when the driver's function has succeeded.
template <auto record, Symbol symbol, typename Function> struct After;
template <auto record, Symbol symbol, typename... Arguments> struct After<record, symbol, CUresult(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        const CUresult result = driver_function<CUresult(Arguments...)>(symbol)(arguments...);
        if (result == CUDA_SUCCESS && on())
            record(arguments...);
        return result;
    }
};
// `Wrap` is Before, After or another template of their form.
#define WF_WRAPPED(Wrap, name, ...)                                                                                    \
    ::woodfrog::interpose::shadow::Override {                                                                          \
        ::woodfrog::interpose::Symbol::name,                                                                           \
            reinterpret_cast<void *>(                                                                                  \
                &Wrap<(__VA_ARGS__), ::woodfrog::interpose::Symbol::name, decltype(::name)>::call)                     \
    }
#define WF_BEFORE(name, record) WF_WRAPPED(::woodfrog::interpose::shadow::Before, name, record)
#define WF_AFTER(name, record) WF_WRAPPED(::woodfrog::interpose::shadow::After, name, record)

using Overrides = std::vector<Override>;
Overrides code_overrides();   // shadow_code.cpp
Overrides launch_overrides(); // shadow_launch.cpp
Overrides copy_overrides();   // shadow_copy.cpp
Overrides graph_overrides();  // shadow_graph.cpp

} // namespace woodfrog::interpose::shadow
