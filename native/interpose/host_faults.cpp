// A thread that touches host memory which is away; see host_faults.hpp.
#include "host_faults.hpp"

#include "debug.hpp"

#include <cerrno>
#include <climits>
#include <csignal>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

// Read by the handler, which may take no lock; an entry is complete before the count tells of it.
constexpr size_t kMaxRanges = 4096;
struct Range {
    std::atomic<uintptr_t> begin{0}, end{0};
};
constinit Range g_ranges[kMaxRanges];
constinit std::atomic<size_t> g_count{0};
constinit std::atomic<uint32_t> g_away{0}; // the futex: 1 while something is away
struct sigaction g_before;

bool is_away(uintptr_t address) {
    const size_t count = g_count.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i)
        if (address >= g_ranges[i].begin.load(std::memory_order_relaxed) &&
            address < g_ranges[i].end.load(std::memory_order_relaxed))
            return true;
    return false;
}

void pass_on(int number, siginfo_t *info, void *context) {
    if ((g_before.sa_flags & SA_SIGINFO) != 0)
        return g_before.sa_sigaction(number, info, context);
    if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN)
        return g_before.sa_handler(number);
    // The default for a fault is the end, whatever SIG_IGN says: the instruction faults again without us.
    signal(SIGSEGV, SIG_DFL);
}

void on_fault(int number, siginfo_t *info, void *context) {
    const int error = errno;
    // An instruction that faulted just before the memory came back finds g_away clear and tries again.
    if (info->si_code > 0 && is_away(reinterpret_cast<uintptr_t>(info->si_addr))) {
        while (g_away.load(std::memory_order_acquire) != 0)
            syscall(SYS_futex, &g_away, FUTEX_WAIT, 1, nullptr, nullptr, 0);
        errno = error;
        return;
    }
    errno = error;
    pass_on(number, info, context);
}

} // namespace

bool host_waits_for(CUdeviceptr address, size_t size_bytes) {
    if (g_away.load(std::memory_order_relaxed) == 0) {
        g_count.store(0, std::memory_order_release); // those of the time before, which late faults may still have met
        g_away.store(1, std::memory_order_release);
        struct sigaction ours{};
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
        sigfillset(&ours.sa_mask);
        if (sigaction(SIGSEGV, &ours, &g_before) != 0) {
            debug("no handler for faults of host memory (errno %d)", errno);
            return false;
        }
    }
    const size_t at = g_count.load(std::memory_order_relaxed);
    if (at == kMaxRanges)
        return false;
    g_ranges[at].begin.store(address, std::memory_order_relaxed);
    g_ranges[at].end.store(address + size_bytes, std::memory_order_relaxed);
    g_count.store(at + 1, std::memory_order_release);
    return true;
}

void host_goes_on() {
    if (g_away.load(std::memory_order_relaxed) == 0)
        return;
    struct sigaction now{};
    // One that the application has put in place meanwhile stays.
    if (sigaction(SIGSEGV, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault)
        sigaction(SIGSEGV, &g_before, nullptr);
    g_away.store(0, std::memory_order_release);
    syscall(SYS_futex, &g_away, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace woodfrog::interpose
