// See torch_clock.hpp. A library reads the clock by std::chrono::steady_clock::now(), and waits either until a time of
// the system clock that it reckons from differences of this one (libstdc++ before glibc 2.30), or until a time of this
// one by pthread_cond_clockwait, which is put into the system's time for the kernel.
#include "torch_clock.hpp"

#include "debug.hpp"
#include "elf_lookup.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <pthread.h>
#include <vector>

// Of glibc 2.30; what needs it has it.
extern "C" __attribute__((weak)) int pthread_cond_clockwait(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                                                            const timespec *);

namespace woodfrog::interpose {
namespace {

constexpr int64_t second_ns = 1'000'000'000;

struct Clock {
    int64_t behind_ns = 0;  // the system's
    int64_t stopped_ns = 0; // at this time of the system's; 0: it goes
};

// Whoever reads has one of both as a whole; the agent writes the other one.
Clock clocks[2];
std::atomic<const Clock *> current{&clocks[0]};
std::atomic<bool> armed{false};

int64_t system_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * second_ns + now.tv_nsec;
}

// Also in the place of std::chrono::steady_clock::now(): a time point is its count of nanoseconds.
int64_t now_ns() {
    const Clock *clock = current.load(std::memory_order_acquire);
    return (clock->stopped_ns != 0 ? clock->stopped_ns : system_ns()) - clock->behind_ns;
}

void set(const Clock &clock) {
    Clock *other = current.load(std::memory_order_relaxed) == &clocks[0] ? &clocks[1] : &clocks[0];
    *other = clock;
    current.store(other, std::memory_order_release);
}

int cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t id, const timespec *until) {
    if (id != CLOCK_MONOTONIC)
        return pthread_cond_clockwait(condition, mutex, id, until);
    const int64_t ns = int64_t{until->tv_sec} * second_ns + until->tv_nsec + system_ns() - now_ns();
    const timespec there{static_cast<time_t>(ns / second_ns), static_cast<long>(ns % second_ns)};
    return pthread_cond_clockwait(condition, mutex, id, &there);
}

bool is_torch(const char *path) {
    const char *name = strrchr(path, '/');
    name = name == nullptr ? path : name + 1;
    return (strncmp(name, "libtorch", 8) == 0 || strncmp(name, "libc10", 6) == 0) && strstr(name, ".so") != nullptr;
}

template <typename Function> bool lead_here(const void *library, const char *name, Function *function) {
    void **reference = elf_reference_in(library, name);
    if (reference != nullptr)
        __atomic_store_n(reference, reinterpret_cast<void *>(function), __ATOMIC_RELEASE);
    return reference != nullptr;
}

bool lead_here(const void *library) {
    // Both or neither: what waits by one clock until a time of the other waits too long, or not at all.
    if (pthread_cond_clockwait == nullptr && elf_reference_in(library, "pthread_cond_clockwait") != nullptr)
        return false;
    if (!lead_here(library, "_ZNSt6chrono3_V212steady_clock3nowEv", &now_ns))
        return false;
    lead_here(library, "pthread_cond_clockwait", &cond_clockwait);
    return true;
}

struct Piece {
    uintptr_t begin = 0;
    bool code = false, first = false;
};

// What is mapped of PyTorch's libraries. From the kernel: an application thread may wait at the gate with the loader's
// lock.
std::vector<Piece> mapped_pieces() {
    std::vector<Piece> found;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == nullptr)
        return found;
    char line[4608]; // a path has 4096 at most
    while (fgets(line, sizeof(line), maps) != nullptr) {
        line[strcspn(line, "\n")] = '\0';
        char permissions[5] = {};
        unsigned long begin = 0;
        unsigned long long offset = 0;
        int path = 0;
        if (sscanf(line, "%lx-%*x %4s %llx %*s %*s %n", &begin, permissions, &offset, &path) == 3 && path != 0 &&
            permissions[0] == 'r' && is_torch(line + path))
            found.push_back({begin, permissions[2] == 'x', offset == 0});
    }
    fclose(maps);
    return found;
}

} // namespace

size_t arm_torch_clock() {
    if (const char *wanted = getenv("WOODFROG_TORCH_CLOCK"); wanted != nullptr && strcmp(wanted, "0") == 0)
        return 0;
    const std::vector<Piece> pieces = mapped_pieces();
    size_t found = 0;
    for (const Piece &piece : pieces) {
        if (!piece.first)
            continue;
        // A library, and not a file that somebody reads: its code is where its headers say.
        const void *library = reinterpret_cast<const void *>(piece.begin);
        const auto code = reinterpret_cast<uintptr_t>(elf_code_in(library));
        if (std::any_of(pieces.begin(), pieces.end(), [&](const Piece &one) { return one.code && one.begin == code; }))
            found += lead_here(library) ? 1 : 0;
    }
    armed.store(found != 0, std::memory_order_relaxed);
    return found;
}

void stop_torch_clock() {
    Clock clock = *current.load(std::memory_order_relaxed);
    if (!armed.load(std::memory_order_relaxed) || clock.stopped_ns != 0)
        return;
    clock.stopped_ns = system_ns();
    set(clock);
}

void start_torch_clock() {
    Clock clock = *current.load(std::memory_order_relaxed);
    if (clock.stopped_ns == 0)
        return;
    const int64_t stood_ns = system_ns() - clock.stopped_ns;
    set({clock.behind_ns + stood_ns, 0});
    debug("PyTorch's clock stood still for %.3f s", static_cast<double>(stood_ns) / second_ns);
}

void torch_clock_after_fork_in_child() {
    start_torch_clock();
}

} // namespace woodfrog::interpose
