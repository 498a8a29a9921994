// See filter.hpp. Filters are classic BPF programs over a struct seccomp_data; the kernel gives them as they were set.
#include "filter.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string>
#include <sys/ptrace.h>
#include <vector>

#include "remote.hpp"

namespace woodfrog::enter {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t architecture = AUDIT_ARCH_X86_64;
#else
constexpr std::uint32_t architecture = AUDIT_ARCH_AARCH64;
#endif

struct Machine {
    std::uint32_t a = 0, x = 0, memory[BPF_MEMWORDS] = {};
};

// Of an arithmetic instruction; division by zero ends the program with 0, which kills.
bool calculate(std::uint16_t operation, std::uint32_t &a, std::uint32_t with) {
    switch (operation) {
    case BPF_ADD:
        a += with;
        return true;
    case BPF_SUB:
        a -= with;
        return true;
    case BPF_MUL:
        a *= with;
        return true;
    case BPF_DIV:
        a = with == 0 ? 0 : a / with;
        return with != 0;
    case BPF_AND:
        a &= with;
        return true;
    case BPF_OR:
        a |= with;
        return true;
    case BPF_XOR:
        a ^= with;
        return true;
    case BPF_LSH:
        a = with < 32 ? a << with : 0;
        return true;
    case BPF_RSH:
        a = with < 32 ? a >> with : 0;
        return true;
    case BPF_NEG:
        a = 0 - a;
        return true;
    default:
        return false;
    }
}

bool jumps(std::uint16_t operation, std::uint32_t a, std::uint32_t with) {
    switch (operation) {
    case BPF_JEQ:
        return a == with;
    case BPF_JGT:
        return a > with;
    case BPF_JGE:
        return a >= with;
    default:
        return (a & with) != 0; // BPF_JSET
    }
}

// What the program returns; what it cannot do ends as the kernel ends what it does not know: with the worst.
std::uint32_t run(const std::vector<sock_filter> &program, const seccomp_data &data) {
    Machine machine;
    for (std::size_t at = 0; at < program.size(); at++) {
        const sock_filter &one = program[at];
        const std::uint32_t with = BPF_SRC(one.code) == BPF_X ? machine.x : one.k;
        switch (BPF_CLASS(one.code)) {
        case BPF_LD:
        case BPF_LDX: {
            std::uint32_t &into = BPF_CLASS(one.code) == BPF_LD ? machine.a : machine.x;
            if (BPF_MODE(one.code) == BPF_IMM)
                into = one.k;
            else if (BPF_MODE(one.code) == BPF_LEN)
                into = sizeof data;
            else if (BPF_MODE(one.code) == BPF_MEM && one.k < BPF_MEMWORDS)
                into = machine.memory[one.k];
            else if (BPF_MODE(one.code) == BPF_ABS && one.k <= sizeof data - sizeof into)
                std::memcpy(&into, reinterpret_cast<const char *>(&data) + one.k, sizeof into);
            else
                return SECCOMP_RET_KILL_PROCESS;
            break;
        }
        case BPF_ST:
        case BPF_STX:
            if (one.k >= BPF_MEMWORDS)
                return SECCOMP_RET_KILL_PROCESS;
            machine.memory[one.k] = BPF_CLASS(one.code) == BPF_ST ? machine.a : machine.x;
            break;
        case BPF_ALU:
            if (!calculate(BPF_OP(one.code), machine.a, with))
                return SECCOMP_RET_KILL_PROCESS;
            break;
        case BPF_JMP:
            at += BPF_OP(one.code) == BPF_JA ? one.k : jumps(BPF_OP(one.code), machine.a, with) ? one.jt : one.jf;
            break;
        case BPF_RET:
            return BPF_RVAL(one.code) == BPF_A ? machine.a : one.k;
        default: // BPF_MISC
            (BPF_MISCOP(one.code) == BPF_TAX ? machine.x : machine.a) =
                BPF_MISCOP(one.code) == BPF_TAX ? machine.a : machine.x;
        }
    }
    return SECCOMP_RET_KILL_PROCESS;
}

} // namespace

Filtered filtered(pid_t tid, std::uintptr_t behind, long number, const std::array<std::uint64_t, 6> &arguments) {
    if (status_field(tid, "Seccomp") == "0")
        return Filtered::passes;
    seccomp_data data{};
    data.nr = static_cast<int>(number);
    data.arch = architecture;
    data.instruction_pointer = behind;
    std::copy(arguments.begin(), arguments.end(), data.args);
    std::vector<sock_filter> program(BPF_MAXINSNS);
    for (std::size_t index = 0;; index++) {
        program.resize(BPF_MAXINSNS);
        const long count = ptrace(PTRACE_SECCOMP_GET_FILTER, tid, reinterpret_cast<void *>(index), program.data());
        if (count < 0)
            return errno == ENOENT && index > 0 ? Filtered::passes : Filtered::unknown;
        program.resize(static_cast<std::size_t>(count));
        const std::uint32_t action = run(program, data) & SECCOMP_RET_ACTION_FULL;
        if (action != SECCOMP_RET_ALLOW && action != SECCOMP_RET_LOG)
            return Filtered::refused;
    }
}

} // namespace woodfrog::enter
