// See control_memory.hpp. The driver calls mmap and munmap of the C library, which bind to those exported here; both
// are the system call and nothing else unless the request is the one that is waited for. They may be called by any
// thread, in a signal handler too: no lock, an offer is taken by one exchange.
#include "control_memory.hpp"

#include "control_copy.hpp"
#include "kept_fd.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE // Linux 5.14; older headers
#define MADV_POPULATE_WRITE 23
#endif

namespace woodfrog::interpose {
namespace {

constexpr size_t huge_page_bytes = size_t{2} << 20;
constexpr size_t page_bytes = 4096; // of the length that the kernel rounds to; larger pages are refused below
// Smaller populated mappings are not the control state: 333 MiB was the least that was seen (driver 580).
constexpr size_t least_bytes = size_t{16} << 20;
constexpr size_t piece_bytes = size_t{64} << 20; // populated at once

std::atomic<uintptr_t> offered{0}; // address; its size was stored before
std::atomic<size_t> offered_bytes{0};
std::atomic<bool> offered_shared{false}; // of a file, which cannot be made longer here
std::atomic<size_t> taken_bytes{0};
std::atomic<size_t> learned_bytes{0};
std::atomic<bool> watching{false}; // from an offer until it is settled
// Where the driver has its control state, in memory of ours or not.
std::atomic<uintptr_t> state_address{0};
std::atomic<size_t> state_bytes{0};

// What the driver has mapped of ours, and what it has unmapped and is to be given back.
std::atomic<uintptr_t> driver_address{0}, freed_address{0};
std::atomic<size_t> driver_bytes{0}, freed_bytes{0};

size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

void *map_now(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    // syscall sets errno as mmap does.
    return reinterpret_cast<void *>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
}

int unmap_now(void *address, size_t length) {
    return static_cast<int>(syscall(SYS_munmap, address, length));
}

bool is_control_state(const void *address, size_t length, int protection, int flags, int fd) {
    constexpr int needed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    return address == nullptr && length >= least_bytes && protection == (PROT_READ | PROT_WRITE) && fd == -1 &&
           (flags & ~(MAP_NORESERVE | MAP_STACK)) == needed;
}

// The offer, cut or lengthened to `length`; null if there is none.
void *take(size_t length) {
    const uintptr_t base = offered.exchange(0, std::memory_order_acquire);
    if (base == 0)
        return nullptr;
    const size_t size = offered_bytes.load(std::memory_order_relaxed);
    auto *memory = reinterpret_cast<uint8_t *>(base);
    if (size > length) {
        unmap_now(memory + length, size - length);
    } else if (size < length && offered_shared.load(std::memory_order_relaxed)) {
        unmap_now(memory, size);
        return nullptr;
    } else if (size < length) {
        void *longer = mremap(memory, size, length, MREMAP_MAYMOVE);
        if (longer == MAP_FAILED) {
            unmap_now(memory, size);
            return nullptr;
        }
        memory = static_cast<uint8_t *>(longer);
        madvise(memory + size, length - size, MADV_POPULATE_WRITE); // if not, the pages come when they are touched
    }
    driver_bytes.store(length, std::memory_order_relaxed);
    driver_address.store(reinterpret_cast<uintptr_t>(memory), std::memory_order_release);
    taken_bytes.fetch_add(length, std::memory_order_relaxed);
    return memory;
}

// Populated, huge where the kernel gives huge pages; how much of it, from its beginning.
size_t populate(uint8_t *memory, size_t size) {
    for (size_t done = 0; done < size; done += piece_bytes) {
        const size_t here = size - done < piece_bytes ? size - done : piece_bytes;
        if (madvise(memory + done, here, MADV_POPULATE_WRITE) != 0)
            return done;
    }
    return size;
}

bool is_setting(const char *value) {
    const char *wanted = getenv("WOODFROG_CONTROL_MEMORY");
    return wanted != nullptr && strcmp(wanted, value) == 0;
}

bool is_wanted() {
    return !is_setting("0") && sysconf(_SC_PAGESIZE) == static_cast<long>(page_bytes);
}

// Address space that begins with a huge page; null if there is none.
uint8_t *reserve(size_t size) {
    void *whole = map_now(nullptr, size + huge_page_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED)
        return nullptr;
    const auto start = reinterpret_cast<uintptr_t>(whole);
    const uintptr_t base = round_up(start, huge_page_bytes);
    if (base > start)
        unmap_now(whole, base - start);
    auto *memory = reinterpret_cast<uint8_t *>(base);
    unmap_now(memory + size, start + huge_page_bytes - base);
    return memory;
}

// Over a reservation of ours. A forked child must not be able to write where the driver saves this process's state.
bool map_file(uint8_t *memory, size_t bytes, int fd) {
    const ForkPause pause;
    return map_now(memory, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED &&
           madvise(memory, bytes, MADV_DONTFORK) == 0;
}

void offer(uint8_t *memory, size_t size, bool shared) {
    offered_bytes.store(size, std::memory_order_relaxed);
    offered_shared.store(shared, std::memory_order_relaxed);
    offered.store(reinterpret_cast<uintptr_t>(memory), std::memory_order_release);
    begin_control_copies();
}

} // namespace

size_t wanted_control_memory(size_t bytes) {
    if (!is_wanted() || is_setting("private"))
        return 0;
    const size_t learned = learned_bytes.load(std::memory_order_relaxed);
    const size_t size = round_up(learned != 0 ? learned : bytes, huge_page_bytes);
    return size < least_bytes ? 0 : size;
}

size_t offer_control_memory(size_t bytes) {
    settle_control_memory();
    if (!is_wanted())
        return 0;
    watching.store(true, std::memory_order_relaxed);
    const size_t learned = learned_bytes.load(std::memory_order_relaxed);
    const size_t size = round_up(learned != 0 ? learned : bytes, huge_page_bytes);
    if (size < least_bytes)
        return 0;
    uint8_t *memory = reserve(size);
    if (memory == nullptr)
        return 0;
    madvise(memory, size, MADV_HUGEPAGE);
    const size_t ready = populate(memory, size);
    if (ready < size)
        unmap_now(memory + ready, size - ready);
    if (ready == 0)
        return 0;
    offer(memory, ready, false);
    return ready;
}

size_t offer_shared_control_memory(int fd, size_t bytes) {
    settle_control_memory();
    if (wanted_control_memory(bytes) == 0 || bytes < least_bytes || bytes % huge_page_bytes != 0)
        return 0;
    watching.store(true, std::memory_order_relaxed);
    uint8_t *memory = reserve(bytes);
    if (memory == nullptr)
        return 0;
    if (!map_file(memory, bytes, fd)) {
        unmap_now(memory, bytes);
        return 0;
    }
    madvise(memory, bytes, MADV_HUGEPAGE); // where the machine's settings allow them for shared memory
    // A file system that is full is told here; later it would be a signal in the driver's copy.
    if (populate(memory, bytes) < bytes) {
        unmap_now(memory, bytes);
        return 0;
    }
    offer(memory, bytes, true);
    return bytes;
}

bool is_control_memory([[maybe_unused]] const void *address, [[maybe_unused]] size_t size) {
#ifdef WOODFROG_SANITIZED // the mapping is not seen there (below)
    return true;
#else
    const uintptr_t base = state_address.load(std::memory_order_acquire);
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const size_t bytes = state_bytes.load(std::memory_order_relaxed);
    return base != 0 && begin >= base && size <= bytes && begin - base <= bytes - size;
#endif
}

size_t control_memory_taken() {
    return taken_bytes.load(std::memory_order_relaxed);
}

void settle_control_memory() {
    end_control_copies();
    watching.store(false, std::memory_order_relaxed);
    taken_bytes.store(0, std::memory_order_relaxed);
    if (const uintptr_t base = offered.exchange(0, std::memory_order_acquire); base != 0)
        unmap_now(reinterpret_cast<void *>(base), offered_bytes.load(std::memory_order_relaxed));
    if (const uintptr_t base = freed_address.exchange(0, std::memory_order_acquire); base != 0)
        unmap_now(reinterpret_cast<void *>(base), freed_bytes.load(std::memory_order_relaxed));
}

void control_memory_after_fork_in_child() {
    control_copies_after_fork_in_child();
    watching.store(false, std::memory_order_relaxed);
    driver_address.store(0, std::memory_order_relaxed);
    state_address.store(0, std::memory_order_relaxed);
    if (offered_shared.exchange(false, std::memory_order_relaxed)) { // the child has none of that (MADV_DONTFORK)
        offered.store(0, std::memory_order_relaxed);
        freed_address.store(0, std::memory_order_relaxed);
    }
    settle_control_memory();
}

} // namespace woodfrog::interpose

// Sanitizers have their own mmap and munmap, which must see every mapping.
#ifndef WOODFROG_SANITIZED

using namespace woodfrog::interpose;

extern "C" {

__attribute__((visibility("default"))) void *mmap(void *address, size_t length, int protection, int flags, int fd,
                                                  off_t offset) noexcept {
    if (__builtin_expect((flags & MAP_POPULATE) != 0, 0) && watching.load(std::memory_order_relaxed) &&
        is_control_state(address, length, protection, flags, fd)) {
        const size_t whole = round_up(length, page_bytes);
        if (whole > learned_bytes.load(std::memory_order_relaxed))
            learned_bytes.store(whole, std::memory_order_relaxed);
        void *memory = take(whole);
        if (memory == nullptr)
            memory = map_now(address, length, protection, flags, fd, offset);
        if (memory != MAP_FAILED) {
            state_bytes.store(whole, std::memory_order_relaxed);
            state_address.store(reinterpret_cast<uintptr_t>(memory), std::memory_order_release);
        }
        return memory;
    }
    return map_now(address, length, protection, flags, fd, offset);
}

__attribute__((visibility("default"), alias("mmap"))) void *mmap64(void *address, size_t length, int protection,
                                                                   int flags, int fd, off_t offset) noexcept;

__attribute__((visibility("default"))) int munmap(void *address, size_t length) noexcept {
    const auto base = reinterpret_cast<uintptr_t>(address);
    if (__builtin_expect(base != 0 && base == state_address.load(std::memory_order_relaxed), 0))
        state_address.store(0, std::memory_order_relaxed);
    if (__builtin_expect(base != 0 && base == driver_address.load(std::memory_order_relaxed), 0)) {
        driver_address.store(0, std::memory_order_relaxed);
        // The target waits for the driver here; the agent has time once it runs again.
        if (watching.load(std::memory_order_relaxed) && freed_address.load(std::memory_order_relaxed) == 0 &&
            round_up(length, page_bytes) == driver_bytes.load(std::memory_order_relaxed)) {
            freed_bytes.store(round_up(length, page_bytes), std::memory_order_relaxed);
            freed_address.store(base, std::memory_order_release);
            return 0;
        }
    }
    return unmap_now(address, length);
}
}

#endif
