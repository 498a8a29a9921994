// See shadow_recent.hpp. The table is memory of its own, zero at first; a thread that ends leaves it to the next one
// that takes its record.
#include "shadow_recent.hpp"

#include "gate.hpp"

#include <cstring>
#include <sys/mman.h>

namespace woodfrog::interpose::shadow {
namespace {

constinit std::atomic<Recent *> g_first{nullptr};

constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15; // 2^64 ÷ the golden ratio, as Fibonacci hashing has it

// Multiply-shift hashing of a vector of words: each has an odd factor of its own, and the high bits of the sum count.
// The products do not wait for each other.
uint64_t hash_of(const unsigned char *record, size_t size_bytes) {
    uint64_t sum = 0, factor = kMultiplier;
    for (size_t at = 0; at < size_bytes; at += 8, factor += 2 * kMultiplier) {
        uint64_t word = 0;
        memcpy(&word, record + at, sizeof(word));
        word ^= word >> 32; // addresses differ in low bits, and those of the product count for little
        sum += word * factor;
    }
    return sum * kMultiplier;
}

} // namespace

Recent *Recent::of_this_thread() {
    ThreadRecord *thread = woodfrog::interpose::detail::t_record;
    if (thread == nullptr)
        thread = woodfrog::interpose::detail::register_thread();
    if (thread->recent != nullptr) [[likely]]
        return thread->recent;
    void *memory = mmap(nullptr, sizeof(Recent), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return nullptr;
    // Its pages are zero already, and most of them are never touched.
    Recent *made = static_cast<Recent *>(memory);
    thread->recent = made;
    made->next_ = g_first.load(std::memory_order_relaxed);
    while (!g_first.compare_exchange_weak(made->next_, made, std::memory_order_acq_rel))
        ;
    return made;
}

void Recent::add_counts_of(Known &known) {
    const uint64_t launches = known.launches.exchange(0, std::memory_order_relaxed);
    if (launches == 0)
        return;
    known.kernel.load(std::memory_order_relaxed)->launches.fetch_add(launches, std::memory_order_relaxed);
    counts().launches.fetch_add(launches, std::memory_order_relaxed);
    counts().covered.fetch_add(static_cast<int64_t>(known.covered.exchange(0, std::memory_order_relaxed)),
                               std::memory_order_relaxed);
}

void Recent::add_counts() {
    for (Recent *one = g_first.load(std::memory_order_acquire); one != nullptr; one = one->next_)
        for (Known &known : one->functions_)
            add_counts_of(known);
}

Recent::Known *Recent::find(CUfunction function, uint64_t now) {
    const uint64_t at = reinterpret_cast<uint64_t>(function) * kMultiplier / (~uint64_t{0} / kFunctions + 1);
    Known &known = functions_[at];
    if (known.function == function && known.changes == now) [[likely]]
        return &known;
    add_counts_of(known);
    known.function = nullptr;
    Kernel *kernel = kernel_of(function);
    if (kernel == nullptr)
        return nullptr;
    known.kernel.store(kernel, std::memory_order_relaxed);
    known.has_template = shadow::has_template(kernel, function) && lay_out(kernel, function);
    known.changes = now;
    known.function = function;
    return &known;
}

bool Recent::has(const unsigned char *record, size_t size_bytes, uint64_t now) {
    hash_ = hash_of(record, size_bytes);
    const size_t set = hash_ >> kSetShift;
    const auto tag = static_cast<uint32_t>(hash_ >> (kSetShift - 32));
    for (size_t way = 0; way < kWays; ++way) {
        const Slot &slot = slots_[set][way];
        if (tags_[set][way] == tag && slot.changes == now && slot.size_bytes == size_bytes &&
            memcmp(slot.record, record, size_bytes) == 0)
            return true;
    }
    return false;
}

void Recent::add(const unsigned char *record, size_t size_bytes, uint64_t now) {
    const size_t set = hash_ >> kSetShift, way = oldest_[set];
    Slot &slot = slots_[set][way];
    slot.changes = now;
    slot.size_bytes = size_bytes;
    memcpy(slot.record, record, size_bytes);
    tags_[set][way] = static_cast<uint32_t>(hash_ >> (kSetShift - 32));
    oldest_[set] = static_cast<uint8_t>((way + 1) % kWays);
}

} // namespace woodfrog::interpose::shadow
