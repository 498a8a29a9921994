// See copies.hpp.
#include "copies.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <linux/futex.h>
#include <linux/prctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "library.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {

namespace blob {
extern const unsigned char code[];
extern const std::size_t code_size;
} // namespace blob

namespace {

constexpr const char *thread_name = "woodfrog-copy";
constexpr std::uint64_t thread_flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
constexpr const char *changed = "its driver's reference to memcpy was changed by somebody else";
constexpr const char *no_thread = "no thread of the driver stood where it could make calls for it";
std::uint64_t ticks_per_us() {
    const double begun_s = now_s();
    const std::uint64_t begun = __builtin_ia32_rdtsc();
    double now = begun_s;
    while (now - begun_s < 1e-3)
        now = now_s();
    return std::max<std::uint64_t>(
        1, static_cast<std::uint64_t>(static_cast<double>(__builtin_ia32_rdtsc() - begun) / ((now - begun_s) * 1e6)));
}

// Of a call: what the kernel gave, or why it could not be made.
std::int64_t result_of(const Outcome &outcome) {
    return outcome.made ? outcome.result : outcome.gone ? -ESRCH : outcome.refused ? -EPERM : -EFAULT;
}

std::string cannot(const char *what, std::int64_t error) {
    return std::string(what) + ": " + std::strerror(static_cast<int>(-error));
}

} // namespace

Copies::Copies(pid_t pid, unsigned threads, bool restores, std::uint64_t idle_s)
    : pid_(pid), wanted_(std::min(threads, blob::most_helpers)), restores_(restores), state_(State::waiting) {
    facts_.idle_s = idle_s;
    if (wanted_ == 0 && !is_at_work())
        state_ = State::nothing;
}

void Copies::give_up(const std::string &reason) {
    state_ = State::over;
    reason_ = reason;
}

void Copies::abandon(const std::string &reason) {
    if (state_ != State::nothing)
        give_up(reason);
    helpers_.clear();
}

// What is at our address is the process's word: it may be anything, and is used only if it is as we would have left it.
Copies::Place Copies::look() {
    constexpr std::uint64_t end = blob::stacks_at + blob::all_stacks_bytes;
    auto maps = mappings(pid_);
    std::erase_if(maps, [](const Mapping &one) { return one.begin >= end || one.end <= blob::place; });
    stacks_mapped_ = false;
    if (maps.empty())
        return Place::empty;
    const Mapping &code = maps.front();
    if (code.begin != blob::place || maps.back().end > end ||
        !std::all_of(maps.begin(), maps.end(), [](const Mapping &one) { return one.is_anonymous(); }))
        return Place::foreign;
    if (code.writable && !code.executable && code.end == blob::stacks_at)
        return Place::unfinished;
    std::uint64_t reached = blob::facts_at;
    for (const Mapping &one : maps) {
        if (one.begin == blob::place)
            continue;
        if (one.begin != reached || !one.writable || one.executable)
            return Place::foreign;
        reached = one.end;
    }
    stacks_mapped_ = reached == end;
    blob::Facts found{};
    if (code.end != blob::facts_at || code.writable || !code.executable ||
        (reached != blob::stacks_at && reached != end) || !read_memory(pid_, blob::place, &header_, sizeof header_) ||
        header_.magic != blob::magic || header_.copy_at >= blob::code_bytes || header_.help_at >= blob::code_bytes ||
        !read_memory(pid_, blob::facts_at, &found, sizeof found))
        return Place::foreign;
    found.idle_s = facts_.idle_s;
    facts_ = found;
    return Place::ready;
}

// Whether there is anything to end: code that waits for nobody is no such thing.
bool Copies::is_at_work() {
    const Place found = look();
    return found == Place::unfinished || (found == Place::ready && (stacks_mapped_ || is_led_here()));
}

