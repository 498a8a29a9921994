// A target that does as it is told: orders are lines appended to a file, SIGUSR1 says that there are more, and each is
// answered by one line on standard output, "N answer" for order N (from 1). No socket, pipe or open file stands in the
// way of a dump.
#pragma once

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <unistd.h>

namespace orders {

inline void say(const std::string &line) {
    const std::string whole = line + "\n";
    if (write(STDOUT_FILENO, whole.data(), whole.size()) != static_cast<ssize_t>(whole.size()))
        std::exit(4);
}

// Takes orders until `end`; the exit status. `prepare` says whether the target is ready (after the signal is blocked,
// before anything that starts a thread), `obey` answers an order.
template <typename Prepare, typename Obey> int take(const char *path, const Prepare &prepare, const Obey &obey) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, nullptr); // before the first thread: all of them inherit it
    if (!prepare())
        return 3;
    say("0 ready");
    uint64_t done = 0;
    for (;;) {
        int signal = 0;
        sigwait(&signals, &signal);
        std::ifstream file(path);
        std::string line;
        for (uint64_t number = 1; std::getline(file, line); ++number) {
            if (number <= done)
                continue;
            done = number;
            if (line == "end") {
                say(std::to_string(number) + " ok");
                return 0;
            }
            say(std::to_string(number) + " " + obey(line));
        }
    }
}

} // namespace orders
