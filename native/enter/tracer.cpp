// See tracer.hpp.
#include "tracer.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <linux/audit.h>

#include "filter.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {
namespace {

constexpr int syscall_stop = SIGTRAP | 0x80; // with PTRACE_O_TRACESYSGOOD
constexpr long trace_options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC;
constexpr std::size_t least_state_bytes = 1 << 20;
constexpr std::size_t most_calls = 500'000; // 50 MB; a checkpoint of the driver makes a few thousand

#if defined(__x86_64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_AARCH64;
#else
constexpr std::uint32_t architecture = 0;
#endif

// The system calls whose first argument is a descriptor and which a driver makes.
bool takes_descriptor(std::uint64_t number) {
    switch (number) {
    case SYS_ioctl:
    case SYS_read:
    case SYS_write:
    case SYS_close:
    case SYS_fstat:
    case SYS_fcntl:
    case SYS_lseek:
    case SYS_pread64:
    case SYS_pwrite64:
    case SYS_recvmsg:
    case SYS_sendmsg:
        return true;
    default:
        return false;
    }
}

// The system calls in which a thread waits for others.
bool waits_for_others(std::uint64_t number) {
    switch (number) {
    case SYS_read:
    case SYS_recvmsg:
    case SYS_recvfrom:
    case SYS_ppoll:
    case SYS_pselect6:
    case SYS_futex:
#if defined(SYS_poll)
    case SYS_poll:
    case SYS_select:
#endif
        return true;
    default:
        return false;
    }
}

// "[1,2]", of numbers.
template <class Numbers> std::string list(const Numbers &numbers) {
    std::string text;
    for (const auto number : numbers) {
        text += text.empty() ? '[' : ',';
        text.append(std::to_string(number));
    }
    return text.empty() ? "[]" : text + ']';
}

int wait_for_signal() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int one : {SIGCHLD, SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP, SIGQUIT})
        sigaddset(&signals, one);
    return sigwaitinfo(&signals, nullptr);
}

} // namespace

Tracer::Tracer(Options options)
    : options_(std::move(options)), copies_(options_.pid, options_.copy_threads, options_.restores, options_.idle_s) {}

bool Tracer::attach() {
    const bool all = options_.threads.empty();
    // Threads that are started meanwhile come with those that start them, once those are attached.
    for (bool again = true; again;) {
        again = false;
        for (const pid_t tid : all ? threads(options_.pid) : options_.threads) {
            if (threads_.contains(tid) || !is_thread_of(options_.pid, tid))
                continue;
            if (ptrace(PTRACE_SEIZE, tid, nullptr, reinterpret_cast<void *>(trace_options)) != 0) {
                const int error = errno;
                const std::string tracer = status_field(tid, "TracerPid");
                if ((error == ESRCH && all) || tracer == std::to_string(getpid()))
                    continue; // it has ended, or came with the thread that started it: its first stop is on its way
                return refuse(error, tracer.empty() || tracer == "0" ? std::strerror(error)
                                                                     : "process " + tracer + " traces it already");
            }
            threads_[tid];
            ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr); // so that its system calls are seen from then on
            again = all;
        }
    }
    if (threads_.empty())
        return refuse(ESRCH, "it has no thread that runs");
    if (options_.populate_threads > 0 || copies_.waits())
        chain_ = Chain::find(options_.pid, why_not_);
    if ((options_.populate_threads > 0 || options_.copy_threads > 0) && !chain_ && !options_.record)
        return refuse(ENOSYS, why_not_);
    if (!chain_)
        copies_.give_up(why_not_);
    return true;
}

bool Tracer::refuse(int error, const std::string &reason) {
    end();
    while (take_events())
        wait_for_signal();
    Line("refused").add("errno", error).add("reason", reason).send();
    return false;
}

void Tracer::run() {
    while (take_events()) {
        tell_started();
        const int signal = wait_for_signal();
        if (signal == SIGUSR2) {
            tell_populated();
        } else if (signal > 0 && signal != SIGCHLD && !ending_) {
            end();
        }
    }
    end_copies(); // without a thread that could make a call for it, as far as that goes
    for (const auto &populator : populators_)
        populator->stop();
    while (!populators_.empty() && told_populators_ < populators_.size()) {
        tell_populated();
        if (told_populators_ < populators_.size())
            wait_for_signal();
    }
    copies_.tell();
    tell_calls();
    Line("detached").add("stops", stops_).add("stopped_s", stops_s_).send();
}

