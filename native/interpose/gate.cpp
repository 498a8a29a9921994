// The slow sides of the gate: thread records, closing, waiting; see gate.hpp.
#include "gate.hpp"

#include "changes.hpp"
#include "debug.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <new>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace woodfrog::interpose {

namespace detail {
constinit std::atomic<uint32_t> g_gate{kUnprepared};
constinit thread_local ThreadRecord *t_record __attribute__((tls_model("initial-exec"))) = nullptr;
} // namespace detail

namespace {

using detail::g_gate;
using detail::kClosed;
using detail::kFenced;
using detail::kUnprepared;

constinit std::atomic<ThreadRecord *> g_records{nullptr};
constinit std::atomic<uint32_t> g_left{0}; // counts threads that left a closed gate; the closer sleeps on it
constinit pthread_once_t g_key_once = PTHREAD_ONCE_INIT;
pthread_key_t g_key;
constinit std::atomic<bool> g_have_key{false};

int membarrier(int command) {
    return static_cast<int>(syscall(SYS_membarrier, command, 0U, 0));
}

// A thread that ends gives its record back. If it calls the driver again from a later destructor it gets a new one,
// and this runs again.
void give_back_record(void *value) {
    ThreadRecord *record = static_cast<ThreadRecord *>(value);
    detail::t_record = nullptr;
    record->depth.store(0, std::memory_order_release);
    record->passes.store(0, std::memory_order_relaxed);
    record->admission.store(0, std::memory_order_relaxed);
    record->used.store(false, std::memory_order_release);
}

void create_key() {
    g_have_key.store(pthread_key_create(&g_key, &give_back_record) == 0, std::memory_order_release);
}

ThreadRecord *take_record() {
    for (ThreadRecord *record = g_records.load(std::memory_order_acquire); record != nullptr; record = record->next) {
        bool unused = false;
        if (record->used.compare_exchange_strong(unused, true, std::memory_order_acq_rel))
            return record;
    }
    ThreadRecord *record = new ThreadRecord;
    record->used.store(true, std::memory_order_relaxed);
    record->next = g_records.load(std::memory_order_relaxed);
    while (!g_records.compare_exchange_weak(record->next, record, std::memory_order_acq_rel))
        ;
    return record;
}

// What a closed gate still allows a thread, in pieces of work for the GPU, and how many of them it has given: one word,
// so that the agent takes back the rest and learns what came of it at once.
constexpr uint32_t kLeft = 0xffff;
constexpr uint32_t kUsed = kLeft + 1;

// Calls that may give the GPU work which others wait for: launches, copies, and whatever is not known to be harmless.
bool submits(uint32_t function) {
    static constexpr auto kSubmits = [] {
        std::array<bool, static_cast<size_t>(Symbol::count)> table{};
#define WF_WRITES(name) table[static_cast<size_t>(Symbol::name)] = true;
#include "writes.inc"
#undef WF_WRITES
        return table;
    }();
    return kSubmits[function];
}

// Whether an admission lets this call pass the closed gate.
bool uses_admission(ThreadRecord *record) {
    uint32_t admission = record->admission.load(std::memory_order_acquire);
    const bool counts = submits(record->function.load(std::memory_order_relaxed));
    while ((admission & kLeft) != 0) {
        if (!counts ||
            record->admission.compare_exchange_weak(admission, admission + kUsed - 1, std::memory_order_acq_rel))
            return true;
    }
    return false;
}

bool find_straggler(Straggler *straggler) {
    for (ThreadRecord *record = g_records.load(std::memory_order_acquire); record != nullptr; record = record->next) {
        if (record->depth.load(std::memory_order_acquire) == 0 || record->passes.load(std::memory_order_acquire) != 0)
            continue;
        straggler->tid = record->tid.load(std::memory_order_relaxed);
        straggler->symbol = static_cast<Symbol>(record->function.load(std::memory_order_relaxed));
        return true;
    }
    return false;
}

} // namespace

ThreadRecord *detail::register_thread() {
    pthread_once(&g_key_once, &create_key);
    ThreadRecord *record = take_record();
    record->depth.store(0, std::memory_order_relaxed);
    record->tid.store(static_cast<int32_t>(syscall(SYS_gettid)), std::memory_order_relaxed);
    t_record = record;
    if (g_have_key.load(std::memory_order_acquire))
        pthread_setspecific(g_key, record); // fails only without memory; the record is then never used again
    return record;
}

void detail::enter_slow(ThreadRecord *record) {
    for (;;) {
        std::atomic_thread_fence(std::memory_order_seq_cst); // as the closer's barrier: publish, then look
        const uint32_t gate = g_gate.load(std::memory_order_acquire);
        if (gate & kUnprepared) {
            if (!ensure_driver())
                return; // no driver in this process: the call is answered by the table's default
            gate_prepare();
            continue;
        }
        if (!(gate & kClosed) || record->passes.load(std::memory_order_relaxed) != 0 || uses_admission(record))
            return;
        record->waiting.store(true, std::memory_order_release); // first: nobody may see it neither inside nor waiting
        record->depth.store(0, std::memory_order_release);
        leave_slow();
        futex_wait(&g_gate, gate, nullptr);
        record->depth.store(1, std::memory_order_relaxed);
        record->waiting.store(false, std::memory_order_release);
    }
}

