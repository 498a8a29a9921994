// What a driver does at a checkpoint, as far as woodfrog-enter sees it: for every byte "m" of its input a thread maps
// populated memory, checks that it is clear, fills it, checks it, looks whether its registers and its signal mask are
// as they were, and unmaps it. Prints "ready PID TID" first and "right" or what was wrong for each round.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#if defined(__x86_64__)
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

const char *round(std::size_t size) {
    const sigset_t mask_before = mask();
    const unsigned word_before = control_word();
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED || memory == nullptr)
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
            std::puts(round(size));
            std::fflush(stdout);
        }
    }).join();
}
