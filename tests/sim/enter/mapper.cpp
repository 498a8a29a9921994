// What a driver does at a checkpoint, as far as woodfrog-enter sees it: for every byte of its input a thread maps
// populated memory, checks that it is clear, fills it, checks it, looks whether its registers and its signal mask are
// as they were, and unmaps it. Prints "ready PID TID" first and "right" or what was wrong for each round. The byte says
// how the memory is mapped:
//
//     m   by the C library
//     y   by an instruction inline, with something in all of the registers YMM0 to YMM15 across it
//     z   … ZMM0 to ZMM31 and K0 to K7
//     p   … PKRU: a protection key that nobody has is denied
//     g   … on a stack in the midst of other memory, as that of a coroutine
//     d   … while every system call from elsewhere would end the process (PR_SET_SYSCALL_USER_DISPATCH)
//     r   by the C library; it is moved at once, and something that nobody wants filled comes to its place; then
//     R   … by mapping over it
//     c   by the C library, in a child that is no thread, and none that fork makes, while its parent uses its own stack
//
// "none" is the answer where the processor has no such registers, or the kernel no such thing.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace {

constexpr std::size_t page = 4096;
constexpr unsigned rounding = 0x8000; // of MXCSR: flush to zero; a thread's own, and kept across calls

unsigned control_word() {
#if defined(__x86_64__)
    return _mm_getcsr() & 0xffc0;
#else
    return 0;
#endif
}

sigset_t mask() {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    return now;
}

constexpr int protection = PROT_READ | PROT_WRITE;
constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;

void *map(std::size_t size, const char *&) {
    return mmap(nullptr, size, protection, kind, -1, 0);
}

#if defined(__x86_64__)

