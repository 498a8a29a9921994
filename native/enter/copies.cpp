// See copies.hpp.
#include "copies.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <linux/prctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "library.hpp"
#include "quiet.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {

namespace blob {
extern const unsigned char code[];
extern const std::size_t code_size;
} // namespace blob

namespace {

constexpr const char *thread_name = "woodfrog-copy";
constexpr const char *changed = "its driver's reference to memcpy was changed by somebody else";
constexpr const char *no_thread = "no thread of the driver stood where it could make calls for it";
constexpr double quiet_wait_s = 1.0; // for a copy of a thread that is none of the driver's, through its reference
constexpr std::uint64_t most_code_bytes = 65536;

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
    return outcome.made ? outcome.result : outcome.gone ? -ESRCH : -EFAULT;
}

std::string cannot(const char *what, std::int64_t error) {
    return std::string(what) + ": " + std::strerror(static_cast<int>(-error));
}

} // namespace

Copies::Copies(pid_t pid, unsigned threads)
    : pid_(pid), wanted_(std::min(threads, blob::most_helpers)), state_(State::waiting) {
    if (wanted_ == 0 && !is_left())
        state_ = State::nothing;
}

void Copies::give_up(const std::string &reason) {
    state_ = State::over;
    reason_ = reason;
}

bool Copies::is_left() const {
    const auto maps = mappings(pid_);
    return std::any_of(maps.begin(), maps.end(), [](const Mapping &one) {
        return one.begin < blob::place + blob::all_bytes(most_code_bytes, blob::most_helpers) && one.end > blob::place;
    });
}

void Copies::begin(const Caller &caller, bool only_clean) {
    state_ = State::over;
    if (only_clean)
        reason_ = no_thread;
    if (is_left()) {
        if (const std::string reason = clean(caller); !reason.empty()) {
            reason_ = reason;
            return;
        }
        cleaned_ = true;
    }
    if (wanted_ == 0)
        reason_.clear();
    if (wanted_ == 0 || only_clean)
        return;
    reason_ = come(caller);
    if (reason_ == changed) // the loader resolves it when it is first used, and that once
        reason_ = come(caller);
    if (reason_.empty())
        state_ = State::in;
}

void Copies::end(const Caller &caller) {
    state_ = State::over;
    threads_ = helpers_.size();
    const std::string reason = remove(caller);
    if (reason_.empty())
        reason_ = reason;
}

// What an earlier visit left. Only the process itself can have changed it, and only it would suffer.
std::string Copies::clean(const Caller &caller) {
    blob::Header header{};
    if (read_memory(pid_, blob::place, &header, sizeof header) && header.magic == blob::magic) {
        if (header.code_bytes == 0 || header.code_bytes > most_code_bytes ||
            header.code_bytes % blob::page_bytes != 0 || header.helpers > blob::most_helpers ||
            header.copy_at >= header.code_bytes || header.help_at >= header.code_bytes)
            return "what an earlier visit left in it is damaged";
        header_ = header;
        return remove(caller);
    }
    // Killed before anything was written: the mapping is as the kernel made it.
    const auto maps = mappings(pid_);
    const auto found =
        std::find_if(maps.begin(), maps.end(), [](const Mapping &one) { return one.begin == blob::place; });
    const std::uint64_t code_bytes = (blob::code_size + blob::page_bytes - 1) / blob::page_bytes * blob::page_bytes;
    const std::uint64_t least = blob::all_bytes(code_bytes, 0);
    if (found == maps.end() || header.magic != 0 || !found->writable || found->path.starts_with('/') ||
        found->end - found->begin < least || (found->end - found->begin - least) % blob::stack_bytes != 0 ||
        found->end - found->begin > blob::all_bytes(code_bytes, blob::most_helpers))
        return "something of its own lies where woodfrog would put its code";
    const std::int64_t result = result_of(caller(SYS_munmap, {found->begin, found->end - found->begin}));
    return result < 0 ? cannot("what an earlier visit left in it cannot be unmapped", result) : "";
}

