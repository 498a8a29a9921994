// A program with a driver (fake_driver.cpp, whose path is its argument) that copies on a thread of its own, into a
// mapping such as the driver makes. With a second argument the driver has copied nothing before. Prints "ready PID
// TID", the driver's thread, and obeys each byte of its input:
//
//     c   the driver's thread copies 32 pieces of 2 MiB and back, and all bytes are compared
//     b   the driver's thread copies so until `e`
//     e   … and says whether all was right
//     o   the main thread copies so
//     v   the driver's thread copies overlapping memory
//     w   the driver's thread saves, and
//     r   loads what it saved
//     p   the driver's thread copies from memory of the application's that is protected; its handler must run there
//     l   the main thread copies through woodfrog's code, as one that was interrupted on its way there
//     f   forks on the main thread; the child copies so, says "child PID right", and waits
//     s   forbids new threads (seccomp, EPERM) from here on
//     k   ends the process if memory is made executable
//     y   ends the process if a thread yields
//     a   has a filter that calculates in all ways, and lets all through
//     x   forbids to make written memory executable (PR_SET_MDWE)
//     n   may have no more memory (RLIMIT_AS)
//     t   has a thousand threads more
//     m   its driver's thread becomes another program, which waits
//     M   its main thread does
//     i   every half millisecond a signal interrupts the driver's thread from here on
//     u   the driver's thread has something in its vector registers, and looks at it, until `e`
//     q   becomes another user's, who may have no more threads (RLIMIT_NPROC)
//     Q   … one more
//     h   has what another version of woodfrog-enter would leave, WFCOPY01, at another place
//     z   the main thread starts twenty programs (posix_spawn: their first steps are in this one's memory)
//
// Each answers one line.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <map>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr std::size_t piece_words = (std::size_t{2} << 20) / sizeof(std::uint64_t);
constexpr std::size_t pieces = 32;

using Copy = void (*)(void *, const void *, std::size_t);
Copy copy = nullptr;
std::atomic<bool> ending{false};
std::atomic<std::uint64_t> interruptions{0};

std::uint64_t word(std::size_t index, std::uint64_t seed) {
    return 0x9e3779b97f4a7c15u * (index + 1) + seed;
}

constexpr std::size_t words = pieces * piece_words - 517;

struct Buffers {
    std::vector<std::uint64_t> each[2] = {std::vector<std::uint64_t>(piece_words),
                                          std::vector<std::uint64_t>(piece_words)};
    std::vector<std::uint64_t> &operator[](std::size_t number) { return each[number % 2]; }
};

