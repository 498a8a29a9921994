// Code that runs in processes that are not ours, while their driver copies (layout.hpp). No C library, no thread-local
// storage, no relocations, nothing but integer registers: the thread that a call interrupts keeps its vector registers.
//
// A copy is cut into pieces that whoever is free takes, the driver's thread among them, which returns when all are done
// (native/interpose/control_copy.cpp does the same in targets of ours). It never waits for a piece that nobody has
// taken, and a helper ends only between pieces: so nothing depends on a helper, and the process can go on like this for
// ever, or be forked, whoever is killed. The driver's thread makes no system call unless somebody sleeps: it is traced,
// and stops twice for each. So its thread is told by its thread pointer, and time by the processor's counter.
//
// What is not shared is the C library's: the code jumps there, and whoever came is out of it at once. Shared is only
// what goes to or comes from the driver's own memory (Facts::ranges). Of the application's a page may be protected, and
// its handler expect the fault on the thread that made the call; a helper that met it would end the process.
#include "layout.hpp"

#include <asm/errno.h>
#include <asm/unistd.h>
#include <linux/futex.h>
#include <linux/prctl.h>
#include <linux/time_types.h>

namespace woodfrog::enter::blob {

extern "C" {
extern const Header wf_header; // defined below: where the code lies
void *wf_copy(void *to, const void *from, std::size_t size);
[[noreturn]] void wf_help(std::uint64_t leads, std::uint64_t number);
}

// The header, and where a helper begins: behind the system call that made it, on its stack, which has what it is to do.
asm(R"(
    .section .text.header, "ax"
    .globl wf_header
    .hidden wf_header
wf_header:
    .quad 0x323059504f434657
    .long wf_copy - wf_header
    .long wf_begin - wf_header
wf_begin:
    movq (%rsp), %rdi
    movq 8(%rsp), %rsi
    xorl %ebp, %ebp
    andq $-16, %rsp
    call wf_help
    ud2
    .text
)");

namespace {

constexpr std::size_t least_bytes = std::size_t{512} << 10; // less is done before anybody is awake
constexpr std::size_t piece_bytes = std::size_t{128} << 10;
// The driver's copies come some ten microseconds after one another: so long a helper looks for the next one.
constexpr std::uint64_t patience_us = 100;
// Where helpers have no processor the driver waits for the piece that one has begun. Slower than this is slower than
// alone. Memory that is not there yet is slow too, but not for long: so after some copies it is tried again.
constexpr std::size_t least_bytes_per_us = 2000;
constexpr std::uint32_t most_slow_copies = 4;
constexpr std::uint32_t pause_copies = 32;

std::uint64_t at(std::uint64_t fixed) {
    return reinterpret_cast<std::uint64_t>(&wf_header) + (fixed - place);
}

Control &control() {
    return *reinterpret_cast<Control *>(at(control_at));
}

const Facts &facts() {
    return *reinterpret_cast<const Facts *>(at(facts_at));
}

long system_call(long number, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0,
                 std::uint64_t e = 0, std::uint64_t f = 0) {
    register std::uint64_t r10 asm("r10") = d;
    register std::uint64_t r8 asm("r8") = e;
    register std::uint64_t r9 asm("r9") = f;
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                 : "rcx", "r11", "memory");
    return result;
}

std::uint64_t address(const void *of) {
    return reinterpret_cast<std::uint64_t>(of);
}

std::uint64_t ticks() {
    return __builtin_ia32_rdtsc();
}

// Of another processor's counter, or of another machine's after a restore, now may be less: then it counts as long ago.
std::uint64_t us_since(std::uint64_t begun) {
    return (ticks() - begun) / (facts().ticks_per_us | 1);
}

void copy_piece(std::uint64_t to, std::uint64_t from, std::size_t size) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}

