// The thread that turns records into dirty ranges, and what the agent does in its place when the process is at rest.
//
// It makes no driver call and holds no descriptor; it sleeps until the ring is an eighth full. Whoever evaluates holds
// g_evaluation. Launches that were evaluated since the last report and are made again, byte for byte, mark nothing new
// and are left out: most of them by the thread that launches (shadow_recent.hpp), the rest here.
#include "shadow_worker.hpp"

#include "debug.hpp"
#include "devices.hpp"
#include "shadow_dirty.hpp"
#include "shadow_recent.hpp"
#include "thread.hpp"
#include "wire.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <unistd.h>
#include <unordered_set>

namespace woodfrog::interpose::shadow {
namespace {

constexpr size_t kStackBytes = size_t{1} << 20;
constexpr size_t kSeenBytes = size_t{1} << 20; // of launches kept to be recognised
constexpr size_t kFirstRanges = 512;
constexpr size_t kMostLaunchRanges = size_t{1} << 20;

struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

struct Evaluation {
    std::timed_mutex mutex;
    std::vector<Region> regions;
    std::vector<TemplateAllocation> allocations; // regions, neighbouring virtual mappings joined
    std::vector<TemplateRange> ranges;
    std::unordered_set<std::string, Hash, std::equal_to<>> seen;
    std::unordered_set<uint64_t> seen_graphs;
    size_t seen_bytes = 0;
    uint32_t seen_epoch = 0;
};

Evaluation &evaluation() {
    static Evaluation *const instance = new Evaluation;
    return *instance;
}

constinit std::atomic<uint32_t> g_wake{0};   // counts; the worker sleeps on it
constinit std::atomic<uint32_t> g_unload{0}; // 1: the worker shall unload all code
constinit std::atomic<bool> g_running{false};

void forget_seen(Evaluation &e) {
    e.seen.clear();
    e.seen_graphs.clear();
    e.seen_bytes = 0;
}

// What is owned now. Never older than the records that are read after it.
void look_at_memory(Evaluation &e) {
    std::vector<Region> now = owned_regions();
    if (const uint32_t epoch = dirty_epoch(); epoch != e.seen_epoch || now != e.regions) {
        forget_seen(e);
        e.seen_epoch = epoch;
    }
    e.regions = std::move(now);
    e.allocations.clear();
    const Region *before = nullptr;
    for (const Region &region : e.regions) {
        // An application may map many handles side by side and use them as one array.
        if (before != nullptr && before->is_virtual && region.is_virtual &&
            before->address + before->size_bytes == region.address)
            e.allocations.back().size_bytes += region.size_bytes;
        else
            e.allocations.push_back({region.address, region.size_bytes});
        before = &region;
    }
    forget_gone(e.regions);
}

void evaluate_launch(Evaluation &e, const unsigned char *bytes, size_t size_bytes) {
    LaunchRecord record;
    memcpy(&record, bytes, sizeof(record));
    const Kernel &kernel = *record.kernel;
    const Evaluate evaluate = kernel.catalogue->evaluate.load(std::memory_order_acquire);
    if (evaluate == nullptr)
        return mark_everything("the templates are gone", kernel.name.c_str());
    const std::vector<TemplateAllocation> *allocations = &e.allocations;
    std::vector<TemplateAllocation> with_symbols;
    if (!kernel.symbol_allocations.empty()) {
        with_symbols = e.allocations;
        with_symbols.insert(with_symbols.end(), kernel.symbol_allocations.begin(), kernel.symbol_allocations.end());
        std::sort(with_symbols.begin(), with_symbols.end(),
                  [](const auto &one, const auto &other) { return one.address < other.address; });
        allocations = &with_symbols;
    }
    TemplateLaunch launch{};
    std::copy(std::begin(record.grid), std::end(record.grid), launch.grid);
    std::copy(std::begin(record.block), std::end(record.block), launch.block);
    launch.parameters = bytes + sizeof(record);
    launch.parameters_bytes = static_cast<int64_t>(size_bytes - sizeof(record));
    launch.allocations = allocations->data();
    launch.allocation_count = static_cast<int64_t>(allocations->size());
    launch.symbols = kernel.symbols.data();
    if (e.ranges.empty())
        e.ranges.resize(kFirstRanges);
    for (;;) {
        const int64_t count =
            evaluate(kernel.number, &launch, kWrites, e.ranges.data(), static_cast<int64_t>(e.ranges.size()));
        if (count < 0 || static_cast<size_t>(count) > kMostLaunchRanges)
            return mark_everything("a launch that its template does not fit", kernel.name.c_str());
        if (static_cast<size_t>(count) > e.ranges.size()) {
            e.ranges.resize(static_cast<size_t>(count));
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const TemplateRange &range = e.ranges[static_cast<size_t>(i)];
            if (range.exactness >= kEverything || range.size_bytes == 0) {
                record.kernel->unbounded.store(dirty_epoch(), std::memory_order_relaxed);
                counts().covered.fetch_sub(1, std::memory_order_relaxed);
                return mark_everything("a launch that may write anywhere", kernel.name.c_str());
            }
            mark_range(e.regions, range.address, range.size_bytes);
        }
        return;
    }
}

bool is_new(Evaluation &e, const unsigned char *bytes, size_t size_bytes) {
    if (e.seen_bytes > kSeenBytes)
        forget_seen(e);
    const std::string_view text(reinterpret_cast<const char *>(bytes), size_bytes);
    if (e.seen.contains(text))
        return false;
    e.seen.emplace(text);
    e.seen_bytes += size_bytes + 64; // and a node of the table
    return true;
}

void evaluate_one(Evaluation &e, const unsigned char *bytes, size_t size_bytes) {
    RecordKind kind{};
    memcpy(&kind, bytes, sizeof(kind));
    if (kind == RecordKind::range) {
        RangeRecord record;
        memcpy(&record, bytes, sizeof(record));
        mark_range(e.regions, record.address, record.size_bytes);
    } else if (kind == RecordKind::launch) {
        if (is_new(e, bytes, size_bytes))
            evaluate_launch(e, bytes, size_bytes);
    }
}

void evaluate_record(Evaluation &e, const unsigned char *bytes, size_t size_bytes) {
    RecordKind kind{};
    memcpy(&kind, bytes, sizeof(kind));
    if (kind != RecordKind::graph) {
        if (!everything_marked())
            evaluate_one(e, bytes, size_bytes);
        return;
    }
    GraphRecord record;
    memcpy(&record, bytes, sizeof(record));
    const std::unique_ptr<const std::shared_ptr<const GraphWrites>> writes(record.writes);
    if (everything_marked() || !e.seen_graphs.insert((*writes)->number).second)
        return;
    for (const auto &one : (*writes)->records)
        evaluate_one(e, one.data(), one.size());
}

// Everything that is waiting now. False at the deadline.
bool drain(Evaluation &e, const Deadline *deadline) {
    while (ring().waiting_bytes() != 0) {
        const uint64_t end = ring().end();
        look_at_memory(e);
        const unsigned char *record = nullptr;
        size_t size_bytes = 0;
        while (ring().next(end, &record, &size_bytes)) {
            evaluate_record(e, record, size_bytes);
            ring().pop();
            if (deadline != nullptr && std::chrono::steady_clock::now() >= *deadline)
                return ring().waiting_bytes() == 0;
        }
    }
    return true;
}

void *worker_thread(void *) {
    const bool late = getenv("WOODFROG_TRACK_LATE") != nullptr; // for tests: it leaves all to the agent
    for (;;) {
        const uint32_t seen = g_wake.load(std::memory_order_acquire);
        if (g_unload.load(std::memory_order_acquire) != 0) {
            {
                std::lock_guard lock(evaluation().mutex);
                unload_all_catalogues();
            }
            g_unload.store(0, std::memory_order_release);
            futex_wake_all(&g_unload);
            continue;
        }
        if (!late && ring().waiting_bytes() >= Ring::kWakeBytes) {
            std::lock_guard lock(evaluation().mutex);
            drain(evaluation(), nullptr);
            continue;
        }
        futex_wait(&g_wake, seen, nullptr);
    }
}

} // namespace

Ring &ring() {
    static Ring *const instance = new Ring;
    return *instance;
}

Counts &counts() {
    static Counts *const instance = new Counts;
    return *instance;
}

void ring_is_full() {
    mark_everything("more launches than could be evaluated", nullptr);
}

void wake_worker() {
    g_wake.fetch_add(1, std::memory_order_acq_rel);
    futex_wake_all(&g_wake);
}

void start() {
    static constinit std::atomic<bool> started{false};
    if (!on() || started.exchange(true))
        return;
    if (const int error = start_thread("woodfrog-track", &worker_thread, nullptr, kStackBytes); error != 0) {
        debug("no thread to evaluate launches (errno %d)", error);
        mark_everything_for_good("there is no thread that evaluates launches");
    } else {
        g_running.store(true, std::memory_order_release);
    }
}

Report take_report(uint64_t operation, Deadline deadline) {
    Report report;
    {
        Evaluation &e = evaluation();
        const std::unique_lock lock(e.mutex, deadline);
        if (!lock.owns_lock() || !drain(e, &deadline))
            mark_everything("launches could not be evaluated in time", nullptr);
    }
    if (const char *why = device_that_writes(); why != nullptr)
        mark_everything_for_good(why);
    Recent::add_counts();
    add_graph_counts();
    report.kernels = take_kernel_uses(WF_MAX_ENTRIES); // before the epoch moves on
    report.dirty = report_dirty(operation, owned_regions());
    report.launches = counts().launches.exchange(0, std::memory_order_relaxed);
    report.covered =
        static_cast<uint64_t>(std::max<int64_t>(0, counts().covered.exchange(0, std::memory_order_relaxed)));
    return report;
}

void unload_code(Deadline deadline) {
    if (!g_running.load(std::memory_order_acquire))
        return;
    g_unload.store(1, std::memory_order_release);
    wake_worker();
    while (g_unload.load(std::memory_order_acquire) != 0) {
        if (std::chrono::steady_clock::now() >= deadline) {
            debug("catalogues are still loaded: a process image will need their files");
            return;
        }
        futex_wait(&g_unload, 1, &deadline);
    }
}

} // namespace woodfrog::interpose::shadow
