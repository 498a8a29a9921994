// One system call in another process's thread, made so that the thread finds its way back by itself.
//
// The thread stands behind a system call of its own. Its registers are set to run ours with the thread's stack prepared
// below what it uses: the call returns into the C library's signal return, and the frame there holds every register as
// the thread had it. Usually we stop the thread right behind the call and set its registers ourselves. If we are killed
// anywhere in between, the kernel lets the thread go, and it runs that chain to its end: call, signal return, its own
// code. So nothing that we do to it can be half done. x86-64 only; elsewhere `Chain::find` says so.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#if defined(__x86_64__)
#include <sys/user.h>
#endif

#include "wait.hpp"

namespace woodfrog::enter {

// Where in a process the two pieces of code are that a chain needs. They are the C library's own.
struct Chain {
    std::uintptr_t call_and_return = 0; // `syscall`, and a `ret` behind it that is reached with the stack as it was
    std::uintptr_t signal_return = 0;   // `mov $15, %rax; syscall`

    // Behind the instructions with which it enters the kernel.
    std::uintptr_t behind_call() const { return call_and_return + 2; }
    std::uintptr_t behind_signal_return() const { return signal_return + 9; }

    // Nothing when the process has no such code; `why_not` is then the reason, as a sentence for people.
    static std::optional<Chain> find(pid_t pid, std::string &why_not);
};

#if defined(__x86_64__)

// The thread as it is to be afterwards.
struct Context {
    user_regs_struct registers{};
    std::vector<unsigned char> extended_state; // see extended_state.hpp
    std::uint64_t signal_mask = 0;
    // Of a call with a time limit that was interrupted: its number. A signal return makes the kernel forget how far it
    // was, so a thread that is let go in the middle begins it anew.
    std::optional<std::uint64_t> begins_anew;
};

// Of a thread in a ptrace stop of ours, which stands behind a system call that it made. False when the kernel does not
// tell, where calls from the C library's code may be signals to it (PR_SET_SYSCALL_USER_DISPATCH), and where it is in
// none, or comes back from a signal's handler (rt_sigreturn is a call as well): then it stands anywhere in its code.
bool read_context(pid_t tid, Context &context);

// Of a thread that PTRACE_INTERRUPT has stopped in a system call: as if it were about to make that call, which it then
// makes again. False as above.
bool read_interrupted(pid_t tid, Context &context);

// Whether the frame of a call would lie on the stack that the thread was made with. A coroutine's is often small, in
// the midst of other memory, and its runtime takes its signals elsewhere.
bool is_on_own_stack(pid_t pid, pid_t tid, const Context &context);

using Arguments = std::array<std::uint64_t, 6>;

// What became of a call.
struct Outcome {
    bool made = false;    // and `result` is what the kernel gave
    bool refused = false; // a filter of the process would not have let it through
    bool gone = false;    // the thread has ended; `waited` and `status` tell how
    std::int64_t result = 0;
    Waited waited = Waited::stopped;
    int status = 0;
    pid_t started = 0; // the thread that the call started, by our numbers

    // What the kernel gave, or why it was not asked: -errno.
    std::int64_t value() const { return made ? result : gone ? -ESRCH : refused ? -EPERM : -EFAULT; }
};

// Has the thread make one system call, with every signal but SIGKILL and SIGSTOP kept from it meanwhile, and come back
// to `context`. Returns when it stands there. It is not made when its stack cannot be written.
Outcome make_call(pid_t pid, pid_t tid, const Chain &chain, const Context &context, long number,
                  const Arguments &arguments);

#endif

} // namespace woodfrog::enter
