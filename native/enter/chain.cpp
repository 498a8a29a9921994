// See chain.hpp.
#include "chain.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <vector>

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "extended_state.hpp"
#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {

#if defined(__x86_64__)

namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view signal_return_code = "\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"sv; // mov $15,%rax; syscall
constexpr std::string_view bare_call = "\x0f\x05\xc3"sv;                                  // syscall; ret
// glibc's syscall(): syscall; cmp $-4095,%rax; jae over the ret, to where errno is set; ret. Both ways keep the stack.
constexpr std::string_view libc_call = "\x0f\x05\x48\x3d\x01\xf0\xff\xff\x73\x01\xc3"sv;

// Of the mappings that are looked at: a C library's code is 1.5 MB, and a large program's need not be read.
constexpr std::size_t most_code_bytes = std::size_t{8} << 20;

// struct rt_sigframe and what it is made of, of the kernel (arch/x86/include/asm/sigframe.h, uapi/asm/sigcontext.h).
struct SignalContext {
    std::uint64_t r8, r9, r10, r11, r12, r13, r14, r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, rflags;
    std::uint16_t cs, gs, fs, ss;
    std::uint64_t error, trap, old_mask, fault_address, extended_state, reserved[8];
};
struct Frame {
    std::uint64_t return_address;
    std::uint64_t flags, link;
    std::uint64_t stack_pointer;
    std::uint32_t stack_flags, stack_padding;
    std::uint64_t stack_size;
    SignalContext context;
    std::uint64_t signal_mask;
};
static_assert(sizeof(SignalContext) == 256 && sizeof(Frame) == 8 + 40 + 256 + 8);

constexpr std::uint64_t frame_flags = 0x7; // UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
// No valid flags of a signal stack: the kernel leaves the thread's as it is (restore_altstack takes only EFAULT amiss).
constexpr std::uint32_t keep_signal_stack = 0x7fffffff;
constexpr std::size_t red_zone_bytes = 128; // below the stack pointer code may keep data (x86-64 ABI)

Frame frame_of(const Context &context, const Chain &chain, std::uintptr_t extended_state) {
    const user_regs_struct &from = context.registers;
    Frame frame{};
    frame.return_address = chain.signal_return;
    frame.flags = frame_flags;
    frame.stack_flags = keep_signal_stack;
    SignalContext &to = frame.context;
    to.r8 = from.r8, to.r9 = from.r9, to.r10 = from.r10, to.r11 = from.r11;
    to.r12 = from.r12, to.r13 = from.r13, to.r14 = from.r14, to.r15 = from.r15;
    to.rdi = from.rdi, to.rsi = from.rsi, to.rbp = from.rbp, to.rbx = from.rbx;
    to.rdx = from.rdx, to.rcx = from.rcx, to.rsp = from.rsp;
    to.rip = from.rip, to.rflags = from.eflags;
    to.cs = static_cast<std::uint16_t>(from.cs);
    to.ss = static_cast<std::uint16_t>(from.ss);
    to.extended_state = extended_state;
    to.rax = context.begins_anew.value_or(from.rax);
    frame.signal_mask = context.signal_mask;
    return frame;
}

// What the kernel gives when a call is to be made again once its signal is dealt with (linux/errno.h, not for
// programs).
constexpr std::int64_t restart_system = -512, restart_no_handler = -514, restart_by_block = -516;

} // namespace

