// Copy-on-write: while a snapshot of this process drains, whatever is about to write memory of it waits until the
// daemon has captured that (README.md, "Copy-on-write"; the shared page: ../wire/guard.h).
//
// It is armed by the agent before the gate opens and disarmed once all is captured. Armed, entries of the table of real
// functions point at functions of these files, which wait and then call what stood there; not armed, they do not, and
// it costs nothing. What is missed here the daemon finds by its digests, so this must err to the side of waiting, never
// of hanging: when nothing is captured for kPatience, or the daemon is gone, the application goes on.
#pragma once

#include "launches.hpp"
#include "memory.hpp"
#include "quiesce.hpp"
#include "shadow_copy.hpp"
#include "wire.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace woodfrog::interpose::cow {

namespace detail {
extern std::atomic<bool> g_armed;
}

inline bool armed() {
    return detail::g_armed.load(std::memory_order_relaxed);
}

// ── for the agent ──

// Takes the page over (the descriptor is closed) and arms. The gate must be closed, and all memory here. Memory that is
// written past the driver's functions (by the processor, by other devices) is waited for before this returns.
Outcome arm(int page_fd, const std::vector<wire::Guarded> &handles);

struct Launched {
    std::string name;
    uint64_t count;
};
struct Report {
    uint64_t waits = 0;
    std::vector<Launched> kernels; // since it was armed, most often first
};
// Nothing is waited for any more. Without being armed: an empty report.
Report disarm();
void in_forked_child();

// ── what an application's call is about to do; called inside the gate, without memory().mutex ──

// Each of `words` may be an address of what is written: then all of the allocation is waited for.
void will_write(const std::vector<shadow::Span> &spans, std::vector<uint64_t> words);
void will_write_anything();
// Another process may write it from now on.
inline void will_be_shared() {
    if (armed())
        will_write_anything();
}

// ── cow_code.cpp: kernels ──

struct Kernel {
    std::string name;
    bool laid_out = false; // somebody says where its parameters lie
    struct Parameter {
        size_t offset_bytes, size_bytes;
    };
    std::vector<Parameter> parameters;
};
// What a launch names. May ask the driver; never null.
std::shared_ptr<const Kernel> kernel_of(CUfunction function);
// Adds whatever in the arguments may be an address. False: they cannot be told, or hold tensor maps that hide theirs.
bool add_words(const Kernel &kernel, const LaunchArguments &launch, std::vector<uint64_t> *words);
void count_launch(const Kernel &kernel);
std::vector<Launched> take_launches();

// ── cow_graph.cpp ──

void will_launch_graph(CUgraphExec executable);

// ── cow_table.cpp ──

// What has to be known before it is armed (which handle is a kernel's, what graphs write) is noted from the start, by
// functions that are called seldom: what is to stand in the table of real functions for the driver's `function`.
void *noting(Symbol symbol, void *function);
// An entry point has come into the table later. With table_mutex() held.
void install_one(Symbol symbol);
// Whether memory was ever given to somebody who writes it past the driver's functions.
bool memory_was_lent();
void memory_is_lent();
void put_in_place();
void take_away();

shadow::Overrides code_overrides();
shadow::Overrides graph_overrides();

// Behind what is noted from the start, and behind what is in place while armed.
void *driver_function(Symbol symbol);
void *next_function(Symbol symbol);

template <auto before, Symbol symbol, typename Function> struct Guarded;
template <auto before, Symbol symbol, typename... Arguments> struct Guarded<before, symbol, CUresult(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        if (armed())
            before(arguments...);
        return reinterpret_cast<CUresult (*)(Arguments...)>(next_function(symbol))(arguments...);
    }
};
// Always in place: `note(arguments…)` before the driver's function, or after its success.
template <auto note, Symbol symbol, typename Function> struct NotedBefore;
template <auto note, Symbol symbol, typename... Arguments> struct NotedBefore<note, symbol, CUresult(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        if (!driver_only()) // in a forked child a lock may be held for ever
            note(arguments...);
        return reinterpret_cast<CUresult (*)(Arguments...)>(driver_function(symbol))(arguments...);
    }
};
template <auto note, Symbol symbol, typename Function> struct NotedAfter;
template <auto note, Symbol symbol, typename... Arguments> struct NotedAfter<note, symbol, CUresult(Arguments...)> {
    static CUresult call(Arguments... arguments) {
        const CUresult result = reinterpret_cast<CUresult (*)(Arguments...)>(driver_function(symbol))(arguments...);
        if (result == CUDA_SUCCESS && !driver_only())
            note(arguments...);
        return result;
    }
};

} // namespace woodfrog::interpose::cow
