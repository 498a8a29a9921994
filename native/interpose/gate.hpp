// The gate: every wrapped driver call goes through it, and a quiesce closes it.
//
// The hot path is two stores and a load, all of the calling thread's own or read-mostly memory: a thread publishes that
// it is inside and then looks whether the gate is closed; the closer publishes that it is closed, makes every running
// thread pass a memory barrier (membarrier, one interrupt per core that runs this process) and then looks who is
// inside. One of the two always sees the other. It must never take a lock or touch a shared cache line on the hot path.
#pragma once

#include "driver.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>

namespace woodfrog::interpose {

namespace shadow {
class Recent;
}

using Deadline = std::chrono::steady_clock::time_point;

// One per thread that has called the driver. Written by its thread only; never freed, but used again after a thread's
// end.
struct alignas(64) ThreadRecord {
    std::atomic<uint32_t> depth{0};    // > 0: inside; calls nest when the driver calls back
    std::atomic<uint32_t> function{0}; // Symbol of the outermost call
    std::atomic<uint64_t> launches{0};
    std::atomic<uint32_t> passes{0}; // > 0: not stopped by a closed gate (agent, host callbacks of the driver)
    std::atomic<int32_t> tid{0};
    std::atomic<bool> used{false};
    std::atomic<bool> waiting{false};   // stopped by a closed gate
    std::atomic<uint32_t> admission{0}; // what an admitted thread may do and has done; the agent writes it too
    ThreadRecord *next = nullptr;
    shadow::Recent *recent = nullptr; // the thread's own; stays with the record
};

namespace detail {
// Bits of g_gate. Zero is the common case: known driver, open gate.
inline constexpr uint32_t kUnprepared = 1; // no driver known yet
inline constexpr uint32_t kClosed = 2;
inline constexpr uint32_t kFenced = 4; // membarrier is not to be had: every call pays for a fence, on the slow path
inline constexpr uint32_t kRound = 8;  // the bits from here on count admissions while the gate is closed
extern std::atomic<uint32_t> g_gate;
extern constinit thread_local ThreadRecord *t_record __attribute__((tls_model("initial-exec")));
ThreadRecord *register_thread();
void enter_slow(ThreadRecord *record);
void leave_slow();
} // namespace detail

class GateScope {
  public:
    [[gnu::always_inline]] explicit GateScope(Symbol symbol) {
        ThreadRecord *record = detail::t_record;
        if (record == nullptr) [[unlikely]]
            record = detail::register_thread();
        record_ = record;
        const uint32_t depth = record->depth.load(std::memory_order_relaxed);
        record->depth.store(depth + 1, std::memory_order_relaxed);
        if (depth != 0)
            return; // a call made by the driver itself, or by a callback that it runs on this thread
        record->function.store(static_cast<uint32_t>(symbol), std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (detail::g_gate.load(std::memory_order_relaxed) != 0) [[unlikely]]
            detail::enter_slow(record);
    }
    [[gnu::always_inline]] ~GateScope() {
        const uint32_t depth = record_->depth.load(std::memory_order_relaxed) - 1;
        record_->depth.store(depth, std::memory_order_release);
        if (depth != 0)
            return;
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (detail::g_gate.load(std::memory_order_relaxed) != 0) [[unlikely]]
            detail::leave_slow();
    }
    GateScope(const GateScope &) = delete;
    GateScope &operator=(const GateScope &) = delete;

    // True when this call was made from within another driver call.
    bool nested() const { return record_->depth.load(std::memory_order_relaxed) > 1; }
    ThreadRecord *record() const { return record_; }

  private:
    ThreadRecord *record_;
};

// A launch of kernels. The seam for access sets and copy-on-write: what a launch may write is to be decided here,
// between the gate and the driver.
class LaunchScope : public GateScope {
  public:
    [[gnu::always_inline]] explicit LaunchScope(Symbol symbol) : GateScope(symbol) {
        std::atomic<uint64_t> &launches = record()->launches;
        launches.store(launches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
};

// While it lives, the calling thread is not stopped by a closed gate.
class PassScope {
  public:
    PassScope();
    ~PassScope();
    PassScope(const PassScope &) = delete;
    PassScope &operator=(const PassScope &) = delete;

  private:
    ThreadRecord *record_;
};

enum class CloseResult { closed, timeout, refused };

struct Straggler {
    int32_t tid = 0;
    Symbol symbol = Symbol::count;
};

// The driver has become known: calls may take the fast path.
void gate_prepare();
// Closes the gate and waits until no thread is inside. On timeout and refusal the gate is open again; a timeout names
// one thread that was inside. `refused`: the kernel gave no memory barrier.
CloseResult gate_close(Deadline deadline, Straggler *straggler);
void gate_open();

// The two halves of a close, for processes that come to rest together: closing without waiting (false: refused, the
// gate is open), and looking who is there.
bool gate_shut();
bool gate_is_shut();
struct GateLook {
    uint32_t waiting = 0; // threads stopped by the gate
    uint32_t inside = 0;  // threads inside the driver
};
GateLook gate_look();
// With the gate closed: lets every waiting thread go on until it has made so many calls that give the GPU work; calls
// before and between them do not count. Returns once one of them has made all of them, or at the deadline, with the
// gate closed to all of them again; threads may still be inside. How often they gave the GPU work.
uint32_t gate_admit(uint32_t pieces, Deadline deadline);
// In a forked child: the gate is open for good and knows no threads.
void gate_forget();
uint64_t gate_launches();

// Waits until *word differs from `value` or the deadline; may wake without cause. Wakers call futex_wake_all.
void futex_wait(std::atomic<uint32_t> *word, uint32_t value, const Deadline *deadline);
void futex_wake_all(std::atomic<uint32_t> *word);

} // namespace woodfrog::interpose