std::optional<Chain> Chain::find(pid_t pid, std::string &why_not) {
    // With a shadow stack a return to a place that nobody called from is an error.
    if (status_field(pid, "x86_Thread_features").find("shstk") != std::string::npos) {
        why_not = "the process has a shadow stack";
        return std::nullopt;
    }
    if (status_field(pid, "Seccomp") == "1") {
        why_not = "the process is in seccomp's strict mode";
        return std::nullopt;
    }
    auto code = mappings(pid);
    std::erase_if(code, [](const Mapping &one) {
        return !one.executable || one.path.empty() || one.path[0] != '/' || one.end - one.begin > most_code_bytes;
    });
    std::stable_partition(code.begin(), code.end(), [](const Mapping &one) {
        const std::string name = one.path.substr(one.path.rfind('/') + 1);
        return name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl");
    });
    Chain chain;
    std::vector<char> bytes;
    for (const Mapping &mapping : code) {
        bytes.resize(mapping.end - mapping.begin);
        if (!read_memory(pid, mapping.begin, bytes.data(), bytes.size()))
            continue;
        const std::string_view text(bytes.data(), bytes.size());
        if (const std::size_t at = text.find(signal_return_code); chain.signal_return == 0 && at != text.npos)
            chain.signal_return = mapping.begin + at;
        for (const std::string_view wanted : {libc_call, bare_call}) {
            if (const std::size_t at = text.find(wanted); chain.call_and_return == 0 && at != text.npos)
                chain.call_and_return = mapping.begin + at;
        }
        if (chain.signal_return != 0 && chain.call_and_return != 0)
            return chain;
    }
    why_not = "its C library's code is not one that woodfrog knows, or cannot be read";
    return std::nullopt;
}

namespace {

bool read_all(pid_t tid, Context &context) {
    context.extended_state = read_extended_state(tid);
    return !context.extended_state.empty() && ptrace(PTRACE_GETREGS, tid, nullptr, &context.registers) == 0 &&
           ptrace(PTRACE_GETSIGMASK, tid, reinterpret_cast<void *>(sizeof context.signal_mask), &context.signal_mask) ==
               0;
}

// Whether the kernel makes a signal of its calls, unless they come from where the program allows it; of Linux 6.4 and
// later. Before nobody can tell.
bool has_calls_dispatched(pid_t tid) {
    constexpr int get_configuration = 0x4211; // PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG
    struct {                                  // struct ptrace_sud_config
        std::uint64_t mode, selector, offset, size;
    } found{};
    return ptrace(static_cast<__ptrace_request>(get_configuration), tid, reinterpret_cast<void *>(sizeof found),
                  &found) == 0 &&
           found.mode != 0;
}

// Where the state and the frame lie.
struct Place {
    std::uintptr_t state, frame;
};

Place place_of(const Context &context) {
    const std::uintptr_t state =
        (context.registers.rsp - red_zone_bytes - context.extended_state.size()) & ~std::uintptr_t{63};
    return {state, (state - sizeof(Frame)) & ~std::uintptr_t{15}};
}

} // namespace

bool read_context(pid_t tid, Context &context) {
    constexpr std::uint64_t program_segment = 0x33; // of 64-bit code
    return read_all(tid, context) && !has_calls_dispatched(tid) &&
           static_cast<std::int64_t>(context.registers.orig_rax) >= 0 && context.registers.cs == program_segment;
}

// The C libraries put a thread's descriptor, at which its thread pointer points, on top of its stack, in one mapping;
// the kernel names the first thread's stack.
bool is_on_own_stack(pid_t pid, pid_t tid, const Context &context) {
    const std::uintptr_t end = context.registers.rsp;
    const std::uintptr_t begin = place_of(context).frame;
    const auto maps = mappings(pid);
    return std::any_of(maps.begin(), maps.end(), [&](const Mapping &one) {
        const bool first = tid == pid && one.path == "[stack]";
        const std::uint64_t descriptor = context.registers.fs_base;
        return begin < end && one.begin <= begin && end < one.end &&
               (first || (descriptor > end && descriptor < one.end));
    });
}

bool read_interrupted(pid_t tid, Context &context) {
    if (!read_context(tid, context))
        return false;
    user_regs_struct &registers = context.registers;
    // As the kernel does when it finds no signal (arch_do_signal_or_restart).
    const auto result = static_cast<std::int64_t>(registers.rax);
    if (result == restart_by_block || (result <= restart_system && result >= restart_no_handler)) {
        if (result == restart_by_block)
            context.begins_anew = registers.orig_rax;
        registers.rax = result == restart_by_block ? SYS_restart_syscall : registers.orig_rax;
        registers.rip -= 2; // the instruction `syscall`
    }
    return true;
}