// The instruction, with what is before it and behind it in the same piece of code: in RBX and R12 stand what it may
// read and write.
#define WOODFROG_INLINE_MAP(before, behind, in, out)                                                                   \
    register long r10 asm("r10") = kind;                                                                               \
    register long r8 asm("r8") = -1;                                                                                   \
    register long r9 asm("r9") = 0;                                                                                    \
    register void *r12 asm("r12") = out;                                                                               \
    long result;                                                                                                       \
    long third = protection;                                                                                           \
    asm volatile(before "\n\tmovl %[number], %%eax\n\tmovl %[protection], %%edx\n\tsyscall\n\t" behind                 \
                 : "=&a"(result), "+d"(third)                                                                          \
                 : [number] "i"(SYS_mmap), [protection] "i"(protection), "D"(0), "S"(size), "r"(r10), "r"(r8),         \
                   "r"(r9), "b"(in), "r"(r12)                                                                          \
                 : "rcx", "r11", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",       \
                   "r13", "r14", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

void fill(unsigned char *bytes, std::size_t size) {
    for (std::size_t at = 0; at < size; at++)
        bytes[at] = static_cast<unsigned char>(at * 7 + 1);
}

void *map_with_ymm(std::size_t size, const char *&wrong) {
    unsigned char in[16 * 32], out[16 * 32] = {};
    fill(in, sizeof in);
    WOODFROG_INLINE_MAP(".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\tvmovdqu 32*\\i(%%rbx), %%ymm\\i\n\t.endr",
                        ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\tvmovdqu %%ymm\\i, 32*\\i(%%r12)\n\t.endr\n\t"
                        "vzeroupper",
                        in, out);
    wrong = memcmp(in, out, sizeof in) == 0 ? nullptr : "a YMM register is wrong";
    return reinterpret_cast<void *>(result);
}

void *map_with_zmm(std::size_t size, const char *&wrong) {
    unsigned char in[32 * 64 + 8 * 2], out[32 * 64 + 8 * 2] = {};
    fill(in, sizeof in);
    WOODFROG_INLINE_MAP(
        ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n\t"
        "vmovdqu64 64*\\i(%%rbx), %%zmm\\i\n\t.endr\n\t"
        ".irp i,0,1,2,3,4,5,6,7\n\tkmovw 2048+2*\\i(%%rbx), %%k\\i\n\t.endr",
        ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n\t"
        "vmovdqu64 %%zmm\\i, 64*\\i(%%r12)\n\t.endr\n\t"
        ".irp i,0,1,2,3,4,5,6,7\n\tkmovw %%k\\i, 2048+2*\\i(%%r12)\n\t.endr\n\tvzeroupper",
        in, out);
    wrong = memcmp(in, out, sizeof in) == 0 ? nullptr : "a ZMM or a mask register is wrong";
    return reinterpret_cast<void *>(result);
}

void *map_with_pkru(std::size_t size, const char *&wrong) {
    std::uint32_t before[3]; // as it was; as it is to be; as it is afterwards
    asm volatile("xorl %%ecx, %%ecx\n\trdpkru" : "=a"(before[0]) : : "ecx", "edx");
    before[1] = before[0] ^ 3u << 26; // of key 13
    WOODFROG_INLINE_MAP("movl 4(%%rbx), %%eax\n\txorl %%ecx, %%ecx\n\txorl %%edx, %%edx\n\twrpkru",
                        "movq %%rax, %%r8\n\txorl %%ecx, %%ecx\n\trdpkru\n\tmovl %%eax, 8(%%r12)\n\t"
                        "movl (%%rbx), %%eax\n\txorl %%edx, %%edx\n\twrpkru\n\tmovq %%r8, %%rax",
                        before, before);
    wrong = before[2] == before[1] ? nullptr : "the register of the protection keys is wrong";
    return reinterpret_cast<void *>(result);
}

void *map_on_coroutine_stack(std::size_t size, const char *&wrong) {
    constexpr std::size_t around = 64 << 10, below = 62 << 10; // what is below is somebody else's
    static unsigned char block[around];
    fill(block, sizeof block);
    WOODFROG_INLINE_MAP("movq %%rsp, %%r13\n\tleaq 63488(%%r12), %%rsp", "movq %%r13, %%rsp", block, block);
    for (std::size_t at = 0; at < below; at++)
        wrong =
            block[at] == static_cast<unsigned char>(at * 7 + 1) ? wrong : "memory below a coroutine's stack is wrong";
    return reinterpret_cast<void *>(result);
}

// From the instructions in the first page of this on all calls are let through; from elsewhere as `dispatched` says.
volatile char dispatched = 0; // SYSCALL_DISPATCH_FILTER_ALLOW
extern "C" const char woodfrog_dispatch_begin[], woodfrog_dispatch_end[];

void *map_with_dispatch(std::size_t size, const char *&wrong) {
    constexpr int set_dispatch = 59, off = 0, on = 1;
    const char block = 1; // SYSCALL_DISPATCH_FILTER_BLOCK
    if (prctl(set_dispatch, on, woodfrog_dispatch_begin, woodfrog_dispatch_end - woodfrog_dispatch_begin,
              &dispatched) != 0) {
        wrong = "none";
        return nullptr;
    }
    WOODFROG_INLINE_MAP(".globl woodfrog_dispatch_begin\nwoodfrog_dispatch_begin:\n\tmovb $1, (%%r12)",
                        "movb $0, (%%r12)\n.globl woodfrog_dispatch_end\nwoodfrog_dispatch_end:", &block,
                        const_cast<char *>(&dispatched));
    if (prctl(set_dispatch, off, 0, 0, 0) != 0)
        wrong = "dispatching cannot be ended";
    return reinterpret_cast<void *>(result);
}

bool has_protection_keys() {
    unsigned a, b, c = 0, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 4 & 1) != 0; // the kernel uses them
}

#endif

// Answers at once; what is there stays, with nothing in it unless somebody else puts it there.
const char *replace(std::size_t size, bool moved) {
    void *memory = mmap(nullptr, size, protection, kind, -1, 0);
    if (memory == MAP_FAILED ||
        (moved && mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED,
                         mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) == MAP_FAILED))
        return "the mapping cannot be moved";
    void *other = mmap(memory, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    static char answer[64];
    std::snprintf(answer, sizeof answer, "at %lu", reinterpret_cast<unsigned long>(other));
    return answer;
}