// A state is saved in pieces from two buffers in turn, and loaded back into them. The last piece is no whole one.
std::uint64_t *save(std::uint64_t seed, bool &right) {
    Buffers buffers;
    void *memory = mmap(nullptr, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    auto *saved = static_cast<std::uint64_t *>(memory);
    for (std::size_t begin = 0, number = 0; begin < words; begin += piece_words, number++) {
        std::vector<std::uint64_t> &buffer = buffers[number];
        const std::size_t count = std::min(piece_words, words - begin);
        for (std::size_t i = 0; i < count; i++)
            buffer[i] = word(begin + i, seed);
        copy(saved + begin, buffer.data(), count * 8);
        memset(buffer.data(), 0xee, count * 8);
        for (std::size_t i = 0; i < count; i++)
            right &= saved[begin + i] == word(begin + i, seed);
    }
    return saved;
}

void load(std::uint64_t *saved, std::uint64_t seed, bool &right) {
    Buffers buffers;
    for (std::size_t begin = 0, number = 0; begin < words; begin += piece_words, number++) {
        std::vector<std::uint64_t> &buffer = buffers[number];
        const std::size_t count = std::min(piece_words, words - begin);
        copy(buffer.data(), saved + begin, count * 8);
        for (std::size_t i = 0; i < count; i++)
            right &= buffer[i] == word(begin + i, seed);
    }
    munmap(saved, words * 8);
}

bool is_right(std::uint64_t seed) {
    bool right = true;
    load(save(seed, right), seed, right);
    return right;
}

volatile pid_t handled_by = 0;
std::uint8_t *protected_memory = nullptr;
constexpr std::size_t protected_bytes = 2 << 20;

void unprotect(int) {
    handled_by = gettid();
    mprotect(protected_memory, protected_bytes, PROT_READ | PROT_WRITE);
}

bool is_right_protected() {
    protected_memory = static_cast<std::uint8_t *>(
        mmap(nullptr, protected_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    memset(protected_memory, 0x5a, protected_bytes);
    mprotect(protected_memory, protected_bytes, PROT_NONE);
    struct sigaction action{};
    action.sa_handler = unprotect;
    sigaction(SIGSEGV, &action, nullptr);
    handled_by = 0;
    std::vector<std::uint8_t> into(protected_bytes);
    copy(into.data(), protected_memory, protected_bytes);
    const bool right = handled_by == gettid() && into == std::vector<std::uint8_t>(protected_bytes, 0x5a);
    munmap(protected_memory, protected_bytes);
    return right;
}

// Where woodfrog-enter's code begins (native/enter/blob/layout.hpp): a magic number, and where its memcpy is.
bool is_right_late() {
    constexpr std::uintptr_t place = 0x1f0df4160000;
    const auto entry = place + reinterpret_cast<const std::uint32_t *>(place)[2];
    std::vector<std::uint8_t> from(protected_bytes, 0x77), into(protected_bytes);
    reinterpret_cast<void *(*)(void *, const void *, std::size_t)>(entry)(into.data(), from.data(), into.size());
    return into == from;
}

// Its header, and behind it a jump to the C library's memcpy.
bool have_other_version() {
    constexpr std::uintptr_t place = 0x1f0df4060000;
    constexpr std::size_t entry = 16;
    void *memory = mmap(reinterpret_cast<void *>(place), 3 * 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory != reinterpret_cast<void *>(place))
        return false;
    auto *bytes = static_cast<unsigned char *>(memory);
    void *(*const replaced)(void *, const void *, std::size_t) = memcpy;
    memcpy(bytes, "WFCOPY01\x10\0\0\0\x10\0\0\0\x48\xb8", entry + 2); // movabs $replaced, %rax; jmp *%rax
    memcpy(bytes + entry + 2, &replaced, sizeof replaced);
    memcpy(bytes + entry + 2 + sizeof replaced, "\xff\xe0", 2);
    return mprotect(memory, 4096, PROT_READ | PROT_EXEC) == 0;
}

// As the C library's, which is one function with memmove.
bool is_right_overlapping() {
    bool right = true;
    for (const std::size_t distance : {std::size_t{1}, std::size_t{4096}, std::size_t{1} << 20}) {
        std::vector<std::uint8_t> memory(4 << 20), wanted;
        for (std::size_t i = 0; i < memory.size(); i++)
            memory[i] = static_cast<std::uint8_t>(word(i, distance) >> 32);
        wanted = memory;
        memmove(wanted.data() + distance, wanted.data(), memory.size() - distance);
        copy(memory.data() + distance, memory.data(), memory.size() - distance);
        right &= memory == wanted;
        memmove(wanted.data(), wanted.data() + distance, memory.size() - distance);
        copy(memory.data(), memory.data() + distance, memory.size() - distance);
        right &= memory == wanted;
    }
    return right;
}

// For some milliseconds at a time, in the upper half of a register too.
bool keeps_registers() {
    if (!__builtin_cpu_supports("avx"))
        return true;
    const std::uint64_t in[4] = {word(1, 5), word(2, 5), word(3, 5), word(4, 5)};
    std::uint64_t out[4] = {};
    asm volatile("vmovdqu %1, %%ymm7\n\tmovl $4000000, %%ecx\n1:\n\tdecl %%ecx\n\tjnz 1b\n\tvmovdqu %%ymm7, %0"
                 : "=m"(out)
                 : "m"(in)
                 : "ecx", "cc", "xmm7");
    return memcmp(in, out, sizeof in) == 0;
}

void say(const char *text) {
    std::puts(text);
    std::fflush(stdout);
}

void drive(int orders) {
    std::printf("ready %d %d\n", getpid(), gettid());
    std::fflush(stdout);
    sigset_t mask, now;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &mask, nullptr);
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    std::uint64_t seed = 0, *saved = nullptr;
    for (char order;;) {
        // The kernel makes a call with a time limit again by another way than one without.
        pollfd wait{orders, POLLIN, 0};
        int found = 0;
        do {
            found = poll(&wait, 1, seed % 2 == 0 ? 600'000 : -1);
        } while (found < 0 && errno == EINTR && interruptions.load() > 0);
        if (found != 1) {
            say("a call was ended");
            return;
        }
        if (read(orders, &order, 1) != 1)
            return;
        bool right = true;
        if (order == 'v')
            right = is_right_overlapping();
        else if (order == 'u')
            while (!ending.load())
                right &= keeps_registers();
        else if (order == 'p')
            right = is_right_protected();
        else if (order == 'm')
            execl("/bin/cat", "cat", nullptr);
        else if (order == 'w')
            saved = save(4711, right);
        else if (order == 'r')
            load(saved, 4711, right);
        else
            right = is_right(++seed);
        pthread_sigmask(SIG_BLOCK, nullptr, &now);
        right &= memcmp(&now, &mask, sizeof(std::uint64_t)) == 0;
        while (order == 'b' && !ending.load())
            right &= is_right(++seed);
        say(right ? "right" : "wrong");
    }
}

void fork_child() {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child != 0) {
        if (child < 0)
            say("no child");
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::printf("child %d %s\n", getpid(), is_right(77) ? "right" : "wrong");
    std::fflush(stdout);
    for (;;)
        pause();
}

bool set_filter(const sock_filter *code, std::size_t count) {
    const sock_fprog program{static_cast<unsigned short>(count), const_cast<sock_filter *>(code)};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

bool forbid_threads() {
    const sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return set_filter(code, std::size(code));
}

bool die_of_executable_memory() {
    const sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return set_filter(code, std::size(code));
}

bool die_of_yielding() {
    const sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_yield, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return set_filter(code, std::size(code));
}

// (((((64 + 6) * 3 - 10) / 2) ^ 0xff | 0x100) & 0x1ff) << 4 >> 2, negated twice: 0x66c; anything else kills. The kernel
// runs it for every call as well.
bool calculate_in_filter() {
    const sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),
        BPF_STMT(BPF_LDX | BPF_W | BPF_IMM, 6),
        BPF_STMT(BPF_ALU | BPF_ADD | BPF_X, 0),
        BPF_STMT(BPF_ALU | BPF_MUL | BPF_K, 3),
        BPF_STMT(BPF_ST, 7),
        BPF_STMT(BPF_LD | BPF_IMM, 10),
        BPF_STMT(BPF_MISC | BPF_TAX, 0),
        BPF_STMT(BPF_LD | BPF_MEM, 7),
        BPF_STMT(BPF_ALU | BPF_SUB | BPF_X, 0),
        BPF_STMT(BPF_ALU | BPF_DIV | BPF_K, 2),
        BPF_STMT(BPF_ALU | BPF_XOR | BPF_K, 0xff),
        BPF_STMT(BPF_ALU | BPF_OR | BPF_K, 0x100),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0x1ff),
        BPF_STMT(BPF_ALU | BPF_LSH | BPF_K, 4),
        BPF_STMT(BPF_ALU | BPF_RSH | BPF_K, 2),
        BPF_STMT(BPF_ALU | BPF_NEG, 0),
        BPF_STMT(BPF_MISC | BPF_TAX, 0),
        BPF_STMT(BPF_STX, 3),
        BPF_STMT(BPF_LDX | BPF_MEM, 3),
        BPF_STMT(BPF_MISC | BPF_TXA, 0),
        BPF_STMT(BPF_ALU | BPF_NEG, 0),
        BPF_STMT(BPF_JMP | BPF_JA, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x66c, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 0x66b, 0, 3),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x66d, 2, 0),
        BPF_STMT(BPF_LD | BPF_IMM, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_A, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    return set_filter(code, std::size(code));
}

bool forbid_code() {
    constexpr int set_mdwe = 65, refuse_exec_gain = 1; // of <linux/prctl.h> from 6.3 on
    return prctl(set_mdwe, refuse_exec_gain, 0, 0, 0) == 0;
}

bool take_no_more_memory() {
    std::FILE *file = std::fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    const bool read = file != nullptr && std::fscanf(file, "%lu", &pages) == 1;
    const rlimit now{pages * 4096, pages * 4096};
    return read && std::fclose(file) == 0 && setrlimit(RLIMIT_AS, &now) == 0;
}

// A user that nobody else is: it has this process's two threads.
bool have_few_threads(rlim_t most) {
    constexpr uid_t user = 54321;
    const rlimit limit{most, most};
    interruptions.fetch_add(1); // the C library has every thread change its user, by a signal
    return setrlimit(RLIMIT_NPROC, &limit) == 0 && setuid(user) == 0;
}

bool be_interrupted() {
    struct sigaction action{};
    action.sa_handler = [](int) { interruptions.fetch_add(1); };
    action.sa_flags = SA_RESTART;
    const itimerval often{{0, 500}, {0, 500}};
    sigset_t mask; // else the kernel prefers this thread
    sigemptyset(&mask);
    sigaddset(&mask, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &mask, nullptr);
    return sigaction(SIGALRM, &action, nullptr) == 0 && setitimer(ITIMER_REAL, &often, nullptr) == 0;
}

bool start_programs() {
    bool right = true;
    for (int i = 0; i < 20; i++) {
        char name[] = "true", *words[] = {name, nullptr};
        pid_t child = 0;
        int status = 1;
        right &= posix_spawnp(&child, name, nullptr, nullptr, words, environ) == 0 &&
                 waitpid(child, &status, 0) == child && status == 0;
    }
    return right;
}

bool have_many_threads() {
    for (int i = 0; i < 1000; i++) {
        pthread_attr_t small;
        pthread_t thread;
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 65536);
        const auto wait = [](void *) -> void * {
            for (;;)
                pause();
        };
        if (pthread_create(&thread, &small, wait, nullptr) != 0)
            return false;
    }
    return true;
}

} // namespace

