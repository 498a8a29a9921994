// A program with a driver (fake_driver.cpp, whose path is its argument) that copies on a thread of its own. Prints
// "ready PID TID", the driver's thread, and obeys each byte of its input:
//
//     c   the driver's thread copies 32 pieces of 2 MiB and back, and all bytes are compared
//     b   the driver's thread copies so until `e`
//     e   … and says whether all was right
//     o   the main thread copies so
//     v   the driver's thread copies overlapping memory
//     f   forks on the main thread; the child copies so, says "child PID right", and waits
//     s   forbids new threads (seccomp, EPERM) from here on
//
// Each answers one line.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr std::size_t piece_words = (std::size_t{2} << 20) / sizeof(std::uint64_t);
constexpr std::size_t pieces = 32;

using Copy = void (*)(void *, const void *, std::size_t);
Copy copy = nullptr;
std::atomic<bool> ending{false};

std::uint64_t word(std::size_t index, std::uint64_t seed) {
    return 0x9e3779b97f4a7c15u * (index + 1) + seed;
}

// A state is saved in pieces from two buffers in turn, and loaded back into them. The last piece is no whole one.
bool is_right(std::uint64_t seed) {
    const std::size_t words = pieces * piece_words - 517;
    std::vector<std::uint64_t> buffers[2] = {std::vector<std::uint64_t>(piece_words),
                                             std::vector<std::uint64_t>(piece_words)};
    void *memory = mmap(nullptr, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    auto *saved = static_cast<std::uint64_t *>(memory);
    bool right = true;
    for (std::size_t begin = 0, number = 0; begin < words; begin += piece_words, number++) {
        std::vector<std::uint64_t> &buffer = buffers[number % 2];
        const std::size_t count = std::min(piece_words, words - begin);
        for (std::size_t i = 0; i < count; i++)
            buffer[i] = word(begin + i, seed);
        copy(saved + begin, buffer.data(), count * 8);
        memset(buffer.data(), 0xee, count * 8);
        for (std::size_t i = 0; i < count; i++)
            right &= saved[begin + i] == word(begin + i, seed);
    }
    for (std::size_t begin = 0, number = 0; begin < words; begin += piece_words, number++) {
        std::vector<std::uint64_t> &buffer = buffers[number % 2];
        const std::size_t count = std::min(piece_words, words - begin);
        copy(buffer.data(), saved + begin, count * 8);
        for (std::size_t i = 0; i < count; i++)
            right &= buffer[i] == word(begin + i, seed);
    }
    munmap(memory, words * 8);
    return right;
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
    std::uint64_t seed = 0;
    for (char order;;) {
        // The kernel makes a call with a time limit again by another way than one without.
        pollfd wait{orders, POLLIN, 0};
        if (poll(&wait, 1, seed % 2 == 0 ? 600'000 : -1) != 1) {
            say("a call was ended");
            return;
        }
        if (read(orders, &order, 1) != 1)
            return;
        bool right = order == 'v' ? is_right_overlapping() : is_right(++seed);
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

bool forbid_threads() {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{sizeof code / sizeof code[0], code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

} // namespace

int main(int count, char **words) {
    void *driver = count == 2 ? dlopen(words[1], RTLD_LAZY) : nullptr;
    copy = driver == nullptr ? nullptr : reinterpret_cast<Copy>(dlsym(driver, "copy_as_driver"));
    int ends[2];
    if (copy == nullptr || pipe(ends) != 0)
        return 2;
    std::thread thread(drive, ends[0]);
    for (char order; read(STDIN_FILENO, &order, 1) == 1;) {
        if (order == 'e')
            ending.store(true);
        else if (order == 'o')
            say(is_right(99) ? "right" : "wrong");
        else if (order == 'f')
            fork_child();
        else if (order == 's')
            say(forbid_threads() ? "right" : "wrong");
        else if (write(ends[1], &order, 1) != 1)
            return 3;
    }
    _exit(0);
}