void Copies::begin(const Caller &caller, const Filters &filters, bool only_clean) {
    state_ = State::over;
    if (only_clean)
        reason_ = no_thread;
    const Place found = look();
    if (const std::string reason = clean(caller, found); !reason.empty()) {
        reason_ = reason;
        return;
    }
    if (wanted_ == 0)
        reason_.clear();
    if (wanted_ == 0 || only_clean)
        return;
    reason_ = come(caller, filters, found == Place::ready);
    if (reason_.empty())
        state_ = State::in;
}

void Copies::end(const Caller &caller) {
    state_ = State::over;
    threads_ = helpers_.size();
    if (restores_) { // the driver has let go of it
        constexpr blob::Range none[blob::most_ranges] = {};
        write_memory(pid_, blob::facts_at + offsetof(blob::Facts, ranges), none, sizeof none);
    }
    reason_ = remove(caller);
}

// What an earlier visit left. Only the process itself can have changed it, and only it would suffer.
std::string Copies::clean(const Caller &caller, Place found) {
    if (found == Place::foreign)
        return "something of its own lies where woodfrog would put its code, or what an earlier visit left is damaged";
    if (found == Place::unfinished) { // it was no code yet, so nobody is in it
        const std::int64_t result = result_of(caller(SYS_munmap, {blob::place, blob::kept_bytes}));
        cleaned_ = result >= 0;
        return result < 0 ? cannot("what an earlier visit left in it cannot be unmapped", result) : "";
    }
    if (found == Place::ready && (stacks_mapped_ || is_led_here())) {
        if (std::string reason = remove(caller); !reason.empty())
            return reason;
        cleaned_ = true;
    }
    return "";
}

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
    if (!read_memory(pid_, *slot, &facts_.replaced, sizeof facts_.replaced) || contains(facts_.replaced))
        return "its driver's reference to memcpy cannot be read";
    if (!is_resolved(pid_, facts_.replaced))
        return "its driver has not called memcpy yet";

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
    const std::int64_t mapped =
        result_of(caller(SYS_mmap, {blob::place, blob::kept_bytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, ~0ull, 0}));
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
            result_of(caller(SYS_mprotect, {blob::place, blob::code_bytes, PROT_READ | PROT_EXEC}));
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
    std::int64_t result = result_of(caller(SYS_madvise, {blob::control_at, blob::page_bytes, MADV_WIPEONFORK}));
    fault_point("copy_wiped");
    if (result < 0)
        return cannot("its kernel cannot clear memory in a forked child", result);
    // The code reads the processor's time stamp counter, which a process can forbid itself (with a signal).
    constexpr std::uint64_t told_at = blob::control_at + offsetof(blob::Control, installed);
    result = result_of(caller(SYS_prctl, {PR_GET_TSC, told_at}));
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
    const std::int64_t result =
        result_of(caller(SYS_mmap, {blob::stacks_at, blob::all_stacks_bytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, ~0ull, 0}));
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
    return helpers_.empty() ? cannot("it gets no threads that copy", -error) : "";
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
    error = result_of(outcome) < 0 ? static_cast<int>(-result_of(outcome)) : ESRCH;
    if (!outcome.gone && result_of(outcome) < 0) // else a thread may have been made
        write_control(word_at, &nobodys, sizeof nobodys);
    return 0;
}