void detail::leave_slow() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if ((g_gate.load(std::memory_order_relaxed) & kClosed) == 0)
        return;
    g_left.fetch_add(1, std::memory_order_acq_rel);
    futex_wake_all(&g_left);
}

PassScope::PassScope() {
    record_ = detail::t_record == nullptr ? detail::register_thread() : detail::t_record;
    record_->passes.fetch_add(1, std::memory_order_acq_rel);
}

PassScope::~PassScope() {
    record_->passes.fetch_sub(1, std::memory_order_acq_rel);
}

void gate_prepare() {
    if (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0)
        g_gate.fetch_or(kFenced, std::memory_order_seq_cst);
    g_gate.fetch_and(~kUnprepared, std::memory_order_acq_rel);
}

bool gate_shut() {
    const uint32_t before = g_gate.fetch_or(kClosed, std::memory_order_seq_cst);
    if ((before & kFenced) == 0) {
        // Registered again each time: a process restored by CRIU may have lost the registration, and it costs nothing.
        membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        if (membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0) {
            gate_open();
            return false;
        }
    }
    return true;
}

CloseResult gate_close(Deadline deadline, Straggler *straggler) {
    if (!gate_shut())
        return CloseResult::refused;
    for (;;) {
        const uint32_t seen = g_left.load(std::memory_order_acquire);
        if (!find_straggler(straggler))
            return CloseResult::closed;
        if (std::chrono::steady_clock::now() >= deadline) {
            gate_open();
            return CloseResult::timeout;
        }
        futex_wait(&g_left, seen, &deadline);
    }
}

void gate_open() {
    note_change(); // whatever was done behind it
    g_gate.fetch_and(kUnprepared | kFenced, std::memory_order_seq_cst);
    futex_wake_all(&g_gate);
}

bool gate_is_shut() {
    return (g_gate.load(std::memory_order_acquire) & kClosed) != 0;
}

GateLook gate_look() {
    GateLook look;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (ThreadRecord *record = g_records.load(std::memory_order_acquire); record != nullptr; record = record->next) {
        if (!record->used.load(std::memory_order_acquire) || record->passes.load(std::memory_order_acquire) != 0)
            continue;
        if (record->depth.load(std::memory_order_acquire) != 0)
            ++look.inside;
        else if (record->waiting.load(std::memory_order_acquire))
            ++look.waiting;
    }
    return look;
}

uint32_t gate_admit(uint32_t pieces, Deadline deadline) {
    std::vector<ThreadRecord *> admitted;
    for (ThreadRecord *record = g_records.load(std::memory_order_acquire); record != nullptr; record = record->next) {
        if (record->used.load(std::memory_order_acquire) && record->waiting.load(std::memory_order_acquire)) {
            record->admission.store(std::min(pieces, kLeft), std::memory_order_release);
            admitted.push_back(record);
        }
    }
    if (admitted.empty())
        return 0;
    g_gate.fetch_add(detail::kRound, std::memory_order_seq_cst); // whoever is about to sleep on the old value does not
    futex_wake_all(&g_gate);
    for (;;) {
        const uint32_t seen = g_left.load(std::memory_order_acquire);
        const bool done = std::any_of(admitted.begin(), admitted.end(), [](const ThreadRecord *record) {
            return (record->admission.load(std::memory_order_acquire) & kLeft) == 0 &&
                   record->depth.load(std::memory_order_acquire) == 0;
        });
        if (done || std::chrono::steady_clock::now() >= deadline)
            break;
        futex_wait(&g_left, seen, &deadline);
    }
    uint32_t submitted = 0;
    for (ThreadRecord *record : admitted)
        submitted += record->admission.exchange(0, std::memory_order_seq_cst) / kUsed;
    return submitted;
}

void gate_forget() {
    g_records.store(nullptr, std::memory_order_relaxed); // the parent's records; a page or two is lost
    detail::t_record = nullptr;
    g_gate.store(0, std::memory_order_relaxed);
}

uint64_t gate_launches() {
    uint64_t launches = 0;
    for (ThreadRecord *record = g_records.load(std::memory_order_acquire); record != nullptr; record = record->next)
        launches += record->launches.load(std::memory_order_relaxed);
    return launches;
}

void futex_wait(std::atomic<uint32_t> *word, uint32_t value, const Deadline *deadline) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    timespec until{};
    if (deadline != nullptr) { // steady_clock is CLOCK_MONOTONIC, the clock of FUTEX_WAIT_BITSET
        const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline->time_since_epoch()).count();
        until.tv_sec = static_cast<time_t>(since / 1000000000);
        until.tv_nsec = static_cast<long>(since % 1000000000);
    }
    const int saved = errno;
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value, deadline == nullptr ? nullptr : &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
    errno = saved;
}

void futex_wake_all(std::atomic<uint32_t> *word) {
    const int saved = errno;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    errno = saved;
}

} // namespace woodfrog::interpose
