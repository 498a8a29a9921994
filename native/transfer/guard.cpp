// The account of what is captured, and the page; see guard.hpp.
#include "guard.hpp"

#include "chunks.hpp"
#include "error.hpp"
#include "guard.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::transfer {
namespace {

constexpr uint64_t least_unit_bytes = 2ull << 20; // the granularity of device memory

// The page is the target's too: every access is atomic.
template <typename T> std::atomic_ref<T> shared(T &word) {
    return std::atomic_ref<T>(word);
}

void futex_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT, value, nullptr, nullptr, 0);
}

// [0] is where each unit's chunks begin among `positions`, the last is their number.
std::vector<uint64_t> chunks_of_units(const Guard::Part &part, uint64_t chunk_bytes, uint64_t chunks_a_unit) {
    const size_t count = part.positions.size() / sizeof(uint32_t);
    const auto position = [&](size_t at) {
        uint32_t value = 0;
        memcpy(&value, part.positions.data() + at * sizeof(value), sizeof(value));
        return uint64_t{value};
    };
    std::vector<uint64_t> firsts;
    uint64_t chunk = 0; // the first of the unit
    size_t at = 0;
    for (const uint64_t size : part.sizes) {
        const uint64_t end = chunk + (size - 1) / chunk_bytes + 1;
        for (; chunk < end; chunk = std::min(end, chunk + chunks_a_unit)) {
            firsts.push_back(at);
            const uint64_t unit_end = std::min(end, chunk + chunks_a_unit);
            while (at < count && position(at) < unit_end) {
                if (at > 0 && position(at) <= position(at - 1))
                    throw_invalid("Guard", "the positions do not ascend");
                at++;
            }
        }
    }
    if (at < count)
        throw_invalid("Guard", "a position lies behind the last chunk");
    firsts.push_back(at);
    return firsts;
}

} // namespace

Guard::Guard(const std::vector<Part> &parts, uint64_t chunk_bytes) {
    check_chunk_bytes("Guard", chunk_bytes);
    const uint64_t chunks_a_unit = std::max<uint64_t>(1, least_unit_bytes / chunk_bytes);
    unit_bytes_ = chunks_a_unit * chunk_bytes;
    uint64_t units = 0;
    for (const Part &part : parts) {
        PartState state;
        state.first_unit = static_cast<uint32_t>(units);
        for (const uint64_t size : part.sizes) {
            const uint64_t here = size == 0 ? 0 : (size - 1) / unit_bytes_ + 1;
            if (here == 0 || units + here > WF_GUARD_MAX_UNITS)
                throw_invalid("Guard", "pieces of this size cannot be divided into units");
            state.places.push_back({static_cast<uint32_t>(units), static_cast<uint32_t>(here)});
            units += here;
        }
        state.end_unit = static_cast<uint32_t>(units);
        state.next = state.first_unit;
        const std::vector<uint64_t> firsts = chunks_of_units(part, chunk_bytes, chunks_a_unit);
        state.left = firsts.back();
        // The last entry of a part is where the next part's first one goes: `first_chunk_[unit + 1]` of a part's last
        // unit must be its own, so each part has one entry more than it has units.
        for (size_t unit = 0; unit + 1 < firsts.size(); unit++)
            states_.push_back(firsts[unit] == firsts[unit + 1] ? State::free : State::kept);
        first_chunk_.insert(first_chunk_.end(), firsts.begin(), firsts.end());
        parts_.push_back(std::move(state));
    }
    units_ = static_cast<uint32_t>(units);
    mapped_bytes_ = WF_GUARD_BYTES(units_);
    fd_ = memfd_create("woodfrog-guard", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0)
        throw_errno(errno, "memfd_create", "the page of a guard");
    // Sealed, so that a target cannot pull the page from under this process.
    if (ftruncate(fd_, static_cast<off_t>(mapped_bytes_)) != 0 ||
        fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        const int error = errno;
        close(fd_);
        throw_errno(error, "ftruncate", "the page of a guard");
    }
    void *mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        throw_errno(error, "mmap", "the page of a guard");
    }
    page_ = static_cast<GuardPage *>(mapped);
    page_->magic = WF_GUARD_MAGIC;
    page_->version = WF_GUARD_VERSION;
    page_->units = units_;
    page_->unit_bytes = unit_bytes_;
    for (uint32_t unit = 0; unit < units_; unit++)
        *state_of(unit) = states_[unit] == State::free ? WF_UNIT_FREE : WF_UNIT_KEPT;
}

