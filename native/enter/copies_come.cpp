// How Copies comes into a process: see copies.hpp.
#include "copies.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <linux/futex.h>
#include <linux/prctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "library.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {

namespace blob {
extern const unsigned char code[];
extern const std::size_t code_size;
} // namespace blob

namespace {

constexpr std::uint64_t thread_flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
constexpr const char *changed = "its driver's reference to memcpy was changed by somebody else";

std::uint64_t ticks_per_us() {
    const double begun_s = now_s();
    const std::uint64_t begun = __builtin_ia32_rdtsc();
    double now = begun_s;
    while (now - begun_s < 1e-3)
        now = now_s();
    return std::max<std::uint64_t>(
        1, static_cast<std::uint64_t>(static_cast<double>(__builtin_ia32_rdtsc() - begun) / ((now - begun_s) * 1e6)));
}

} // namespace

// Asked before anything is there: a filter may end the process for a call.
std::string Copies::forbidden(const Filters &filters) {
    constexpr std::uint64_t anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    constexpr std::uint64_t read_write = PROT_READ | PROT_WRITE;
    constexpr std::uint64_t woken = blob::control_at + offsetof(blob::Control, woken);
    const struct {
        std::uintptr_t behind;
        long number;
        Arguments arguments;
    } calls[] = {
        {0, SYS_mmap, {blob::place, blob::kept_bytes, read_write, anonymous, ~0ull, 0}},
        {0, SYS_mmap, {blob::stacks_at, blob::all_stacks_bytes, read_write, anonymous, ~0ull, 0}},
        {0, SYS_mprotect, {blob::place, blob::code_bytes, PROT_READ | PROT_EXEC}},
        {0, SYS_madvise, {blob::control_at, blob::page_bytes, MADV_WIPEONFORK}},
        {0, SYS_prctl, {PR_GET_TSC, blob::control_at}},
        {0, SYS_clone, {thread_flags, blob::stacks_at + blob::stack_bytes}},
        {0, SYS_munmap, {blob::stacks_at, blob::all_stacks_bytes}},
        {blob::place, SYS_prctl, {PR_SET_NAME, blob::place}},
        {blob::place, SYS_futex, {woken, FUTEX_WAIT_PRIVATE, 0, blob::stacks_at}},
        {blob::place, SYS_futex, {woken, FUTEX_WAKE_PRIVATE, INT_MAX}},
        {blob::place, SYS_futex, {blob::stacks_at, FUTEX_WAKE_OP_PRIVATE, 1, 1, blob::stacks_at, 0}},
        {blob::place, SYS_sched_yield, {}},
        {blob::place, SYS_exit, {}},
    };
    for (const auto &one : calls) {
        const Filtered found = filters(one.behind, one.number, one.arguments);
        if (found == Filtered::unknown)
            return "it has a seccomp filter that cannot be read: that takes CAP_SYS_ADMIN, and a daemon without a "
                   "filter";
        if (found == Filtered::refused)
            return "its seccomp filter does not let through what woodfrog would call";
    }
    return "";
}

std::string Copies::come(const Caller &caller, const Filters &filters, bool ready) {
    std::string why_not;
    if (drivers_.empty())
        return "the driver does not name its threads";
    if (restores_)
        find_memory();
    if (restores_ && ranges_ == 0)
        return "where its driver's state lies was not seen when it was checkpointed";
    const auto slot = driver_reference(pid_, "memcpy", why_not);
    if (!slot)
        return why_not;
    if (std::string reason = forbidden(filters); !reason.empty())
        return reason;
    facts_.slot = *slot;
    facts_.ticks_per_us = ticks_per_us();
    if (!read_memory(pid_, *slot, &facts_.replaced, sizeof facts_.replaced))
        return "its driver's reference to memcpy cannot be read";
    if (contains(facts_.replaced)) // and not by the note of an earlier visit, else it would be back
        return changed;
    if (!is_resolved(pid_, facts_.replaced))
        return "its driver has not called memcpy yet";
    if (std::string reason = led_elsewhere(); !reason.empty())
        return reason;

    std::string reason = ready ? "" : put_code(caller);
    if (!reason.empty())
        return reason;
    reason = set_up(caller);
    if (reason.empty())
        reason = map_stacks(caller);
    if (reason.empty())
        reason = start_threads(caller);
    bool was_led = ready;
    if (reason.empty()) {
        was_led = true;
        reason = lead();
    }
    if (!reason.empty()) {
        // Nobody but our threads, which have ended, was ever in it.
        if (const std::string stays = remove(caller); stays.empty() && !was_led)
            caller(SYS_munmap, {blob::place, blob::kept_bytes});
    }
    return reason;
}