const char *round(std::size_t size, void *(*make)(std::size_t, const char *&));

// The child's calls are made where its parent's stack goes on.
__attribute__((noinline)) const char *wait_deep(pid_t child) {
    volatile unsigned char deep[64 << 10];
    for (std::size_t at = 0; at < sizeof deep; at++)
        deep[at] = static_cast<unsigned char>(at * 7 + 1);
    int status = -1;
    while (waitpid(child, &status, __WALL) != child) {
    }
    for (std::size_t at = 0; at < sizeof deep; at++) {
        if (deep[at] != static_cast<unsigned char>(at * 7 + 1))
            return "the parent's stack is wrong";
    }
    return status == 0 ? "right" : "the child is wrong";
}

__attribute__((noinline)) const char *round_in_child(std::size_t size) {
    const long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr); // with no signal when it ends
    if (child == 0)
        _exit(std::strcmp(round(size, map), "right") == 0 ? 0 : 1);
    return child < 0 ? "no child" : wait_deep(static_cast<pid_t>(child));
}

using Map = void *(*)(std::size_t size, const char *&wrong);

// Nothing where there are no such registers.
Map map_of(char order) {
#if defined(__x86_64__)
    switch (order) {
    case 'y':
        return __builtin_cpu_supports("avx") ? map_with_ymm : nullptr;
    case 'g':
        return map_on_coroutine_stack;
    case 'd':
        return map_with_dispatch;
    case 'z':
        return __builtin_cpu_supports("avx512f") ? map_with_zmm : nullptr;
    case 'p':
        return has_protection_keys() ? map_with_pkru : nullptr;
    }
#endif
    return order == 'm' ? map : nullptr;
}

const char *round(std::size_t size, Map make) {
    const sigset_t mask_before = mask();
    const unsigned word_before = control_word();
    const char *wrong = nullptr;
    void *memory = make(size, wrong);
    if (wrong != nullptr)
        return wrong;
    if (reinterpret_cast<std::intptr_t>(memory) < 0 || memory == nullptr)
        return "the mapping is wrong";
    if (control_word() != word_before)
        return "a control register is wrong";
    const sigset_t mask_after = mask();
    if (memcmp(&mask_before, &mask_after, sizeof(std::uint64_t)) != 0)
        return "the signal mask is wrong";
    auto *bytes = static_cast<unsigned char *>(memory);
    for (std::size_t at = 0; at < size; at += page) {
        if (bytes[at] != 0 || bytes[at + page / 2] != 0)
            return "the memory is not clear";
        memset(bytes + at, static_cast<int>(at / page % 255) + 1, page);
    }
    for (std::size_t at = 0; at < size; at += page / 4) {
        if (bytes[at] != at / page % 255 + 1)
            return "the memory is not what was written";
    }
    munmap(memory, size);
    return "right";
}

} // namespace

int main(int count, char **words) {
    const std::size_t size = (count > 1 ? static_cast<std::size_t>(std::atol(words[1])) : 96) << 20;
    std::thread([size] {
#if defined(__x86_64__)
        _mm_setcsr(_mm_getcsr() | rounding);
#endif
        sigset_t some;
        sigemptyset(&some);
        sigaddset(&some, SIGUSR2);
        pthread_sigmask(SIG_BLOCK, &some, nullptr);
        std::printf("ready %d %d\n", getpid(), gettid());
        std::fflush(stdout);
        for (char byte; read(STDIN_FILENO, &byte, 1) == 1;) {
            const Map make = map_of(byte);
            if (byte == 'r' || byte == 'R') {
                std::puts(replace(size, byte == 'r'));
                std::fflush(stdout);
                continue;
            }
            std::puts(byte == 'c' ? round_in_child(size) : make == nullptr ? "none" : round(size, make));
            std::fflush(stdout);
        }
    }).join();
}