// Everything that the kernel has for us now; false when no thread is left.
bool Tracer::take_events() {
    for (;;) {
        int status = 0;
        // While a thread is to be waited for by end(), it comes here too.
        const pid_t tid = waitpid(-1, &status, __WALL | WNOHANG);
        if (tid > 0) {
            event(tid, status);
        } else if (tid == 0) {
            return !threads_.empty();
        } else if (errno != EINTR) {
            return false; // ECHILD: nothing of ours is left
        }
    }
}

void Tracer::event(pid_t tid, int status) {
    if (copies_.owns(tid)) {
        copies_.event(tid, status);
        return;
    }
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
        copies_.drop_driver(threads_[tid].pointer);
        threads_.erase(tid);
        if (tid == options_.pid || threads_.empty())
            Line("gone").add("thread", tid).add("status", status).send();
        if (ending_ && !threads_.empty())
            end_copies();
        return;
    }
    if (!WIFSTOPPED(status))
        return;
    if (status >> 16 == PTRACE_EVENT_EXEC) {
        became_another(tid);
        return;
    }
    const double stopped_s = now_s();
    stops_++;
    Thread &thread = threads_[tid]; // a new one may stop before the thread that started it says so
    if (!thread.started && !is_thread_of(options_.pid, tid)) {
        ptrace(PTRACE_DETACH, tid, nullptr, nullptr); // a child: none of our business, and its memory is another one's
        threads_.erase(tid);
        return;
    }
    if (!thread.started)
        meet(tid, thread);
    thread.started = true;
    const int signal = WSTOPSIG(status);
    const int what = status >> 16;
    if (signal == syscall_stop) {
        stopped_at_call(tid, thread);
        if (!threads_.contains(tid))
            return;
        if (std::find(parked_.begin(), parked_.end(), tid) == parked_.end())
            go_on(tid, 0);
    } else if (what == PTRACE_EVENT_STOP) {
        stood(tid, signal);
    } else {
        go_on(tid, what != 0 ? 0 : signal);
    }
    stops_s_ += now_s() - stopped_s;
}

// One of its threads has started another program, and is its first and only one. That is no business of ours.
void Tracer::became_another(pid_t tid) {
    unsigned long before = 0;
    if (ptrace(PTRACE_GETEVENTMSG, tid, nullptr, &before) == 0)
        threads_.erase(static_cast<pid_t>(before));
    threads_.erase(tid);
    for (const auto &populator : populators_)
        populator->stop();
    copies_.abandon("it became another program");
    ptrace(PTRACE_DETACH, tid, nullptr, nullptr);
    Line("gone").add("thread", tid).add("status", 0).send();
}

// A thread that stands runs on: traced, or free if we are about to end.
void Tracer::go_on(pid_t tid, int signal) {
    void *const passed = reinterpret_cast<void *>(static_cast<std::intptr_t>(signal));
    // Inside a mapping that we changed a thread is not let go: it is to come out of it with what we promised it. And
    // not before what we put into the process is out again.
    if (ending_ && !threads_[tid].ours && !copies_.is_in()) {
        if (ptrace(PTRACE_DETACH, tid, nullptr, passed) == 0 || errno != ESRCH)
            threads_.erase(tid); // else it was killed, and waitpid will say so
        return;
    }
    if (ending_ && !threads_[tid].ours)
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
    // ESRCH: it was killed, and waitpid will say so.
    ptrace(sees_calls() ? PTRACE_SYSCALL : PTRACE_CONT, tid, nullptr, passed);
}

bool Tracer::sees_calls() const {
    return options_.record || options_.populate_threads > 0 || copies_.waits() ||
           (copies_.is_in() && copies_.looks_for_memory()) || ending_;
}

// It stands because it was interrupted, or with its process (SIGSTOP and its like).
void Tracer::stood(pid_t tid, int signal) {
    if (ending_ && copies_.is_in()) {
        hold(tid);
        return;
    }
    if (signal == SIGTRAP)
        begin_copies(tid, true);
    if (!threads_.contains(tid))
        return;
    if (signal != SIGTRAP && !ending_)
        ptrace(PTRACE_LISTEN, tid, nullptr, nullptr); // as it would without us
    else
        go_on(tid, 0);
}

