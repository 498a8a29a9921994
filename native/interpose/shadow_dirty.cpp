// The bits; see shadow_dirty.hpp.
#include "shadow_dirty.hpp"

#include "changes.hpp"
#include "memory.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace woodfrog::interpose::shadow {
namespace {

using Bits = std::vector<uint64_t>;

struct Set {
    bool everything = false;
    std::string why;
    std::unordered_map<uint64_t, Bits> bits; // by the physical memory's id
};

struct State {
    std::mutex mutex;
    Set current, pending;
    uint64_t baseline = 0, pending_operation = 0;
    const char *for_good = nullptr;
};

State &state() {
    static State *const instance = [] {
        State *made = new State;
        made->current.everything = true;
        made->current.why = "there is no earlier image of this run";
        return made;
    }();
    return *instance;
}

constinit std::atomic<bool> g_everything{true};
constinit std::atomic<uint32_t> g_epoch{1};

size_t grains(size_t bytes) {
    return (bytes + kGrain - 1) / kGrain;
}

// Sets bits [first, end), as far as that many are there; the vector grows to hold them.
void set_bits(Bits &bits, size_t first, size_t end) {
    if (bits.size() * 64 < end)
        bits.resize((end + 63) / 64);
    while (first < end) {
        const size_t word = first / 64, low = first % 64, count = std::min<size_t>(64 - low, end - first);
        const uint64_t ones = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
        bits[word] |= ones << low;
        first += count;
    }
}

// With the lock held.
void mark(uint64_t id, size_t offset, size_t size_bytes) {
    set_bits(state().current.bits[id], offset / kGrain, grains(offset + size_bytes));
}

void merge(Set &into, const Set &from) {
    if (from.everything && !into.everything) {
        into.everything = true;
        into.why = from.why;
    }
    for (const auto &[id, bits] : from.bits) {
        Bits &there = into.bits[id];
        if (there.size() < bits.size())
            there.resize(bits.size());
        for (size_t i = 0; i < bits.size(); ++i)
            there[i] |= bits[i];
    }
}

bool bit(const Bits &bits, size_t at) {
    return at / 64 < bits.size() && (bits[at / 64] >> (at % 64) & 1) != 0;
}

// Memory that other processes, or devices by themselves, can write.
std::vector<DirtyRange> writable_by_others() {
    std::vector<DirtyRange> found;
    std::lock_guard lock(memory().mutex);
    for (const auto &[number, handle] : memory().virtual_handles)
        if (handle->foreign || handle->pinned || handle->physical.exports != 0 || handle->physical.host_node >= 0)
            found.push_back({handle->physical.id, 0, handle->physical.size_bytes});
    for (const auto &[address, block] : memory().blocks)
        if (block->physical.by_ipc)
            found.push_back({block->physical.id, 0, block->size_bytes});
    return found;
}

// Runs of set bits as byte ranges of one piece; runs closer than `gap` grains are one.
void append_runs(uint64_t id, const Bits &bits, size_t size_bytes, size_t gap, std::vector<DirtyRange> &out) {
    const size_t count = std::min(grains(size_bytes), bits.size() * 64);
    const size_t begin = out.size();
    for (size_t at = 0; at < count;) {
        if (bits[at / 64] == 0) {
            at = (at / 64 + 1) * 64;
            continue;
        }
        if (!bit(bits, at)) {
            ++at;
            continue;
        }
        size_t end = at + 1;
        while (end < count && bit(bits, end))
            ++end;
        const uint64_t first = at * kGrain, last = std::min<uint64_t>(end * kGrain, size_bytes);
        if (out.size() > begin && first - (out.back().offset_bytes + out.back().size_bytes) <= gap * kGrain)
            out.back().size_bytes = last - out.back().offset_bytes;
        else
            out.push_back({id, first, last - first});
        at = end;
    }
}

} // namespace

std::vector<Region> owned_regions() {
    std::vector<Region> regions;
    std::lock_guard lock(memory().mutex);
    regions.reserve(memory().blocks.size() + memory().virtual_mappings.size());
    for (const auto &[address, block] : memory().blocks)
        regions.push_back({address, block->size_bytes, block->physical.id, 0, false});
    for (const auto &[address, mapping] : memory().virtual_mappings)
        regions.push_back({address, mapping.size_bytes, mapping.handle->physical.id, mapping.offset_bytes, true});
    std::sort(regions.begin(), regions.end(),
              [](const Region &one, const Region &other) { return one.address < other.address; });
    return regions;
}