std::string Copies::come(const Caller &caller) {
    std::string why_not;
    if (drivers_.empty())
        return "the driver does not name its threads";
    const auto slot = driver_reference(pid_, "memcpy", why_not);
    if (!slot)
        return why_not;
    header_ = {};
    std::memcpy(&header_, blob::code, sizeof header_);
    header_.magic = blob::magic;
    header_.code_bytes = (blob::code_size + blob::page_bytes - 1) / blob::page_bytes * blob::page_bytes;
    header_.helpers = wanted_;
    header_.slot = *slot;
    header_.ticks_per_us = ticks_per_us();
    if (!read_memory(pid_, *slot, &header_.replaced, sizeof header_.replaced))
        return "its driver's reference to memcpy cannot be read";

    const std::uint64_t bytes = blob::all_bytes(header_.code_bytes, wanted_);
    const std::int64_t mapped =
        result_of(caller(SYS_mmap, {blob::place, bytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, ~0ull, 0}));
    fault_point("copy_mapped");
    if (mapped < 0)
        return cannot("it gets no memory for threads that copy", mapped);
    if (mapped != static_cast<std::int64_t>(blob::place)) { // of a kernel before 4.17
        caller(SYS_munmap, {static_cast<std::uint64_t>(mapped), bytes});
        return "it gets no memory at the place that woodfrog looks at";
    }
    std::string reason = start_threads(caller);
    if (reason.empty())
        reason = lead();
    if (!reason.empty())
        remove(caller);
    return reason;
}

