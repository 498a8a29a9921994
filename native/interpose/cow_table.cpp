// Putting copy-on-write in the way of the driver's functions.
//
// Every function of the driver is taken for one that may write anything, unless generate.py's list says that it cannot
// (writes.inc has the others), one of the files here knows what it writes, or it is noted from the start.
#include "copy_writes.hpp"
#include "cow.hpp"

#include <mutex>

namespace woodfrog::interpose::cow {
namespace {

constinit std::atomic<void *> g_driver[kSymbols] = {}; // behind what is noted from the start
constinit std::atomic<void *> g_next[kSymbols] = {};   // behind what is in place while armed
constinit std::atomic<bool> g_lent{false};

constexpr auto kAnything = [](auto...) { will_write_anything(); };
constexpr auto kLent = [](auto...) { memory_is_lent(); };
constexpr auto kGraphLaunch = [](CUgraphExec executable, CUstream) { will_launch_graph(executable); };

struct Sink {
    static void range(CUdeviceptr address, size_t size_bytes) { will_write({{address, size_bytes}}, {}); }
    static void impossible() { will_write_anything(); }
    static void launched(const LaunchArguments &launch) {
        const std::shared_ptr<const Kernel> kernel = kernel_of(launch.function);
        count_launch(*kernel);
        std::vector<uint64_t> words;
        if (!add_words(*kernel, launch, &words))
            return will_write_anything();
        will_write({}, std::move(words));
    }
};

// Calls after which somebody else can write the memory, at any time and unseen, now or while a snapshot drains.
shadow::Overrides lending_overrides() {
    return {
        WF_WRAPPED(NotedAfter, cuMemGetHandleForAddressRange, kLent),
        WF_WRAPPED(NotedAfter, cuMulticastBindMem, kLent),
        WF_WRAPPED(NotedAfter, cuMulticastBindAddr, kLent),
    };
}

struct Table {
    void *always[kSymbols] = {};
    void *armed[kSymbols] = {};
    Table() {
        for (const shadow::Overrides &some : {code_overrides(), graph_overrides()})
            for (const shadow::Override &one : some)
                always[static_cast<size_t>(one.symbol)] = one.function;
#define WF_WRITES(name) set(Symbol::name, WF_WRAPPED(Guarded, name, kAnything).function);
#include "writes.inc"
#undef WF_WRITES
        // Sparse arrays: what is written through them is not seen.
        set(Symbol::cuMemMapArrayAsync, WF_WRAPPED(Guarded, cuMemMapArrayAsync, kAnything).function);
        set(Symbol::cuMemMapArrayAsync_ptsz, WF_WRAPPED(Guarded, cuMemMapArrayAsync_ptsz, kAnything).function);
        const shadow::Overrides graph_launches{
            WF_WRAPPED(Guarded, cuGraphLaunch, kGraphLaunch),
            WF_WRAPPED(Guarded, cuGraphLaunch_ptsz, kGraphLaunch),
        };
        for (const shadow::Overrides &some :
             {launch_table<Sink, Guarded>(), copy_table<Sink, Guarded>(), graph_launches})
            for (const shadow::Override &one : some)
                set(one.symbol, one.function);
        for (const shadow::Override &one : lending_overrides()) {
            always[static_cast<size_t>(one.symbol)] = one.function;
            armed[static_cast<size_t>(one.symbol)] = nullptr;
        }
    }
    // What is noted from the start writes nothing itself.
    void set(Symbol symbol, void *function) {
        if (always[static_cast<size_t>(symbol)] == nullptr)
            armed[static_cast<size_t>(symbol)] = function;
    }
};

const Table &table() {
    static const Table *const instance = new Table;
    return *instance;
}

// With table_mutex() held.
void put(Symbol symbol) {
    const size_t i = static_cast<size_t>(symbol);
    void *const ours = table().armed[i];
    std::atomic<void *> &real = woodfrog::interpose::detail::real_functions[i];
    void *function = real.load(std::memory_order_relaxed);
    // What the driver lacks stays as it is: the application shall see that it is missing.
    if (ours == nullptr || function == ours || !driver_has(symbol))
        return;
    g_next[i].store(function, std::memory_order_release);
    real.store(ours, std::memory_order_release);
}

} // namespace

void *driver_function(Symbol symbol) {
    return g_driver[static_cast<size_t>(symbol)].load(std::memory_order_acquire);
}

void *next_function(Symbol symbol) {
    return g_next[static_cast<size_t>(symbol)].load(std::memory_order_acquire);
}

bool memory_was_lent() {
    return g_lent.load(std::memory_order_acquire);
}

void memory_is_lent() {
    g_lent.store(true, std::memory_order_release);
    will_be_shared();
}

void *noting(Symbol symbol, void *function) {
    const size_t i = static_cast<size_t>(symbol);
    if (table().always[i] == nullptr)
        return function;
    g_driver[i].store(function, std::memory_order_release);
    return table().always[i];
}

void install_one(Symbol symbol) {
    if (armed())
        put(symbol);
}

void put_in_place() {
    std::lock_guard lock(table_mutex());
    for (size_t i = 0; i < kSymbols; ++i)
        put(static_cast<Symbol>(i));
}

void take_away() {
    std::lock_guard lock(table_mutex());
    for (size_t i = 0; i < kSymbols; ++i) {
        void *ours = table().armed[i];
        if (ours != nullptr) // a thread that has read it already goes through it still, and through next_function
            woodfrog::interpose::detail::real_functions[i].compare_exchange_strong(
                ours, g_next[i].load(std::memory_order_acquire), std::memory_order_acq_rel);
    }
}

} // namespace woodfrog::interpose::cow
