// The arguments of launches, searched for pointers; see access.hpp.
#include "access.hpp"

#include "kernel_handles.hpp"
#include "memory.hpp"

#include <cstring>
#include <set>

namespace woodfrog::interpose {
namespace {

constinit std::atomic<bool> g_following{false};
bool g_in_table = false; // changed by the agent only

struct Access {                 // guarded by memory().mutex
    std::set<uint64_t> awaited; // ids of blocks that lay on host memory and have not been named
    std::vector<wire::Handle> named;
};

Access &access() {
    static Access *const instance = new Access;
    return *instance;
}

// With the lock held. Any bytes may be taken for an address: what is noted too much moves early, no more.
void look_up(CUdeviceptr address) {
    const auto after = memory().blocks.upper_bound(address);
    if (after == memory().blocks.begin())
        return;
    const Block &block = *std::prev(after)->second;
    if (address - block.address >= block.size_bytes || access().awaited.erase(block.physical.id) == 0)
        return;
    wire::Handle entry{};
    entry.handle = block.physical.id;
    entry.size = block.physical.size_bytes;
    entry.device = static_cast<uint32_t>(block.physical.device);
    entry.kind = static_cast<uint32_t>(block.slab != nullptr ? wire::Kind::slab : wire::Kind::allocation);
    access().named.push_back(entry);
}

// `offset_bytes`: of the bytes in the parameter block, in which pointers are aligned.
void look_through(const void *bytes, size_t size_bytes, size_t offset_bytes) {
    const size_t first = (8 - offset_bytes % 8) % 8;
    for (size_t at = first; at + sizeof(CUdeviceptr) <= size_bytes; at += sizeof(CUdeviceptr)) {
        CUdeviceptr address = 0;
        memcpy(&address, static_cast<const unsigned char *>(bytes) + at, sizeof(address));
        if (address != 0)
            look_up(address);
    }
}

CUresult parameter(CUfunction function, size_t index, size_t *offset_bytes, size_t *size_bytes) {
    if (is_kernel_handle(function))
        return WF_REAL(cuKernelGetParamInfo)(reinterpret_cast<CUkernel>(function), index, offset_bytes, size_bytes);
    return WF_REAL(cuFuncGetParamInfo)(function, index, offset_bytes, size_bytes);
}

// Layouts are not kept: a handle may be another function's after its module was unloaded.
void launched(CUfunction function, void **parameters, void **extra) {
    if (function == nullptr)
        return;
    if (extra != nullptr) {
        const void *buffer = nullptr;
        size_t size_bytes = 0;
        for (void **at = extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
            if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER)
                buffer = at[1];
            else if (*at == CU_LAUNCH_PARAM_BUFFER_SIZE)
                size_bytes = *static_cast<const size_t *>(at[1]);
            else
                return; // nothing that is known here
        }
        std::lock_guard lock(memory().mutex);
        if (buffer != nullptr)
            look_through(buffer, size_bytes, 0);
        return;
    }
    if (parameters == nullptr)
        return;
    size_t offset_bytes = 0, size_bytes = 0;
    for (size_t index = 0; parameter(function, index, &offset_bytes, &size_bytes) == CUDA_SUCCESS; ++index) {
        std::lock_guard lock(memory().mutex);
        look_through(parameters[index], size_bytes, offset_bytes);
        if (access().awaited.empty())
            g_following.store(false, std::memory_order_relaxed);
    }
}

constexpr auto kLaunch = [](CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream, void **parameters, void **extra) { launched(function, parameters, extra); };
constexpr auto kCooperative = [](CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, CUstream, void **parameters) { launched(function, parameters, nullptr); };
constexpr auto kLaunchEx = [](const CUlaunchConfig *, CUfunction function, void **parameters, void **extra) {
    launched(function, parameters, extra);
};

// A function for the table: notes what the launch names, then goes on to what was in the table before.
template <auto record, Symbol symbol, typename Function> struct Noted;
template <auto record, Symbol symbol, typename... Arguments> struct Noted<record, symbol, CUresult(Arguments...)> {
    using Function = CUresult(Arguments...);
    static inline std::atomic<void *> next{nullptr};
    static CUresult call(Arguments... arguments) {
        if (g_following.load(std::memory_order_relaxed))
            record(arguments...);
        return reinterpret_cast<Function *>(next.load(std::memory_order_relaxed))(arguments...);
    }
};

struct Row {
    Symbol symbol;
    void *ours;
    std::atomic<void *> *next;
};

template <auto record, Symbol symbol, typename Function> Row row() {
    using One = Noted<record, symbol, Function>;
    return {symbol, reinterpret_cast<void *>(&One::call), &One::next};
}

std::vector<Row> rows() {
#define WF_ROW(name, record) row<record, Symbol::name, decltype(::name)>()
    return {
        WF_ROW(cuLaunchKernel, kLaunch),
        WF_ROW(cuLaunchKernel_ptsz, kLaunch),
        WF_ROW(cuLaunchKernelEx, kLaunchEx),
        WF_ROW(cuLaunchKernelEx_ptsz, kLaunchEx),
        WF_ROW(cuLaunchCooperativeKernel, kCooperative),
        WF_ROW(cuLaunchCooperativeKernel_ptsz, kCooperative),
    };
#undef WF_ROW
}

std::atomic<void *> &entry_of(Symbol symbol) {
    return detail::real_functions[static_cast<size_t>(symbol)];
}

} // namespace

void follow_access() {
    {
        std::lock_guard lock(memory().mutex);
        access().awaited.clear();
        access().named.clear();
        for (const auto &[address, block] : memory().blocks)
            if (block->physical.on_host)
                access().awaited.insert(block->physical.id);
        if (access().awaited.empty())
            return;
    }
    if (!driver_has(Symbol::cuFuncGetParamInfo))
        return; // a driver before 12.4 does not tell how a kernel's parameters lie
    if (!g_in_table) {
        for (const Row &row : rows()) {
            if (!driver_has(row.symbol))
                continue;
            row.next->store(entry_of(row.symbol).load(std::memory_order_relaxed), std::memory_order_relaxed);
            entry_of(row.symbol).store(row.ours, std::memory_order_release);
        }
        g_in_table = true;
    }
    g_following.store(true, std::memory_order_release);
}

void leave_access(bool at_rest) {
    g_following.store(false, std::memory_order_release);
    if (at_rest)
        settle_access();
}

void settle_access() {
    if (!g_in_table || g_following.load(std::memory_order_acquire))
        return;
    for (const Row &row : rows())
        if (entry_of(row.symbol).load(std::memory_order_relaxed) == row.ours)
            entry_of(row.symbol).store(row.next->load(std::memory_order_relaxed), std::memory_order_release);
    g_in_table = false;
}

Outcome send_accessed(const SendNamed &send) {
    std::vector<wire::Handle> named;
    {
        std::lock_guard lock(memory().mutex);
        named = access().named;
    }
    for (size_t first = 0; first == 0 || first < named.size(); first += WF_MAX_ENTRIES) {
        const size_t end = std::min<size_t>(named.size(), first + WF_MAX_ENTRIES);
        if (!send({named.begin() + static_cast<ptrdiff_t>(first), named.begin() + static_cast<ptrdiff_t>(end)},
                  end == named.size()))
            return {wire::Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    }
    return {wire::Status::ok, CUDA_SUCCESS, named.size(), ""};
}

} // namespace woodfrog::interpose