void Tracer::end() {
    ending_ = true;
    std::vector<pid_t> standing;
    standing.swap(parked_);
    for (const auto &[tid, thread] : threads_) {
        if (std::find(standing.begin(), standing.end(), tid) == standing.end())
            ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr); // it stops, and is let go then
    }
    for (const pid_t tid : standing)
        go_on(tid, 0);
}

void Tracer::stopped_at_call(pid_t tid, Thread &thread) {
    __ptrace_syscall_info info{};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, tid, reinterpret_cast<void *>(sizeof info), &info) <= 0)
        return;
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY && info.arch == architecture) {
        thread.inside = true;
        thread.number = info.entry.nr;
        std::copy(std::begin(info.entry.args), std::end(info.entry.args), thread.arguments);
        entered(tid, thread);
        if (copies_.waits() && !thread.nudged && waits_for_others(thread.number) &&
            !copies_.contains(info.instruction_pointer)) {
            thread.nudged = true;                            // once: it makes the call again
            ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr); // it may wait for long: it stands in it at once
        }
        thread.begun_s = now_s();
    } else if (info.op == PTRACE_SYSCALL_INFO_EXIT && thread.inside) {
        thread.inside = false;
        left(tid, thread, info.exit.rval);
        // Not if it is to be made again once a signal is dealt with.
        constexpr std::int64_t restart_codes[] = {-516, -512};
        if (!ending_ && threads_.contains(tid) &&
            (info.exit.rval < restart_codes[0] || info.exit.rval > restart_codes[1]))
            begin_copies(tid, false);
    }
}

// What a driver's thread asks for is the driver's; it makes no other such mapping.
bool Tracer::is_control_state(const std::uint64_t (&arguments)[6]) const {
    constexpr std::uint64_t needed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    constexpr std::uint64_t allowed = needed | MAP_NORESERVE | MAP_STACK;
    return arguments[0] == 0 && arguments[1] >= least_state_bytes && arguments[2] == (PROT_READ | PROT_WRITE) &&
           (arguments[3] & needed) == needed && (arguments[3] & ~allowed) == 0;
}

void Tracer::entered(pid_t tid, Thread &thread) {
    thread.ours = false;
    thread.is_state = thread.number == SYS_mmap && is_control_state(thread.arguments);
    const bool maps_over = thread.number == SYS_mmap && (thread.arguments[3] & MAP_FIXED) != 0;
    if (thread.number == SYS_munmap || thread.number == SYS_mremap || maps_over) {
        copies_.drop_memory(thread.arguments[0], thread.arguments[1]);
        for (const auto &populator : populators_) {
            if (populator->overlaps(thread.arguments[0], thread.arguments[1]))
                populator->stop(); // what comes there next is none of our business
        }
    }
#if defined(__x86_64__)
    if (!chain_ || options_.populate_threads == 0 || !thread.is_state || thread.arguments[1] < options_.least_bytes)
        return;
    user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, tid, nullptr, &registers) != 0)
        return;
    registers.r10 &= ~static_cast<unsigned long long>(MAP_POPULATE);
    thread.ours = ptrace(PTRACE_SETREGS, tid, nullptr, &registers) == 0;
    fault_point("flags_set");
#else
    (void)tid;
#endif
}

void Tracer::left(pid_t tid, Thread &thread, std::int64_t result) {
    const double took_s = now_s() - thread.begun_s;
    if (options_.record) {
        if (calls_.size() < most_calls) {
            Call call{thread.begun_s, took_s, tid, thread.number, {}, result, 0};
            std::copy(std::begin(thread.arguments), std::end(thread.arguments), call.arguments);
            call.path = path_index(thread.number, thread.arguments[0]);
            calls_.push_back(call);
        } else {
            unrecorded_++;
        }
    }
    const bool failed = result < 0 && result > -4096;
    const auto address = static_cast<std::uintptr_t>(result);
    const std::size_t size = thread.arguments[1];
    if (thread.is_state && !failed)
        copies_.add_memory(address, size);
    thread.is_state = false;
    if (!thread.ours)
        return;
    thread.ours = false;
    if (failed)
        return;
    advise(tid, address, size);
    if (!threads_.contains(tid))
        return;
    const unsigned count = options_.populate_threads;
    populators_.push_back(
        std::make_unique<Populator>(options_.pid, address, size, count, [] { kill(getpid(), SIGUSR2); }));
    if (options_.wait && !ending_)
        parked_.push_back(tid);
}

