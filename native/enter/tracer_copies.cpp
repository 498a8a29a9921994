// The tracer's part in what copies.hpp does: which thread makes the calls for it, and that all stand at its end.
#include "tracer.hpp"

#include <algorithm>
#include <sys/ptrace.h>
#include <sys/syscall.h>

#include "filter.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {

// A thread that stands for the first time. Those that the driver's threads start are the driver's.
void Tracer::meet(pid_t tid, Thread &thread) {
#if defined(__x86_64__)
    user_regs_struct registers;
    if (options_.threads.empty() || ptrace(PTRACE_GETREGS, tid, nullptr, &registers) != 0)
        return;
    thread.pointer = registers.fs_base;
    copies_.add_driver(thread.pointer);
#else
    (void)tid, (void)thread;
#endif
}

// It ended in the midst of a call that it made for us. Of one that is dying the end is told later.
void Tracer::lost(pid_t tid, Waited waited, int status) {
    if (waited == Waited::ended)
        event(tid, status);
    if (waited != Waited::dying)
        threads_.erase(tid);
}

#if defined(__x86_64__)

namespace {

// A thread's filters, for calls that it is to make with the chain, or in the code.
Copies::Filters filters_of(pid_t tid, const Chain &chain) {
    return [tid, chain](std::uintptr_t behind, long number, const Arguments &arguments) {
        const Filtered back = filtered(tid, chain.behind_signal_return(), SYS_rt_sigreturn);
        return back == Filtered::passes ? filtered(tid, behind != 0 ? behind : chain.behind_call(), number, arguments)
                                        : back;
    };
}

} // namespace

// Calls that the thread makes as long as it lives; 0: none.
Copies::Caller Tracer::caller(pid_t tid, const Context &context) {
    return [this, tid, context, gone = tid == 0](long number, const Arguments &arguments) mutable {
        if (gone)
            return Outcome{.gone = true};
        if (filters_of(tid, *chain_)(0, number, arguments) != Filtered::passes)
            return Outcome{.refused = true};
        const Outcome outcome = make_call(options_.pid, tid, *chain_, context, number, arguments);
        if (outcome.gone) {
            gone = true;
            lost(tid, outcome.waited, outcome.status);
        }
        return outcome;
    };
}

// With a thread that stands behind a system call, or in one that our `interrupted` stop has ended.
void Tracer::begin_copies(pid_t tid, bool interrupted) {
    Context context;
    if (!chain_ || !copies_.waits() || threads_[tid].elsewhere ||
        !(interrupted ? read_interrupted(tid, context) : read_context(tid, context)) ||
        copies_.contains(context.registers.rip))
        return;
    if (!is_on_own_stack(options_.pid, tid, context)) {
        threads_[tid].elsewhere = true; // it is not looked at again with each call
        return;
    }
    const auto differs = [own = status_field(tid, "Seccomp_filters")](const auto &one) {
        const std::string its = status_field(one.first, "Seccomp_filters");
        return !its.empty() && its != own; // empty: it has ended
    };
    if (std::any_of(threads_.begin(), threads_.end(), differs)) // what one may call, another may die of
        copies_.give_up("its threads have different seccomp filters");
    else
        copies_.begin(caller(tid, context), filters_of(tid, *chain_), ending_);
}

// At the end every thread stands here, so that none is in code of ours when that is unmapped.
void Tracer::hold(pid_t tid) {
    user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, tid, nullptr, &registers) == 0 && copies_.contains(registers.rip)) {
        ptrace(PTRACE_SYSCALL, tid, nullptr, nullptr); // to its next system call, where it is interrupted again
        return;
    }
    threads_[tid].held = true;
    end_copies();
}

// Once all stand, one of them makes the calls. Without any thread what can be done without one.
void Tracer::end_copies() {
    if (!copies_.is_in() ||
        !std::all_of(threads_.begin(), threads_.end(), [](const auto &one) { return one.second.held; }))
        return;
    Context context;
    const auto worker = std::find_if(threads_.begin(), threads_.end(), [this, &context](const auto &one) {
        return read_interrupted(one.first, context) && is_on_own_stack(options_.pid, one.first, context);
    });
    if (worker == threads_.end() && !threads_.empty()) {
        threads_.begin()->second.held = false;
        ptrace(PTRACE_SYSCALL, threads_.begin()->first, nullptr, nullptr);
        return;
    }
    const pid_t tid = threads_.empty() ? 0 : worker->first;
    copies_.end(caller(tid, context));
    std::vector<pid_t> standing;
    for (const auto &[one, thread] : threads_)
        standing.push_back(one);
    for (const pid_t one : standing)
        go_on(one, 0);
}

#else

void Tracer::begin_copies(pid_t, bool) {}
void Tracer::hold(pid_t) {}
void Tracer::end_copies() {}

#endif

} // namespace woodfrog::enter
