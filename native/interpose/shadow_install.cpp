// Putting shadow execution in the way of the driver's functions, and the few notes that need no table.
//
// Every function of the driver is taken for one that may write anything, unless generate.py's list says that it cannot
// (writes.inc has the others) or one of the files here knows what it writes.
#include "debug.hpp"
#include "memory.hpp"
#include "shadow.hpp"
#include "shadow_dirty.hpp"
#include "shadow_records.hpp"

#include <cstdlib>
#include <cstring>

namespace woodfrog::interpose::shadow {

namespace detail {
constinit std::atomic<bool> g_on{false};
constinit std::atomic<void *> driver_functions[kSymbols] = {};
} // namespace detail

namespace {

template <Symbol symbol> struct Unknown {
    static constexpr auto record = [](auto...) { wrote_everything("a driver function", symbol_name(symbol)); };
};

// From these on somebody else can write the memory, at any time and unseen.
constexpr auto kDmaBuffer = [](auto...) { wrote_everything_for_good("memory is shared with another device's driver"); };
constexpr auto kMulticast = [](auto...) { wrote_everything_for_good("memory is in a multicast object"); };

Overrides sharing_overrides() {
    return {
        WF_BEFORE(cuMemGetHandleForAddressRange, kDmaBuffer),
        WF_BEFORE(cuMulticastBindMem, kMulticast),
        WF_BEFORE(cuMulticastBindAddr, kMulticast),
    };
}

struct Table {
    void *functions[kSymbols] = {};
    Table() {
#define WF_WRITES(name)                                                                                                \
    functions[static_cast<size_t>(Symbol::name)] = WF_BEFORE(name, Unknown<Symbol::name>::record).function;
#include "writes.inc"
#undef WF_WRITES
        for (const Overrides &some :
             {code_overrides(), launch_overrides(), copy_overrides(), graph_overrides(), sharing_overrides()})
            for (const Override &one : some)
                functions[static_cast<size_t>(one.symbol)] = one.function;
    }
};

const Table &table() {
    static const Table *const instance = new Table;
    return *instance;
}

bool wanted() {
    const char *value = getenv("WOODFROG_TRACK");
    return value != nullptr && strcmp(value, "1") == 0 && !driver_only();
}

} // namespace

void install() {
    if (!wanted())
        return;
    for (size_t i = 0; i < kSymbols; ++i)
        install_one(static_cast<Symbol>(i));
    detail::g_on.store(true, std::memory_order_release);
    debug("launches are followed");
}

void install_one(Symbol symbol) {
    if (!wanted())
        return;
    const size_t i = static_cast<size_t>(symbol);
    std::atomic<void *> &real = woodfrog::interpose::detail::real_functions[i];
    void *function = real.load(std::memory_order_relaxed);
    void *const ours = table().functions[i];
    if (function == ours && ours != nullptr)
        return; // another thread was here
    detail::driver_functions[i].store(function, std::memory_order_release);
    // What the driver lacks stays as it is: the application shall see that it is missing.
    if (ours != nullptr && driver_has(symbol))
        real.store(ours, std::memory_order_release);
}

void in_forked_child() {
    detail::g_on.store(false, std::memory_order_relaxed);
}

void wrote_everything(const char *why, const char *kernel) {
    if (!everything_marked())
        mark_everything(why, kernel);
}

void wrote_everything_for_good(const char *why) {
    if (on())
        mark_everything_for_good(why);
}

void wrote(CUdeviceptr address, size_t size_bytes) {
    if (size_bytes == 0 || everything_marked())
        return;
    const RangeRecord record{RecordKind::range, 0, address, size_bytes};
    submit(sizeof(record), [&](unsigned char *to) { memcpy(to, &record, sizeof(record)); });
}

void virtual_memory_unmapped() {
    if (!on())
        return;
    std::vector<std::pair<uint64_t, size_t>> handles;
    {
        std::lock_guard lock(memory().mutex);
        for (const auto &[number, handle] : memory().virtual_handles)
            handles.emplace_back(handle->physical.id, handle->physical.size_bytes);
    }
    for (const auto &[id, size_bytes] : handles)
        mark_whole(id, size_bytes);
}

void called_unknown_function() {
    wrote_everything_for_good("the application uses a driver function that this build does not know");
}

} // namespace woodfrog::interpose::shadow