const std::map<char, bool (*)()> own_orders = {
    {'l', is_right_late},
    {'s', forbid_threads},
    {'k', die_of_executable_memory},
    {'y', die_of_yielding},
    {'a', calculate_in_filter},
    {'x', forbid_code},
    {'n', take_no_more_memory},
    {'t', have_many_threads},
    {'i', be_interrupted},
    {'z', start_programs},
    {'h', have_other_version},
    {'q', [] { return have_few_threads(2); }},
    {'Q', [] { return have_few_threads(3); }},
};

int main(int count, char **words) {
    void *driver = count >= 2 ? dlopen(words[1], RTLD_LAZY) : nullptr;
    copy = driver == nullptr ? nullptr : reinterpret_cast<Copy>(dlsym(driver, "copy_as_driver"));
    int ends[2];
    if (copy == nullptr || pipe(ends) != 0)
        return 2;
    std::uint64_t from = 1, to = 0;
    if (count == 2)
        copy(&to, &from, sizeof from);
    std::thread thread(drive, ends[0]);
    for (char order; read(STDIN_FILENO, &order, 1) == 1;) {
        if (order == 'e')
            ending.store(true);
        else if (order == 'o')
            say(is_right(99) ? "right" : "wrong");
        else if (order == 'M')
            execl("/bin/cat", "cat", nullptr);
        else if (order == 'f')
            fork_child();
        else if (const auto own = own_orders.find(order); own != own_orders.end())
            say(own->second() ? "right" : "wrong");
        else if (write(ends[1], &order, 1) != 1)
            return 3;
    }
    _exit(0);
}