// The code, not executable before all of it is there.
std::string Copies::put_code(const Caller &caller) {
    const std::int64_t mapped = caller(SYS_mmap, {blob::place, blob::kept_bytes, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, ~0ull, 0})
                                    .value();
    fault_point("copy_mapped");
    if (mapped < 0)
        return cannot("it gets no memory for threads that copy", mapped);
    if (mapped != static_cast<std::int64_t>(blob::place)) { // of a kernel before 4.17
        caller(SYS_munmap, {static_cast<std::uint64_t>(mapped), blob::kept_bytes});
        return "it gets no memory at the place that woodfrog looks at";
    }
    std::memcpy(&header_, blob::code, sizeof header_);
    std::string reason;
    if (!write_memory(pid_, blob::place, blob::code, blob::code_size))
        reason = "its memory cannot be written";
    fault_point("copy_written");
    if (reason.empty()) {
        const std::int64_t result =
            caller(SYS_mprotect, {blob::place, blob::code_bytes, PROT_READ | PROT_EXEC}).value();
        if (result < 0)
            reason = cannot("it may not have code added", result);
    }
    fault_point("copy_is_code");
    if (!reason.empty())
        caller(SYS_munmap, {blob::place, blob::kept_bytes});
    return reason;
}

// What the code reads, while nobody is led there.
std::string Copies::set_up(const Caller &caller) {
    // A forked child has none of the threads: it finds zeros, and everything is the C library's.
    std::int64_t result = caller(SYS_madvise, {blob::control_at, blob::page_bytes, MADV_WIPEONFORK}).value();
    fault_point("copy_wiped");
    if (result < 0)
        return cannot("its kernel cannot clear memory in a forked child", result);
    // The code reads the processor's time stamp counter, which a process can forbid itself (with a signal).
    constexpr std::uint64_t told_at = blob::control_at + offsetof(blob::Control, installed);
    result = caller(SYS_prctl, {PR_GET_TSC, told_at}).value();
    std::int32_t counter = 0;
    if (result < 0 || !read_memory(pid_, told_at, &counter, sizeof counter) || counter != PR_TSC_ENABLE)
        return "it may not read the time stamp counter";
    // Not more than that: a thread of the driver that was interrupted may still be in a copy.
    std::uint64_t drivers[blob::most_drivers] = {};
    std::copy_n(drivers_.begin(), std::min<std::size_t>(drivers_.size(), blob::most_drivers), drivers);
    std::copy(std::begin(memory_), std::end(memory_), facts_.ranges);
    constexpr std::uint64_t none[3] = {};
    static_assert(sizeof none ==
                  sizeof(blob::Control) - offsetof(blob::Control, copies) - sizeof(blob::Control::stacks));
    if (!write_memory(pid_, blob::facts_at, &facts_, sizeof facts_) ||
        !write_control(offsetof(blob::Control, drivers), drivers, sizeof drivers) ||
        !write_control(offsetof(blob::Control, installed), none, sizeof(std::uint32_t)) ||
        !write_control(offsetof(blob::Control, slow), none, 2 * sizeof(std::uint32_t)) ||
        !write_control(offsetof(blob::Control, copies), none, sizeof none) ||
        !write_control(offsetof(blob::Control, woken), none, sizeof(std::uint32_t)))
        return "its memory cannot be written";
    fault_point("copy_set_up");
    return "";
}

std::string Copies::map_stacks(const Caller &caller) {
    if (stacks_mapped_)
        return "";
    const std::int64_t result = caller(SYS_mmap, {blob::stacks_at, blob::all_stacks_bytes, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, ~0ull, 0})
                                    .value();
    fault_point("copy_stacks");
    stacks_mapped_ = result == static_cast<std::int64_t>(blob::stacks_at);
    if (result >= 0 && !stacks_mapped_)
        caller(SYS_munmap, {static_cast<std::uint64_t>(result), blob::all_stacks_bytes});
    return stacks_mapped_ ? "" : cannot("it gets no stacks for threads that copy", std::min<std::int64_t>(result, 0));
}