Guard::~Guard() {
    finish();
    munmap(page_, mapped_bytes_);
    close(fd_);
}

Guard::PartState &Guard::part_at(size_t part) {
    if (part >= parts_.size())
        throw_invalid("Guard", "there is no part " + std::to_string(part));
    return parts_[part];
}

uint32_t *Guard::state_of(uint32_t unit) const {
    return reinterpret_cast<uint32_t *>(reinterpret_cast<char *>(page_) + WF_GUARD_STATES_AT) + unit;
}

template <typename Wanted>
std::vector<Guard::Run> Guard::collect(PartState &part, uint32_t from, uint64_t most_chunks, Wanted wanted) {
    const size_t number = static_cast<size_t>(&part - parts_.data());
    std::vector<Run> runs;
    uint64_t taken = 0;
    for (uint32_t unit = from; unit < part.end_unit; unit++) {
        if (states_[unit] != State::kept || !wanted(unit))
            continue;
        const uint64_t first = first_chunk_[unit + number], count = first_chunk_[unit + number + 1] - first;
        if (taken > 0 && taken + count > most_chunks)
            break;
        states_[unit] = State::taken;
        taken += count;
        if (!runs.empty() && runs.back().unit + runs.back().units == unit) {
            runs.back().count += count;
            runs.back().units++;
        } else {
            runs.push_back({first, count, unit, 1});
        }
    }
    return runs;
}

std::vector<Guard::Run> Guard::take(size_t number, uint64_t most_chunks) {
    std::lock_guard lock(mutex_);
    PartState &part = part_at(number);
    while (part.next < part.end_unit && states_[part.next] != State::kept)
        part.next++;
    return collect(part, part.next, most_chunks, [](uint32_t) { return true; });
}

std::vector<Guard::Run> Guard::take_wanted(size_t number, uint64_t most_chunks) {
    PartState &part = part_at(number);
    for (;;) {
        const uint32_t seen = shared(page_->calls).load(std::memory_order_acquire);
        if (over())
            return {};
        {
            std::lock_guard lock(mutex_);
            std::vector<Run> runs = collect(part, part.next, most_chunks, [&](uint32_t unit) {
                return shared(*state_of(unit)).load(std::memory_order_relaxed) == WF_UNIT_WANTED;
            });
            if (!runs.empty())
                return runs;
        }
        futex_wait(&page_->calls, seen);
    }
}

void Guard::captured(size_t number, const std::vector<Run> &runs) {
    {
        std::lock_guard lock(mutex_);
        PartState &part = part_at(number);
        for (const Run &run : runs) {
            if (run.unit < part.first_unit || run.unit > part.end_unit || run.units > part.end_unit - run.unit)
                throw_invalid("Guard", "a run that was not taken");
            for (uint32_t unit = run.unit; unit < run.unit + run.units; unit++) {
                if (states_[unit] != State::taken)
                    continue; // nothing to capture in between, or told twice
                states_[unit] = State::free;
                part.left -= first_chunk_[unit + number + 1] - first_chunk_[unit + number];
                shared(*state_of(unit)).store(WF_UNIT_FREE, std::memory_order_release);
            }
        }
    }
    shared(page_->captured).fetch_add(1, std::memory_order_acq_rel);
    futex_wake(&page_->captured);
}

uint64_t Guard::left(size_t part) const {
    std::lock_guard lock(mutex_);
    return part_at(part).left;
}

void Guard::finish() {
    shared(page_->over).store(1, std::memory_order_release);
    for (uint32_t *word : {&page_->calls, &page_->captured}) {
        shared(*word).fetch_add(1, std::memory_order_acq_rel);
        futex_wake(word);
    }
}

bool Guard::over() const {
    return shared(page_->over).load(std::memory_order_acquire) != 0;
}

uint64_t Guard::waits() const {
    return shared(page_->waits).load(std::memory_order_relaxed);
}

uint64_t Guard::waited_ns() const {
    return shared(page_->waited_ns).load(std::memory_order_relaxed);
}

uint32_t Guard::given_up() const {
    return shared(page_->given_up).load(std::memory_order_relaxed);
}

} // namespace woodfrog::transfer