// The threads run, and the first has led the driver's reference to our code once it makes its first system call.
std::string Copies::lead() {
    for (std::size_t number = 1; number < helpers_.size(); number++)
        ptrace(PTRACE_CONT, helpers_[number], nullptr, nullptr);
    const pid_t first = helpers_.front();
    int status = 0;
    for (bool there = false; !there;) {
        ptrace(PTRACE_SYSCALL, first, nullptr, nullptr);
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

// What is at work. Code, facts and control stay: a thread that a signal has interrupted there may come back to them.
std::string Copies::remove(const Caller &caller) {
    if (std::string reason = send_home(); !reason.empty())
        return reason;
    fault_point("copy_home");
    if (is_led_here()) {
        // Nobody of ours is there to change it back: in a child, or if the threads could not.
        int error = 0;
        std::string reason = map_stacks(caller);
        const pid_t tid = reason.empty() ? start(caller, false, error) : 0;
        if (tid == 0)
            return reason.empty() ? cannot("the driver's reference to memcpy cannot be brought back", -error) : reason;
        ptrace(PTRACE_CONT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    if (is_led_here())
        return "the driver's reference to memcpy cannot be brought back";
    std::uint32_t stacks[blob::most_helpers];
    if (!read_memory(pid_, blob::control_at + offsetof(blob::Control, stacks), stacks, sizeof stacks))
        return "its memory cannot be read";
    if (std::any_of(std::begin(stacks), std::end(stacks), [](std::uint32_t one) { return one != 0; }))
        return "a thread that copied has not ended: its stack stays";
    if (!stacks_mapped_)
        return "";
    const std::int64_t result = result_of(caller(SYS_munmap, {blob::stacks_at, blob::all_stacks_bytes}));
    fault_point("copy_unmapped");
    stacks_mapped_ = result < 0;
    return result < 0 ? cannot("the stacks of the threads that copied cannot be unmapped", result) : "";
}

// All our threads have ended when this returns, between two pieces of a copy.
std::string Copies::send_home() {
    find_threads();
    blob::Control last{};
    const std::uint32_t word = blob::go_home;
    if (!write_control(offsetof(blob::Control, woken), &word, sizeof word))
        return "its memory cannot be written";
    fault_point("copy_go_home");
    for (const pid_t tid : std::vector<pid_t>(helpers_)) {
        // Who sleeps finds on the word that it waits for another one than it fell asleep with.
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    helpers_.clear();
    if (read_memory(pid_, blob::control_at, &last, sizeof last)) {
        copies_ = last.copies;
        copied_bytes_ = last.copied_bytes;
        slow_copies_ = last.slow_copies;
    }
    return "";
}

// Threads that an earlier visit left: they have our name, and stand in our code.
void Copies::find_threads() {
    std::uint32_t stacks[blob::most_helpers] = {};
    read_memory(pid_, blob::control_at + offsetof(blob::Control, stacks), stacks, sizeof stacks);
    const auto at_work = static_cast<std::size_t>(
        std::count_if(std::begin(stacks), std::end(stacks), [](std::uint32_t one) { return one != 0; }));
    if (at_work <= helpers_.size()) // of ours we know, and a process may have thousands of others
        return;
    for (const pid_t tid : threads(pid_)) {
        std::string name;
        std::getline(std::ifstream("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(tid) + "/comm"), name);
        if (name != thread_name || owns(tid) || ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0)
            continue;
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
        int status = 0;
        if (wait_for(tid, status) != Waited::stopped)
            continue;
        user_regs_struct registers;
        // Of a thread that is none of ours it may have stopped for a signal.
        const std::intptr_t signal = status >> 16 == 0 ? WSTOPSIG(status) : 0;
        const bool ours = ptrace(PTRACE_GETREGS, tid, nullptr, &registers) == 0 && contains(registers.rip);
        if (ours)
            helpers_.push_back(tid);
        ptrace(ours ? PTRACE_CONT : PTRACE_DETACH, tid, nullptr, reinterpret_cast<void *>(signal));
    }
}

void Copies::wait_for_end(pid_t tid) {
    for (int status = 0; wait_for(tid, status) == Waited::stopped;)
        ptrace(PTRACE_CONT, tid, nullptr, nullptr);
}

bool Copies::is_led_here() const {
    std::uint64_t value = 0;
    return facts_.slot != 0 && read_memory(pid_, facts_.slot, &value, sizeof value) && contains(value);
}

bool Copies::contains(std::uintptr_t address) const {
    return address >= blob::place && address < blob::place + blob::code_bytes;
}

bool Copies::write_control(std::size_t member, const void *from, std::size_t size) const {
    return write_memory(pid_, blob::control_at + member, from, size);
}

// While threads may be reading it: the begin is written last.
void Copies::write_range(std::size_t number) const {
    const blob::Range &one = memory_[number];
    const std::uint64_t at = blob::facts_at + offsetof(blob::Facts, ranges) + number * sizeof one;
    if (write_memory(pid_, at + offsetof(blob::Range, end), &one.end, sizeof one.end))
        write_memory(pid_, at, &one.begin, sizeof one.begin);
}

void Copies::add_memory(std::uint64_t begin, std::uint64_t size) {
    if (!looks_for_memory() || ranges_ == blob::most_ranges)
        return;
    memory_[ranges_] = {begin, begin + size};
    if (state_ == State::in)
        write_range(ranges_);
    ranges_++;
}

void Copies::drop_memory(std::uint64_t begin, std::uint64_t size) {
    for (std::size_t number = 0; number < ranges_; number++) {
        blob::Range &one = memory_[number];
        if (one.begin >= begin + size || one.end <= begin)
            continue;
        one.end = 0; // the place is not used again: a thread may be reading it
        if (state_ == State::in)
            write_range(number);
    }
}

// Where the last visit saw what the driver saved, as far as that is there still: the driver's own memory is private,
// and no file's.
void Copies::find_memory() {
    ranges_ = 0;
    const auto maps = mappings(pid_);
    for (const blob::Range &range : facts_.ranges) {
        std::uint64_t reached = range.begin;
        for (const Mapping &one : maps) {
            if (one.begin <= reached && one.end > reached && one.is_anonymous() && one.readable && one.writable)
                reached = one.end;
        }
        if (range.begin != 0 && range.end > range.begin && reached >= range.end)
            memory_[ranges_++] = range;
    }
}

void Copies::add_driver(std::uint64_t thread_pointer) {
    if (thread_pointer == 0)
        return;
    // The place of one that has ended, or a new one.
    auto place = std::find(drivers_.begin(), drivers_.end(), std::uint64_t{0});
    if (place == drivers_.end() && drivers_.size() == blob::most_drivers)
        return;
    const auto number = static_cast<std::size_t>(place - drivers_.begin());
    if (place == drivers_.end())
        drivers_.push_back(thread_pointer);
    else
        *place = thread_pointer;
    if (state_ == State::in)
        write_control(number * sizeof thread_pointer, &thread_pointer, sizeof thread_pointer);
}

void Copies::drop_driver(std::uint64_t thread_pointer) {
    const auto place = std::find(drivers_.begin(), drivers_.end(), thread_pointer);
    if (thread_pointer == 0 || place == drivers_.end())
        return;
    *place = 0;
    if (state_ == State::in)
        write_control(static_cast<std::size_t>(place - drivers_.begin()) * sizeof *place, &*place, sizeof *place);
}

bool Copies::owns(pid_t tid) const {
    return std::find(helpers_.begin(), helpers_.end(), tid) != helpers_.end();
}

void Copies::event(pid_t tid, int status) {
    if (!WIFSTOPPED(status))
        std::erase(helpers_, tid);
    else if (status >> 16 == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP)
        ptrace(PTRACE_LISTEN, tid, nullptr, nullptr); // stopped together with its process
    else
        ptrace(PTRACE_CONT, tid, nullptr, nullptr);
}

void Copies::tell() const {
    if (state_ == State::nothing)
        return;
    Line("copies")
        .add("threads", static_cast<std::uint64_t>(threads_))
        .add("copies", copies_)
        .add("copied_bytes", copied_bytes_)
        .add("slow_copies", slow_copies_)
        .add_raw("cleaned", cleaned_ ? "true" : "false")
        .add("reason", state_ == State::waiting ? no_thread : reason_)
        .send();
}

} // namespace woodfrog::enter

#endif