std::string Copies::start_threads(const Caller &caller) {
    // The code reads the processor's time stamp counter, which a process can forbid itself (with a signal).
    std::int64_t result = result_of(caller(SYS_prctl, {PR_GET_TSC, control(0)}));
    std::int32_t counter = 0;
    if (result < 0 || !read_memory(pid_, control(0), &counter, sizeof counter) || counter != PR_TSC_ENABLE)
        return "it may not read the time stamp counter";
    blob::Control fresh{};
    std::copy_n(drivers_.begin(), std::min<std::size_t>(drivers_.size(), blob::most_drivers), fresh.drivers);
    std::vector<unsigned char> image(header_.code_bytes);
    std::copy_n(blob::code, blob::code_size, image.begin());
    std::memcpy(image.data(), &header_, sizeof header_);
    if (!write_memory(pid_, control(0), &fresh, sizeof fresh) ||
        !write_memory(pid_, blob::place, image.data(), image.size()))
        return "its memory cannot be written";
    fault_point("copy_written");
    result = result_of(caller(SYS_mprotect, {blob::place, header_.code_bytes, PROT_READ | PROT_EXEC}));
    fault_point("copy_is_code");
    if (result < 0)
        return cannot("it may not have code added", result);
    // A forked child has none of the threads: it finds zeros, and copies alone.
    result = result_of(caller(SYS_madvise, {control(0), blob::page_bytes, MADV_WIPEONFORK}));
    fault_point("copy_wiped");
    if (result < 0)
        return cannot("its kernel cannot clear memory in a forked child", result);
    int error = 0;
    for (unsigned number = 0; number < wanted_; number++) {
        const pid_t tid = start(caller, number, number == 0, error);
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
pid_t Copies::start(const Caller &caller, unsigned number, bool leads, int &error) {
    constexpr std::uint64_t flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    const blob::StackTop top{blob::place + header_.help_at, leads, {}};
    const std::uint64_t top_at =
        blob::stacks_at(header_.code_bytes) + (number + 1) * blob::stack_bytes - sizeof(blob::StackTop);
    if (!write_memory(pid_, top_at, &top, sizeof top)) {
        error = EFAULT;
        return 0;
    }
    const Outcome outcome = caller(SYS_clone, {flags, top_at});
    int status = 0;
    if (result_of(outcome) < 0 || outcome.started == 0) {
        error = result_of(outcome) < 0 ? static_cast<int>(-result_of(outcome)) : ESRCH;
        return 0;
    }
    return wait_for(outcome.started, status) == Waited::stopped ? outcome.started : 0;
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
    read_memory(pid_, control(offsetof(blob::Control, installed)), &installed, sizeof installed);
    ptrace(PTRACE_CONT, first, nullptr, nullptr);
    fault_point("copy_running");
    if (installed == blob::installed)
        return "";
    return installed == blob::not_writable ? "its driver's reference to memcpy is read-only" : changed;
}

std::string Copies::remove(const Caller &caller) {
    if (std::string reason = send_home(); !reason.empty())
        return reason;
    fault_point("copy_home");
    if (is_led_here()) {
        // Nobody of ours is there to change it back: in a child, or if the threads could not.
        int error = 0;
        const pid_t tid = start(caller, 0, false, error);
        if (tid == 0)
            return cannot("the driver's reference to memcpy cannot be brought back", -error);
        ptrace(PTRACE_CONT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    if (is_led_here())
        return "the driver's reference to memcpy cannot be brought back";
    const double begun_s = now_s();
    while (!is_quiet()) {
        if (now_s() - begun_s > quiet_wait_s)
            return "a thread is in the midst of a copy: its code stays until the next visit";
        const timespec millisecond{0, 1'000'000}; // nobody tells when it is done
        nanosleep(&millisecond, nullptr);
    }
    fault_point("copy_quiet");
    const std::uint64_t bytes = blob::all_bytes(header_.code_bytes, header_.helpers);
    const std::int64_t result = result_of(caller(SYS_munmap, {blob::place, bytes}));
    fault_point("copy_unmapped");
    return result < 0 ? cannot("the memory of the threads that copy cannot be unmapped", result) : "";
}

// All our threads have ended when this returns, between two pieces of a copy.
std::string Copies::send_home() {
    find_threads();
    blob::Control last{};
    const std::uint32_t word = blob::go_home;
    if (!write_memory(pid_, control(offsetof(blob::Control, woken)), &word, sizeof word))
        return "its memory cannot be written";
    fault_point("copy_go_home");
    for (const pid_t tid : std::vector<pid_t>(helpers_)) {
        // Who sleeps finds on the word that it waits for another one than it fell asleep with.
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    helpers_.clear();
    if (read_memory(pid_, control(0), &last, sizeof last)) {
        copies_ = last.copies;
        copied_bytes_ = last.copied_bytes;
        slow_copies_ = last.slow_copies;
    }
    return "";
}

// Threads that an earlier visit left: they have our name, and stand in our code.
void Copies::find_threads() {
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
    return read_memory(pid_, header_.slot, &value, sizeof value) && contains(value);
}

bool Copies::is_quiet() const {
    std::uint32_t within = 0;
    return read_memory(pid_, control(offsetof(blob::Control, within)), &within, sizeof within) && within == 0 &&
           !any_thread_in(pid_, blob::place, blob::place + header_.code_bytes);
}

bool Copies::contains(std::uintptr_t address) const {
    // Of what another visit left the header is not read yet.
    const std::uint64_t bytes = header_.code_bytes != 0 ? header_.code_bytes : most_code_bytes;
    return address >= blob::place && address < blob::place + bytes;
}

std::uintptr_t Copies::control(std::size_t member) const {
    return blob::control_at(header_.code_bytes) + member;
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
        write_memory(pid_, control(number * sizeof thread_pointer), &thread_pointer, sizeof thread_pointer);
}

void Copies::drop_driver(std::uint64_t thread_pointer) {
    const auto place = std::find(drivers_.begin(), drivers_.end(), thread_pointer);
    if (thread_pointer == 0 || place == drivers_.end())
        return;
    *place = 0;
    if (state_ == State::in)
        write_memory(pid_, control(static_cast<std::size_t>(place - drivers_.begin()) * sizeof *place), &*place,
                     sizeof *place);
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