namespace {

// Writes the frame that restores `context` below the thread's stack and sets the registers so that the thread makes
// the system call `number` and comes back to `context`. False when nothing was changed.
bool begin_call(pid_t pid, pid_t tid, const Chain &chain, const Context &context, long number,
                const Arguments &arguments) {
    const std::vector<unsigned char> &state = context.extended_state;
    const auto [state_at, frame_at] = place_of(context);
    const Frame frame = frame_of(context, chain, state_at);
    if (!write_memory(pid, state_at, state.data(), state.size()) || !write_memory(pid, frame_at, &frame, sizeof frame))
        return false;
    fault_point("frame_written");
    user_regs_struct registers = context.registers;
    registers.rip = chain.call_and_return;
    registers.rsp = frame_at;
    registers.rax = static_cast<std::uint64_t>(number);
    registers.orig_rax = ~0ull; // this is no system call that could be restarted
    registers.rdi = arguments[0];
    registers.rsi = arguments[1];
    registers.rdx = arguments[2];
    registers.r10 = arguments[3];
    registers.r8 = arguments[4];
    registers.r9 = arguments[5];
    if (ptrace(PTRACE_SETREGS, tid, nullptr, &registers) != 0)
        return false;
    fault_point("call_set");
    // Only now: whoever lets the thread go from here on, the frame brings its mask back.
    std::uint64_t all = ~0ull;
    ptrace(PTRACE_SETSIGMASK, tid, reinterpret_cast<void *>(sizeof all), &all);
    fault_point("signals_held");
    return true;
}

// Until the thread stands behind the call that it was set to make; false when it is gone.
bool wait_for_call(pid_t tid, std::uintptr_t behind, Outcome &outcome) {
    int pending_signal = 0;
    for (;;) {
        if (ptrace(PTRACE_SYSCALL, tid, nullptr,
                   reinterpret_cast<void *>(static_cast<std::intptr_t>(pending_signal))) != 0 &&
            errno != ESRCH) {
            outcome.waited = Waited::lost;
            return false;
        }
        pending_signal = 0;
        outcome.waited = wait_for(tid, outcome.status);
        if (outcome.waited != Waited::stopped)
            return false;
        const int status = outcome.status;
        if (WSTOPSIG(status) != (SIGTRAP | 0x80)) { // the stops of PTRACE_O_TRACESYSGOOD
            unsigned long started = 0;
            if (status >> 16 == 0)
                pending_signal = WSTOPSIG(status);
            else if (status >> 16 == PTRACE_EVENT_CLONE && ptrace(PTRACE_GETEVENTMSG, tid, nullptr, &started) == 0)
                outcome.started = static_cast<pid_t>(started);
            continue;
        }
        __ptrace_syscall_info info{};
        if (ptrace(PTRACE_GET_SYSCALL_INFO, tid, reinterpret_cast<void *>(sizeof info), &info) > 0 &&
            info.op == PTRACE_SYSCALL_INFO_EXIT && info.instruction_pointer == behind) {
            outcome.result = info.exit.rval;
            return true;
        }
        fault_point("call_entered");
    }
}

// Sets the thread to `context` by hand: it stands behind the system call of `begin_call`.
bool finish_call(pid_t tid, const Context &context) {
    std::uint64_t mask = context.signal_mask;
    fault_point("call_made");
    ptrace(PTRACE_SETSIGMASK, tid, reinterpret_cast<void *>(sizeof mask), &mask);
    fault_point("signals_back");
    user_regs_struct registers = context.registers;
    registers.orig_rax = ~0ull;
    return ptrace(PTRACE_SETREGS, tid, nullptr, &registers) == 0;
}

} // namespace

Outcome make_call(pid_t pid, pid_t tid, const Chain &chain, const Context &context, long number,
                  const Arguments &arguments) {
    Outcome outcome;
    if (!begin_call(pid, tid, chain, context, number, arguments))
        return outcome;
    if (!wait_for_call(tid, chain.behind_call(), outcome)) {
        outcome.gone = true;
        return outcome;
    }
    outcome.made = true;
    finish_call(tid, context);
    return outcome;
}

#else

std::optional<Chain> Chain::find(pid_t, std::string &why_not) {
    why_not = "woodfrog enters processes on x86-64 only";
    return std::nullopt;
}

#endif

} // namespace woodfrog::enter