void take_pieces(Control &all) {
    std::uint64_t seen = __atomic_load_n(&all.pieces, __ATOMIC_ACQUIRE);
    while ((seen & 0xffff) < (seen >> 16 & 0xffff)) {
        if (!__atomic_compare_exchange_n(&all.pieces, &seen, seen + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            continue;
        const std::size_t begin = (seen & 0xffff) * piece_bytes;
        const std::size_t left = all.size - begin;
        copy_piece(all.to + begin, all.from + begin, left < piece_bytes ? left : piece_bytes);
        __atomic_fetch_add(&all.done, 1, __ATOMIC_RELEASE);
        seen = __atomic_load_n(&all.pieces, __ATOMIC_ACQUIRE);
    }
}

bool is_drivers_memory(std::uint64_t begin, std::size_t size) {
    for (const Range &one : facts().ranges) {
        const std::uint64_t from = __atomic_load_n(&one.begin, __ATOMIC_ACQUIRE);
        const std::uint64_t to = __atomic_load_n(&one.end, __ATOMIC_ACQUIRE);
        if (from != 0 && begin >= from && begin < to && size <= to - begin)
            return true;
    }
    return false;
}

bool is_drivers_thread(const Control &all) {
    std::uint64_t mine;
    asm("movq %%fs:0, %0" : "=r"(mine)); // the thread pointer, by the processor's ABI
    for (const std::uint64_t &one : all.drivers) {
        if (const std::uint64_t driver = __atomic_load_n(&one, __ATOMIC_RELAXED); driver == mine && mine != 0)
            return true;
    }
    return false;
}

bool copy_together(Control &all, std::uint64_t to, std::uint64_t from, std::size_t size) {
    const std::size_t count = (size + piece_bytes - 1) / piece_bytes;
    // Memory that overlaps is the C library's: its memcpy happens to be right there, and a driver may rely on it.
    if (size < least_bytes || count > 0xffff || __atomic_load_n(&all.helping, __ATOMIC_RELAXED) == 0 ||
        to - from < size || from - to < size || !(is_drivers_memory(to, size) || is_drivers_memory(from, size)) ||
        !is_drivers_thread(all) || __atomic_exchange_n(&all.busy, 1, __ATOMIC_ACQUIRE) != 0)
        return false;
    if (all.pause > 0) {
        all.pause--;
        __atomic_store_n(&all.busy, 0, __ATOMIC_RELEASE);
        return false;
    }
    const std::uint64_t begun = ticks();
    all.to = to;
    all.from = from;
    all.size = size;
    __atomic_store_n(&all.done, 0, __ATOMIC_RELAXED);
    const std::uint64_t number = (__atomic_load_n(&all.pieces, __ATOMIC_RELAXED) >> 32) + 1;
    __atomic_store_n(&all.pieces, number << 32 | count << 16, __ATOMIC_RELEASE);
    __atomic_fetch_add(&all.woken, 1,
                       __ATOMIC_SEQ_CST); // before it is looked who sleeps: whoever goes to sleep sees it
    if (__atomic_load_n(&all.asleep, __ATOMIC_SEQ_CST) > 0)
        system_call(__NR_futex, address(&all.woken), FUTEX_WAKE_PRIVATE, 0x7fffffff);
    take_pieces(all);
    for (int looks = 0; __atomic_load_n(&all.done, __ATOMIC_ACQUIRE) != count; ++looks) {
        if (looks < 1000)
            __builtin_ia32_pause();
        else
            system_call(__NR_sched_yield); // a helper has no processor, perhaps because this loop has it
    }
    const bool slow = us_since(begun) > size / least_bytes_per_us;
    all.slow = slow ? all.slow + 1 : 0;
    if (all.slow == most_slow_copies) {
        all.slow--;
        all.pause = pause_copies;
    }
    all.slow_copies += slow ? 1 : 0;
    all.copies++;
    all.copied_bytes += size;
    __atomic_store_n(&all.busy, 0, __ATOMIC_RELEASE);
    return true;
}

// Whether the driver's reference can be written: the kernel tries, and it is no fault if not. Adds nothing to it.
bool slot_is_writable() {
    std::uint32_t nobody_waits = 0;
    constexpr std::uint64_t add_zero = std::uint64_t{FUTEX_OP_ADD} << 28 | std::uint64_t{FUTEX_OP_CMP_LT} << 24;
    return system_call(__NR_futex, address(&nobody_waits), FUTEX_WAKE_OP_PRIVATE, 1, 1, facts().slot, add_zero) >= 0;
}

std::uint32_t exchange_slot(std::uint64_t expected, std::uint64_t wanted) {
    if (!slot_is_writable())
        return not_writable;
    auto *slot = reinterpret_cast<std::uint64_t *>(facts().slot);
    return __atomic_compare_exchange_n(slot, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
               ? installed
               : not_as_expected;
}

// Woken, or that nothing is copied any more: false.
bool wait_for_copy(Control &all, std::uint32_t call) {
    __kernel_timespec limit{static_cast<long long>(facts().idle_s), 0};
    __atomic_fetch_add(&all.asleep, 1, __ATOMIC_SEQ_CST);
    // Returns at once if there was a copy since.
    const long result = system_call(__NR_futex, address(&all.woken), FUTEX_WAIT_PRIVATE, call, address(&limit));
    __atomic_fetch_sub(&all.asleep, 1, __ATOMIC_SEQ_CST);
    return result != -ETIMEDOUT || __atomic_load_n(&all.woken, __ATOMIC_ACQUIRE) != call;
}

} // namespace

void *wf_copy(void *to, const void *from, std::size_t size) {
    if (copy_together(control(), address(to), address(from), size))
        return to;
    return reinterpret_cast<void *(*)(void *, const void *, std::size_t)>(facts().replaced)(to, from, size);
}

void wf_help(std::uint64_t leads, std::uint64_t number) {
    Control &all = control();
    const std::uint64_t ours = address(reinterpret_cast<const void *>(&wf_copy));
    __atomic_fetch_add(&all.helping, 1, __ATOMIC_RELAXED);
    std::uint32_t call = __atomic_load_n(&all.woken, __ATOMIC_ACQUIRE);
    if (leads != 0 && (call & go_home) == 0)
        __atomic_store_n(&all.installed, exchange_slot(facts().replaced, ours), __ATOMIC_RELEASE);
    // woodfrog-enter looks for this call: by then `installed` is what it will be.
    system_call(__NR_prctl, PR_SET_NAME, address("woodfrog-copy"));
    std::uint64_t idle_since = ticks();
    while ((call & go_home) == 0) {
        take_pieces(all);
        if (const std::uint32_t now = __atomic_load_n(&all.woken, __ATOMIC_ACQUIRE); now != call) {
            call = now;
            idle_since = ticks();
        } else if (us_since(idle_since) < patience_us) {
            __builtin_ia32_pause();
        } else if (wait_for_copy(all, call)) {
            idle_since = ticks();
        } else {
            break;
        }
    }
    // Whoever is first.
    exchange_slot(ours, facts().replaced);
    __atomic_fetch_sub(&all.helping, 1, __ATOMIC_RELAXED);
    // From the store on the stack may be another's, or be gone.
    asm volatile("movl $0, (%0)\n\txorl %%edi, %%edi\n\tmovl %1, %%eax\n\tsyscall\n\tud2"
                 :
                 : "r"(&all.stacks[number]), "i"(__NR_exit)
                 : "memory");
    __builtin_unreachable();
}

} // namespace woodfrog::enter::blob
