// See wait.hpp.
#include "wait.hpp"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <sys/wait.h>
#include <time.h>

#include "remote.hpp"

namespace woodfrog::enter {

Waited wait_for(pid_t tid, int &status) {
    sigset_t told;
    sigemptyset(&told);
    sigaddset(&told, SIGCHLD);
    for (bool dead = false;;) {
        const pid_t who = waitpid(tid, &status, __WALL | WNOHANG);
        if (who == tid)
            return WIFSTOPPED(status) ? Waited::stopped : Waited::ended;
        if (who < 0 && errno != EINTR)
            return Waited::lost;
        if (who < 0)
            continue;
        if (dead)
            return Waited::dying;
        constexpr timespec look_again{0, 10'000'000};
        if (sigtimedwait(&told, nullptr, &look_again) < 0 && errno == EAGAIN) {
            // Nobody tells of a first thread that dies before the others.
            const std::string state = status_field(tid, "State");
            dead = state.empty() || state[0] == 'Z' || state[0] == 'X';
        }
    }
}

void *taken_signal(int status) {
    const bool is_signal = status >> 16 == 0 && WSTOPSIG(status) != (SIGTRAP | 0x80); // PTRACE_O_TRACESYSGOOD
    return reinterpret_cast<void *>(static_cast<std::intptr_t>(is_signal ? WSTOPSIG(status) : 0));
}

} // namespace woodfrog::enter
