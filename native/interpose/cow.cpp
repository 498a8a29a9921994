// The page, whose memory is which unit of it, and waiting; see cow.hpp.
#include "cow.hpp"

#include "debug.hpp"
#include "devices.hpp"
#include "guard.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <linux/futex.h>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unordered_map>

namespace woodfrog::interpose::cow {

namespace detail {
constinit std::atomic<bool> g_armed{false};
}

namespace {

using Clock = std::chrono::steady_clock;

// A daemon that captures nothing for this long is as good as gone: a batch of its takes milliseconds.
constexpr std::chrono::seconds kPatience{30};
constexpr timespec kLook{1, 0}; // between looks at the time

struct Page {
    GuardPage *head = nullptr;
    size_t bytes = 0;
    uint32_t units = 0; // as they were when they were checked
    uint64_t unit_bytes = 0;
    uint32_t arming = 0; // what Physical::guard must say to count
    ~Page() { munmap(head, bytes); }

    std::atomic_ref<uint32_t> state(uint32_t unit) const {
        return std::atomic_ref(reinterpret_cast<uint32_t *>(reinterpret_cast<char *>(head) + WF_GUARD_STATES_AT)[unit]);
    }
};

struct Units {
    uint32_t first, count;
};

struct State {
    std::mutex mutex; // of `page`; never held while waiting
    std::shared_ptr<Page> page;
    uint32_t last_arming = 0;
};

State &state() {
    static State *const instance = new State;
    return *instance;
}

std::shared_ptr<Page> current_page() {
    std::lock_guard lock(state().mutex);
    return state().page;
}

void wake(uint32_t *word) {
    std::atomic_ref(*word).fetch_add(1, std::memory_order_acq_rel);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Marks what is not captured as wanted; whether there is any.
bool want(const Page &page, const std::vector<Units> &wanted) {
    bool any = false;
    for (const Units &units : wanted)
        for (uint32_t unit = units.first; unit < units.first + units.count; ++unit) {
            uint32_t value = page.state(unit).load(std::memory_order_acquire);
            if (value == WF_UNIT_FREE)
                continue;
            any = true;
            if (value == WF_UNIT_KEPT)
                page.state(unit).compare_exchange_strong(value, WF_UNIT_WANTED, std::memory_order_acq_rel);
        }
    return any;
}

bool all_captured(const Page &page, const std::vector<Units> &wanted) {
    for (const Units &units : wanted)
        for (uint32_t unit = units.first; unit < units.first + units.count; ++unit)
            if (page.state(unit).load(std::memory_order_acquire) != WF_UNIT_FREE)
                return false;
    return true;
}

void wait_until_captured(const Page &page, const std::vector<Units> &wanted) {
    GuardPage &head = *page.head;
    if (std::atomic_ref(head.over).load(std::memory_order_acquire) != 0 || !want(page, wanted))
        return;
    const Clock::time_point began = Clock::now();
    wake(&head.calls);
    Clock::time_point moved = began;
    uint32_t last = std::atomic_ref(head.captured).load(std::memory_order_acquire);
    for (;;) {
        const uint32_t seen = std::atomic_ref(head.captured).load(std::memory_order_acquire);
        if (std::atomic_ref(head.over).load(std::memory_order_acquire) != 0 || all_captured(page, wanted))
            break;
        if (seen != last) {
            last = seen;
            moved = Clock::now();
        } else if (Clock::now() - moved >= kPatience) {
            debug("the daemon has captured nothing for long: the application goes on, its snapshot is lost");
            std::atomic_ref(head.given_up).fetch_add(1, std::memory_order_acq_rel);
            detail::g_armed.store(false, std::memory_order_relaxed);
            std::atomic_ref(head.over).store(1, std::memory_order_release);
            wake(&head.captured);
            break;
        }
        syscall(SYS_futex, &head.captured, FUTEX_WAIT, seen, &kLook, nullptr, 0);
    }
    const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
    std::atomic_ref(head.waits).fetch_add(1, std::memory_order_relaxed);
    std::atomic_ref(head.waited_ns).fetch_add(static_cast<uint64_t>(waited), std::memory_order_relaxed);
}

// With memory().mutex held: units of [offset, offset + size) of a piece.
void add(const Page &page, const Physical &physical, size_t offset_bytes, size_t size_bytes,
         std::vector<Units> *wanted) {
    const Physical::Guard &guard = physical.guard;
    if (guard.arming != page.arming || size_bytes == 0)
        return;
    const uint64_t first = offset_bytes / page.unit_bytes;
    if (first >= guard.count)
        return;
    const uint64_t end = std::min<uint64_t>(guard.count, (offset_bytes + size_bytes - 1) / page.unit_bytes + 1);
    wanted->push_back({guard.first + static_cast<uint32_t>(first), static_cast<uint32_t>(end - first)});
}

Block *block_at(CUdeviceptr address) {
    auto after = memory().blocks.upper_bound(address);
    if (after == memory().blocks.begin())
        return nullptr;
    Block *block = std::prev(after)->second.get();
    return address - block->address < block->size_bytes ? block : nullptr;
}

// The application's mapping that contains the address or, without one, the first behind it.
auto mapping_at(CUdeviceptr address) {
    auto &mappings = memory().virtual_mappings;
    auto found = mappings.upper_bound(address);
    if (found != mappings.begin()) {
        const VirtualMapping &before = std::prev(found)->second;
        if (address - before.address < before.size_bytes)
            --found;
    }
    return found;
}

void add_mapping(const Page &page, const VirtualMapping &mapping, std::vector<Units> *wanted) {
    add(page, mapping.handle->physical, mapping.offset_bytes, mapping.size_bytes, wanted);
}

// What a kernel that gets this address may reach: the allocation, or all neighbouring mappings of the application's own
// (segments that grow are one allocation of many handles). Returns where that ends.
CUdeviceptr add_all_around(const Page &page, CUdeviceptr address, std::vector<Units> *wanted) {
    if (const Block *block = block_at(address); block != nullptr) {
        // Of allocations that share a block the one; of what is free in it, whatever that means, all.
        const Allocation *allocation = memory().find(address);
        const CUdeviceptr begin = allocation != nullptr ? allocation->address : block->address;
        const size_t size_bytes = allocation != nullptr ? allocation->size_bytes : block->size_bytes;
        add(page, block->physical, begin - block->address, size_bytes, wanted);
        return begin + size_bytes;
    }
    auto &mappings = memory().virtual_mappings;
    const auto found = mapping_at(address);
    if (found == mappings.end() || found->second.address > address)
        return address;
    auto first = found;
    while (first != mappings.begin() &&
           std::prev(first)->second.address + std::prev(first)->second.size_bytes == first->second.address)
        --first;
    CUdeviceptr end = first->second.address;
    for (auto at = first; at != mappings.end() && at->second.address == end; ++at) {
        add_mapping(page, at->second, wanted);
        end += at->second.size_bytes;
    }
    return end;
}

void add_span(const Page &page, CUdeviceptr address, size_t size_bytes, std::vector<Units> *wanted) {
    if (const Block *block = block_at(address); block != nullptr)
        return add(page, block->physical, address - block->address, size_bytes, wanted);
    auto &mappings = memory().virtual_mappings;
    for (auto at = mapping_at(address); at != mappings.end() && at->first < address + size_bytes; ++at) {
        const VirtualMapping &mapping = at->second;
        const CUdeviceptr begin = std::max(address, mapping.address);
        const CUdeviceptr end = std::min(address + size_bytes, mapping.address + mapping.size_bytes);
        add(page, mapping.handle->physical, mapping.offset_bytes + (begin - mapping.address), end - begin, wanted);
    }
}

Outcome refuse(const char *why) {
    return {wire::Status::bad_message, CUDA_SUCCESS, 0, why};
}

std::shared_ptr<Page> map_page(int fd) {
    struct stat file{};
    if (fstat(fd, &file) != 0 || file.st_size < WF_GUARD_STATES_AT)
        return nullptr;
    const size_t bytes = static_cast<size_t>(file.st_size);
    void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return nullptr;
    auto page = std::make_shared<Page>();
    page->head = static_cast<GuardPage *>(mapped);
    page->bytes = bytes;
    const GuardPage &head = *page->head;
    if (head.magic != WF_GUARD_MAGIC || head.version != WF_GUARD_VERSION || head.units > WF_GUARD_MAX_UNITS ||
        WF_GUARD_BYTES(head.units) > bytes || head.unit_bytes == 0)
        return nullptr;
    page->units = head.units;
    page->unit_bytes = head.unit_bytes;
    madvise(mapped, bytes, MADV_DONTFORK);
    return page;
}

// Every piece of memory that is owned. With memory().mutex held.
template <typename Visit> void each_physical(Visit visit) {
    for (const auto &[address, block] : memory().blocks)
        visit(&block->physical);
    for (const auto &block : memory().spare)
        visit(&block->physical);
    for (const auto &[number, handle] : memory().virtual_handles)
        visit(&handle->physical);
}

// What is written without a call that could be seen.
std::vector<Units> written_unseen(const Page &page) {
    if (memory_was_lent() || device_that_writes() != nullptr)
        return {{0, page.units}};
    std::vector<Units> wanted;
    std::lock_guard lock(memory().mutex);
    each_physical([&](const Physical *physical) {
        if (physical->host_node >= 0)
            add(page, *physical, 0, physical->size_bytes, &wanted);
    });
    for (const auto &[address, mapping] : memory().virtual_mappings)
        if (mapping.host_reaches() || mapping.handle->pinned)
            add_mapping(page, mapping, &wanted);
    return wanted;
}

} // namespace

Outcome arm(int page_fd, const std::vector<wire::Guarded> &handles) {
    disarm(); // what an operation that failed has left
    std::shared_ptr<Page> page = map_page(page_fd);
    finish_fd(page_fd, false);
    if (page == nullptr)
        return refuse("the page of a snapshot cannot be used");
    page->arming = ++state().last_arming; // this thread's alone
    {
        std::lock_guard lock(memory().mutex);
        std::unordered_map<uint64_t, Physical *> known;
        each_physical([&](Physical *physical) { known.emplace(physical->id, physical); });
        for (const wire::Guarded &one : handles) {
            const auto found = known.find(one.handle);
            if (found == known.end())
                return refuse("a handle of a snapshot that this process does not know");
            if (one.count > page->units || one.first > page->units - one.count ||
                one.count * page->unit_bytes < found->second->size_bytes)
                return refuse("a handle of a snapshot is not in its page");
            found->second->guard = {page->arming, one.first, one.count};
        }
    }
    {
        std::lock_guard lock(state().mutex);
        state().page = page;
    }
    put_in_place();
    detail::g_armed.store(true, std::memory_order_release);
    wait_until_captured(*page, written_unseen(*page));
    return {};
}

Report disarm() {
    detail::g_armed.store(false, std::memory_order_relaxed);
    std::shared_ptr<Page> page;
    {
        std::lock_guard lock(state().mutex);
        page.swap(state().page);
    }
    Report report;
    if (page == nullptr)
        return report;
    take_away();
    // A daemon that has finished has done this itself; one that is gone cannot.
    std::atomic_ref(page->head->over).store(1, std::memory_order_release);
    wake(&page->head->captured);
    report.waits = std::atomic_ref(page->head->waits).load(std::memory_order_relaxed);
    report.kernels = take_launches();
    return report;
}

void in_forked_child() {
    detail::g_armed.store(false, std::memory_order_relaxed);
}

void will_write_anything() {
    if (const std::shared_ptr<Page> page = current_page(); page != nullptr)
        wait_until_captured(*page, {{0, page->units}});
}

void will_write(const std::vector<shadow::Span> &spans, std::vector<uint64_t> words) {
    const std::shared_ptr<Page> page = current_page();
    if (page == nullptr)
        return;
    std::sort(words.begin(), words.end());
    std::vector<Units> wanted;
    {
        std::lock_guard lock(memory().mutex);
        for (const shadow::Span &span : spans)
            add_span(*page, span.address, span.size_bytes, &wanted);
        CUdeviceptr done = 0; // what ends here is in `wanted` already
        for (const uint64_t word : words)
            if (word >= done)
                done = std::max<CUdeviceptr>(word + 1, add_all_around(*page, word, &wanted));
    }
    wait_until_captured(*page, wanted);
}

} // namespace woodfrog::interpose::cow