void mark_range(const std::vector<Region> &regions, uint64_t address, uint64_t size_bytes) {
    if (size_bytes == 0)
        return;
    const uint64_t end = address + size_bytes < address ? ~uint64_t{0} : address + size_bytes;
    auto at = std::upper_bound(regions.begin(), regions.end(), address,
                               [](uint64_t value, const Region &region) { return value < region.address; });
    if (at != regions.begin())
        --at;
    std::lock_guard lock(state().mutex);
    for (; at != regions.end() && at->address < end; ++at) {
        const uint64_t first = std::max<uint64_t>(address, at->address);
        const uint64_t last = std::min<uint64_t>(end, at->address + at->size_bytes);
        if (first < last)
            mark(at->id, at->offset_bytes + (first - at->address), last - first);
    }
}

void mark_whole(uint64_t id, size_t size_bytes) {
    std::lock_guard lock(state().mutex);
    mark(id, 0, size_bytes);
}

void mark_everything(const char *why, const char *kernel) {
    std::lock_guard lock(state().mutex);
    Set &set = state().current;
    if (set.everything)
        return;
    set.everything = true;
    set.why = kernel == nullptr ? why : std::string(why) + ": " + kernel;
    g_everything.store(true, std::memory_order_release);
}

void mark_everything_for_good(const char *why) {
    {
        std::lock_guard lock(state().mutex);
        if (state().for_good == nullptr)
            state().for_good = why;
    }
    mark_everything(why, nullptr);
}

void forget_gone(const std::vector<Region> &regions) {
    constexpr size_t kFew = 1024;
    {
        std::lock_guard lock(state().mutex);
        if (state().current.bits.size() <= 2 * regions.size() + kFew)
            return;
    }
    std::vector<uint64_t> alive;
    {
        std::lock_guard lock(memory().mutex);
        for (const auto &[address, block] : memory().blocks)
            alive.push_back(block->physical.id);
        for (const auto &[number, handle] : memory().virtual_handles)
            alive.push_back(handle->physical.id);
    }
    std::sort(alive.begin(), alive.end());
    std::lock_guard lock(state().mutex);
    // Numbers grow: a piece that came after the list was made is none that is gone.
    const uint64_t newest = alive.empty() ? 0 : alive.back();
    std::erase_if(state().current.bits, [&](const auto &entry) {
        return entry.first <= newest && !std::binary_search(alive.begin(), alive.end(), entry.first);
    });
}

bool everything_marked() {
    return g_everything.load(std::memory_order_acquire);
}

DirtyReport report_dirty(uint64_t operation, const std::vector<Region> &regions) {
    const std::vector<DirtyRange> foreign = writable_by_others();
    State &all = state();
    std::lock_guard lock(all.mutex);
    merge(all.pending, all.current);
    all.current = Set{};
    if (all.for_good != nullptr) {
        all.current.everything = true;
        all.current.why = all.for_good;
    }
    g_everything.store(all.current.everything, std::memory_order_release);
    g_epoch.fetch_add(1, std::memory_order_acq_rel);
    note_change();
    all.pending_operation = operation;

    DirtyReport report;
    report.baseline = all.baseline;
    report.everything = all.pending.everything;
    report.why = all.pending.why;
    if (report.everything)
        return report;
    // The whole size of each piece, as far as it is mapped: memory that is not mapped was marked when it was unmapped.
    std::unordered_map<uint64_t, size_t> sizes;
    for (const Region &region : regions) {
        size_t &size = sizes[region.id];
        size = std::max(size, region.offset_bytes + region.size_bytes);
    }
    for (size_t gap = 0;; gap = gap == 0 ? 1 : gap * 4) {
        report.ranges = foreign;
        for (const auto &[id, bits] : all.pending.bits)
            append_runs(id, bits, std::max(sizes[id], bits.size() * 64 * kGrain), gap, report.ranges);
        if (report.ranges.size() <= kMostRanges || gap > (size_t{1} << 40))
            break;
    }
    return report;
}

void dirty_committed(uint64_t operation) {
    State &all = state();
    std::lock_guard lock(all.mutex);
    if (operation == 0 || operation != all.pending_operation)
        return;
    all.baseline = operation;
    all.pending_operation = 0;
    all.pending = Set{};
}

uint32_t dirty_epoch() {
    return g_epoch.load(std::memory_order_acquire);
}

} // namespace woodfrog::interpose::shadow
