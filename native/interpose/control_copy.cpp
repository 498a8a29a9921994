// See control_copy.hpp. A copy is cut into pieces that whoever is free takes, the driver's thread among them; it
// returns when all are done. No lock: the driver may be stopped anywhere by a dump, and the threads with it.
#include "control_copy.hpp"

#include "control_memory.hpp"
#include "debug.hpp"
#include "driver.hpp"
#include "elf_lookup.hpp"
#include "thread.hpp"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr size_t least_bytes = size_t{512} << 10; // less is done before anybody is awake
constexpr size_t piece_bytes = size_t{128} << 10;
constexpr size_t stack_bytes = size_t{256} << 10; // as the agent's: the program's thread-local storage is in it
// With five copying a piece of 2 MiB takes about as long as the GPU's copy of the next one.
constexpr int most_helpers = 4;
constexpr int settable_helpers = 16;
// The driver's copies come some ten microseconds after one another: so long a helper looks for the next one.
constexpr int64_t patience_ns = 100'000;
// Where helpers have no processor the driver waits for the piece that one has begun. Slower than this is slower than
// alone.
constexpr size_t least_bytes_per_us = 2000;
#ifndef WOODFROG_SANITIZED
constexpr int most_slow_copies = 4;
#else
constexpr int most_slow_copies = INT_MAX; // all are slow then
#endif

struct Copy {
    uint8_t *to;
    const uint8_t *from;
    size_t size;
};

Copy copy; // written while no piece of it can be taken
// Which copy (upper half), its pieces, and the next one that nobody has: one word, so that a piece is never taken from
// a copy that is over.
std::atomic<uint64_t> pieces{0};
std::atomic<uint32_t> done{0};
std::atomic<bool> busy{false};
std::atomic<uint32_t> woken{0}; // what sleeping helpers wait for
std::atomic<int> asleep{0};
std::atomic<uintptr_t> epoch{0}; // of the operation: a helper of another one ends

std::atomic<void **> slot{nullptr}; // the driver's reference
void *replaced;                     // what was in it
std::atomic<int> helpers{0}, slow_copies{0};
std::atomic<uint64_t> copied_bytes{0};

uint64_t packed(uint32_t copy_number, uint32_t count) {
    return uint64_t{copy_number} << 32 | uint64_t{count} << 16;
}

int64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void relax() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t> &word, int operation, uint32_t value) {
    static_assert(sizeof(word) == sizeof(uint32_t));
    return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

void take_pieces() {
    uint64_t seen = pieces.load(std::memory_order_acquire);
    while ((seen & 0xffff) < (seen >> 16 & 0xffff)) {
        if (!pieces.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire))
            continue;
        const size_t begin = (seen & 0xffff) * piece_bytes;
        memcpy(copy.to + begin, copy.from + begin, std::min(piece_bytes, copy.size - begin));
        done.fetch_add(1, std::memory_order_release);
        seen = pieces.load(std::memory_order_acquire);
    }
}

void *help(void *argument) {
    const auto mine = reinterpret_cast<uintptr_t>(argument);
    int64_t idle_since = now_ns();
    uint32_t call = woken.load(std::memory_order_acquire);
    while (epoch.load(std::memory_order_acquire) == mine) {
        take_pieces();
        if (const uint32_t now = woken.load(std::memory_order_acquire); now != call) {
            call = now;
            idle_since = now_ns();
        } else if (now_ns() - idle_since < patience_ns) {
            relax();
        } else {
            asleep.fetch_add(1);
            futex(woken, FUTEX_WAIT, call); // returns at once if there was a call since
            asleep.fetch_sub(1);
        }
    }
    return nullptr;
}

// The driver's calls come one after another, on any of its threads. Only it knows; a sanitizer is told here.
struct InOrder {
#ifdef WOODFROG_SANITIZED
    static inline std::atomic<int> order{0};
    InOrder() { order.fetch_add(1, std::memory_order_acq_rel); }
    ~InOrder() { order.fetch_add(1, std::memory_order_acq_rel); }
#endif
};

void call_helpers() {
    woken.fetch_add(1); // before it is looked who sleeps: whoever goes to sleep now sees it
    if (asleep.load() > 0)
        futex(woken, FUTEX_WAKE, INT_MAX);
}

