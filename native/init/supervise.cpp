// See supervise.hpp.
#include "supervise.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace woodfrog::init {
namespace {

constexpr int kNotRun = 127;
constexpr int kSignalled = 128;

int status_of(int wait_status) {
    return WIFSIGNALED(wait_status) ? kSignalled + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

pid_t start(char **command, const sigset_t &mask) {
    const pid_t child = fork();
    if (child == 0) {
        sigprocmask(SIG_SETMASK, &mask, nullptr);
        execv(command[0], command);
        std::fprintf(stderr, "woodfrog-init: %s cannot be run: %s\n", command[0], std::strerror(errno));
        _exit(kNotRun);
    }
    if (child < 0)
        std::fprintf(stderr, "woodfrog-init: fork: %s\n", std::strerror(errno));
    return child;
}

void tell(int report, int status) {
    // Nobody there to read it is no concern of ours: the launcher was killed.
    if (write(report, &status, sizeof status) != sizeof status)
        std::fprintf(stderr, "woodfrog-init: nobody waits any more\n");
    close(report);
}

} // namespace

int run(char **command) {
    sigset_t mask;
    sigprocmask(SIG_SETMASK, nullptr, &mask);
    const pid_t child = start(command, mask);
    int status = 0;
    if (child < 0)
        return kNotRun;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR)
            return kNotRun;
    }
    return status_of(status);
}

void supervise(char **command, pid_t root, int report, void (*idle)()) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    std::signal(SIGPIPE, SIG_IGN);
    const pid_t program = start(command, before);
    if (program < 0) {
        tell(report, kNotRun);
        _exit(kNotRun);
    }
    bool made = false;
    for (;;) {
        // Everything that has ended first: signals of one kind do not queue.
        int status = 0;
        for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
            if (ended == program && !made) {
                int result = status_of(status);
                if (result == 0 && kill(root, 0) != 0) {
                    std::fprintf(stderr, "woodfrog-init: process %d was not left behind\n", static_cast<int>(root));
                    result = kNotRun;
                }
                if (result == 0)
                    idle(); // before it is told: whoever reads it finds us as we shall be
                tell(report, result);
                close_range(STDERR_FILENO + 1, ~0U, 0); // what CRIU was handed is the restored processes' alone
                if (result != 0)
                    _exit(result);
                made = true;
            } else if (ended == root) {
                _exit(status_of(status));
            }
        }
        siginfo_t info{};
        const int number = sigwaitinfo(&all, &info);
        if (number > 0 && number != SIGCHLD && made)
            kill(root, number);
    }
}

} // namespace woodfrog::init