// Huge pages for a mapping that the thread has just made. Whatever goes wrong, it has its mapping.
void Tracer::advise(pid_t tid, std::uintptr_t address, std::size_t size) {
#if defined(__x86_64__)
    Context context;
    std::int64_t result = -EPERM;
    const double begun_s = now_s();
    // A filter that cannot be read is obeyed: it would have to forbid what the C library calls when a thread ends.
    const Arguments arguments{address, size, MADV_HUGEPAGE};
    const bool refused = filtered(tid, chain_->behind_call(), SYS_madvise, arguments) == Filtered::refused ||
                         filtered(tid, chain_->behind_signal_return(), SYS_rt_sigreturn) == Filtered::refused;
    if (!refused && read_context(tid, context) && is_on_own_stack(options_.pid, tid, context)) {
        context.registers.r10 |= MAP_POPULATE; // as the thread had set it
        const Outcome outcome = make_call(options_.pid, tid, *chain_, context, SYS_madvise, arguments);
        if (outcome.gone) {
            lost(tid, outcome.waited, outcome.status);
            return;
        }
        if (outcome.made)
            result = outcome.result;
    }
    Line("mapping")
        .add("thread", tid)
        .add("address", static_cast<std::uint64_t>(address))
        .add("bytes", static_cast<std::uint64_t>(size))
        .add("advised", result)
        .add("time_s", now_s())
        .add("took_s", now_s() - begun_s)
        .send();
    fault_point("registers_back");
#else
    (void)tid, (void)address, (void)size;
#endif
}

std::uint32_t Tracer::path_index(std::uint64_t number, std::uint64_t fd) {
    if (!takes_descriptor(number))
        return 0;
    // A descriptor that is closed may be another file the next time.
    if (number == SYS_close) {
        const auto known = path_of_fd_.find(fd);
        const std::uint32_t index = known == path_of_fd_.end() ? 0 : known->second;
        path_of_fd_.erase(fd);
        return index;
    }
    const auto [entry, is_new] = path_of_fd_.try_emplace(fd, 0);
    if (is_new) {
        const std::string path = descriptor_path(options_.pid, fd);
        const auto same = std::find(paths_.begin(), paths_.end(), path);
        entry->second = static_cast<std::uint32_t>(same - paths_.begin());
        if (same == paths_.end())
            paths_.push_back(path);
    }
    return entry->second;
}

void Tracer::tell_started() {
    if (started_ || !std::all_of(threads_.begin(), threads_.end(), [](const auto &one) { return one.second.started; }))
        return;
    started_ = true;
    std::vector<pid_t> tids;
    for (const auto &[tid, thread] : threads_)
        tids.push_back(tid);
    Line line("attached");
    line.add_raw("threads", list(tids)).add_raw("enters", chain_ ? "true" : "false").add("time_s", now_s());
    if (!why_not_.empty())
        line.add("reason", why_not_);
    line.send();
}

void Tracer::tell_populated() {
    for (; told_populators_ < populators_.size(); told_populators_++) {
        const Populator &one = *populators_[told_populators_];
        if (!one.ended())
            break;
        const Resident found = resident(options_.pid, one.address(), one.address() + one.size());
        Line("populated")
            .add("address", static_cast<std::uint64_t>(one.address()))
            .add("bytes", static_cast<std::uint64_t>(one.size()))
            .add("resident_bytes", found.bytes)
            .add("huge_bytes", found.huge_bytes)
            .add("threads", static_cast<std::uint64_t>(options_.populate_threads))
            .add("begun_s", one.begun_s())
            .add("took_s", one.ended_s() - one.begun_s())
            .send();
    }
    if (told_populators_ < populators_.size())
        return;
    std::vector<pid_t> standing;
    standing.swap(parked_);
    for (const pid_t tid : standing)
        go_on(tid, 0);
}

void Tracer::tell_calls() {
    if (!options_.record)
        return;
    for (std::size_t index = 1; index < paths_.size(); index++)
        Line("path").add("index", static_cast<std::uint64_t>(index)).add("path", paths_[index]).send();
    for (const Call &call : calls_) {
        Line("call")
            .add("time_s", call.begun_s)
            .add("took_s", call.took_s)
            .add("thread", call.thread)
            .add("number", call.number)
            .add_raw("arguments", list(call.arguments))
            .add("result", call.result)
            .add("path", static_cast<std::uint64_t>(call.path))
            .send();
    }
    if (unrecorded_ > 0)
        Line("unrecorded").add("calls", unrecorded_).send();
}

} // namespace woodfrog::enter