// What the driver calls instead of memcpy. Only its control state is copied together: of memory of the application's a
// page may be protected, and its handler expects the fault on the thread that made the call; our threads block signals.
void *copy_together(void *to, const void *from, size_t size) {
    [[maybe_unused]] const InOrder in_order;
    const size_t count = (size + piece_bytes - 1) / piece_bytes;
    if (size < least_bytes || count > 0xffff || !(is_control_memory(to, size) || is_control_memory(from, size)) ||
        helpers.load(std::memory_order_relaxed) == 0 ||
        slow_copies.load(std::memory_order_relaxed) >= most_slow_copies ||
        busy.exchange(true, std::memory_order_acquire))
        return memcpy(to, from, size);
    const int64_t begin_ns = now_ns();
    copy = {static_cast<uint8_t *>(to), static_cast<const uint8_t *>(from), size};
    done.store(0, std::memory_order_relaxed);
    const auto number = static_cast<uint32_t>(pieces.load(std::memory_order_relaxed) >> 32);
    pieces.store(packed(number + 1, static_cast<uint32_t>(count)), std::memory_order_release);
    call_helpers();
    take_pieces();
    for (int looks = 0; done.load(std::memory_order_acquire) != count; ++looks) {
        if (looks < 1000)
            relax();
        else
            sched_yield(); // a helper has no processor, perhaps because this loop has it
    }
    const auto took_us = static_cast<size_t>((now_ns() - begin_ns) / 1000);
    if (took_us > size / least_bytes_per_us)
        slow_copies.fetch_add(1, std::memory_order_relaxed);
    copied_bytes.fetch_add(size, std::memory_order_relaxed);
    busy.store(false, std::memory_order_release);
    return to;
}

int wanted_helpers() {
    if (const char *wanted = getenv("WOODFROG_CONTROL_COPIES"); wanted != nullptr)
        return std::clamp(atoi(wanted), 0, settable_helpers);
    cpu_set_t processors;
    if (sched_getaffinity(0, sizeof(processors), &processors) != 0)
        return 0;
    return std::min(CPU_COUNT(&processors) / 2, most_helpers);
}

} // namespace

void begin_control_copies() {
    if (slot.load(std::memory_order_relaxed) != nullptr || !ensure_driver())
        return;
    const int wanted = wanted_helpers();
    void **reference = wanted == 0 ? nullptr : elf_reference(reinterpret_cast<void *>(WF_REAL(cuInit)), "memcpy");
    if (reference == nullptr)
        return;
    slow_copies.store(0, std::memory_order_relaxed);
    copied_bytes.store(0, std::memory_order_relaxed);
    const uintptr_t mine = epoch.load(std::memory_order_relaxed);
    int started = 0;
    while (started < wanted && start_thread("woodfrog-copy", &help, reinterpret_cast<void *>(mine), stack_bytes) == 0)
        ++started;
    if (started == 0)
        return;
    helpers.store(started, std::memory_order_relaxed);
    replaced = __atomic_load_n(reference, __ATOMIC_RELAXED);
    __atomic_store_n(reference, reinterpret_cast<void *>(&copy_together), __ATOMIC_RELEASE);
    slot.store(reference, std::memory_order_relaxed);
}

void end_control_copies() {
    void **reference = slot.exchange(nullptr, std::memory_order_relaxed);
    if (reference == nullptr)
        return;
    // The loader may have resolved it meanwhile; then it is right already.
    void *ours = reinterpret_cast<void *>(&copy_together);
    __atomic_compare_exchange_n(reference, &ours, replaced, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    debug("%d threads helped with %llu bytes of the driver's copies%s", helpers.exchange(0),
          static_cast<unsigned long long>(copied_bytes.load(std::memory_order_relaxed)),
          slow_copies.load(std::memory_order_relaxed) >= most_slow_copies ? ", until they had no processor" : "");
    epoch.fetch_add(1, std::memory_order_release);
    call_helpers();
}

void control_copies_after_fork_in_child() {
    asleep.store(0, std::memory_order_relaxed);
    busy.store(false, std::memory_order_relaxed);
    end_control_copies();
}

} // namespace woodfrog::interpose