std::string Copies::start_threads(const Caller &caller) {
    int error = 0;
    for (unsigned number = 0; number < wanted_; number++) {
        const pid_t tid = start(caller, number == 0, error);
        if (tid == 0)
            break;
        helpers_.push_back(tid);
        if (number == 0)
            fault_point("copy_first_thread");
    }
    fault_point("copy_threads");
    if (helpers_.size() == wanted_)
        return "";
    const std::string limits = error == EAGAIN ? " (RLIMIT_NPROC, or pids.max of its control groups)" : "";
    if (helpers_.empty())
        return cannot("it gets no threads that copy", -error) + limits;
    fewer_ = cannot(("it gets only " + std::to_string(helpers_.size()) + " of " + std::to_string(wanted_) +
                     " threads that copy")
                        .c_str(),
                    -error) +
             limits;
    return "";
}

// A new thread, which stands before its first instruction; 0 with errno in `error` when there is none to be had.
pid_t Copies::start(const Caller &caller, bool leads, int &error) {
    std::uint32_t stacks[blob::most_helpers];
    error = EFAULT;
    if (!read_memory(pid_, blob::control_at + offsetof(blob::Control, stacks), stacks, sizeof stacks))
        return 0;
    const auto number = static_cast<std::size_t>(std::find(std::begin(stacks), std::end(stacks), 0u) - stacks);
    if (number == blob::most_helpers)
        return 0;
    const blob::StackTop top{blob::place + header_.help_at, leads, number, 0};
    const std::uint64_t top_at = blob::stacks_at + (number + 1) * blob::stack_bytes - sizeof top;
    const std::size_t word_at = offsetof(blob::Control, stacks) + number * sizeof(std::uint32_t);
    constexpr std::uint32_t its_own = 1, nobodys = 0;
    if (!write_memory(pid_, top_at, &top, sizeof top) || !write_control(word_at, &its_own, sizeof its_own))
        return 0;
    const Outcome outcome = caller(SYS_clone, {thread_flags, top_at});
    int status = 0;
    if (outcome.made && outcome.result >= 0 && outcome.started != 0)
        return wait_for(outcome.started, status) == Waited::stopped ? outcome.started : 0;
    error = outcome.value() < 0 ? static_cast<int>(-outcome.value()) : ESRCH;
    if (!outcome.gone && outcome.value() < 0) // else a thread may have been made
        write_control(word_at, &nobodys, sizeof nobodys);
    return 0;
}

// The threads run, and the first has led the driver's reference to our code once it makes its first system call.
std::string Copies::lead() {
    for (std::size_t number = 1; number < helpers_.size(); number++)
        ptrace(PTRACE_CONT, helpers_[number], nullptr, nullptr);
    const pid_t first = helpers_.front();
    int status = 0;
    void *signal = nullptr;
    for (bool there = false; !there; signal = taken_signal(status)) {
        ptrace(PTRACE_SYSCALL, first, nullptr, signal);
        if (wait_for(first, status) != Waited::stopped) {
            std::erase(helpers_, first);
            return "it ended meanwhile";
        }
        __ptrace_syscall_info info{};
        there = WSTOPSIG(status) == (SIGTRAP | 0x80) &&
                ptrace(PTRACE_GET_SYSCALL_INFO, first, reinterpret_cast<void *>(sizeof info), &info) > 0 &&
                info.op == PTRACE_SYSCALL_INFO_ENTRY && info.entry.nr == SYS_prctl;
    }
    fault_point("copy_led");
    std::uint32_t installed = blob::not_yet;
    read_memory(pid_, blob::control_at + offsetof(blob::Control, installed), &installed, sizeof installed);
    ptrace(PTRACE_CONT, first, nullptr, nullptr);
    fault_point("copy_running");
    if (installed == blob::installed)
        return "";
    return installed == blob::not_writable ? "its driver's reference to memcpy is read-only" : changed;
}

} // namespace woodfrog::enter

#endif
