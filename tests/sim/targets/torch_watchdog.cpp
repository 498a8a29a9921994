// A library with watchdogs as PyTorch's ProcessGroupNCCL has them, for tests that give it the name of PyTorch's: its
// watchdog thread asks the driver again and again, and another thread looks whether the first one still comes on. Both
// tell time by std::chrono::steady_clock and wait by std::condition_variable, as those do. What they find goes to the
// file $TORCH_WATCHDOG_LOG, a line each: "late SECONDS" once something took longer than $TORCH_WATCHDOG_LIMIT_S, and
// "looks N" twice a second, how often the second thread has looked so far (every 50 ms).
//
// With OLD_WAITS as libstdc++ waits where the C library was older than 2.30 when the library was compiled, which is so
// for PyTorch's own builds.
#ifdef OLD_WAITS
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#endif
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <mutex>
#include <stdio.h>
#include <thread>
#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::atomic<long> heartbeat{0};

void tell(const char *what, double value) {
    const int log = open(getenv("TORCH_WATCHDOG_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dprintf(log, "%s %.3f\n", what, value);
    close(log);
}

double limit_s() {
    return atof(getenv("TORCH_WATCHDOG_LIMIT_S"));
}

double since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

void wait_for(milliseconds time) {
    std::mutex mutex;
    std::condition_variable condition;
    std::unique_lock<std::mutex> lock(mutex);
    condition.wait_for(lock, time, [] { return false; });
}

void watch() {
    int (*ask)(int *) = nullptr; // a driver call that waits while the target is held
    for (;;) {
        if (ask == nullptr)
            ask = reinterpret_cast<int (*)(int *)>(dlsym(RTLD_DEFAULT, "cuDeviceGetCount"));
        const Clock::time_point work = Clock::now();
        int count = 0;
        if (ask != nullptr)
            ask(&count);
        if (since(work) > limit_s())
            tell("late", since(work));
        ++heartbeat;
        wait_for(milliseconds(100));
    }
}

void watch_the_watchdog() {
    long seen = -1, looks = 0;
    Clock::time_point beaten = Clock::now();
    for (;;) {
        wait_for(milliseconds(50));
        if (++looks % 10 == 0)
            tell("looks", static_cast<double>(looks));
        if (heartbeat != seen) {
            seen = heartbeat;
            beaten = Clock::now();
        } else if (since(beaten) > limit_s()) {
            tell("late", since(beaten));
            beaten = Clock::now();
        }
    }
}

__attribute__((constructor)) void begin() {
    if (getenv("TORCH_WATCHDOG_LOG") == nullptr || getenv("WOODFROG_NAME") == nullptr) // a target, and no launcher
        return;
    std::thread(watch).detach();
    std::thread(watch_the_watchdog).detach();
}

} // namespace
