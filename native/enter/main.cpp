// woodfrog-enter: stands beside a process while the driver checkpoints it, until its standard input ends. What it does
// to the process is in tracer.hpp; what it tells, and its options, in README.md. A program of its own, because ptrace
// belongs to one thread, because a daemon that waits for its children would take its events, and because the process is
// then let go in good order when the daemon is killed: its end of the pipe closes.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

#include "tracer.hpp"

namespace {

using namespace woodfrog::enter;

[[noreturn]] void usage() {
    std::fprintf(stderr, "usage: woodfrog-enter [--populate THREADS] [--copy THREADS] [--restore] [--idle S] "
                         "[--wait] [--record] [--least BYTES] PID [TID...]\n");
    std::exit(2);
}

std::uint64_t number(const char *text) {
    char *end = nullptr;
    const unsigned long long value = text != nullptr ? std::strtoull(text, &end, 10) : 0;
    if (text == nullptr || end == text || *end != '\0')
        usage();
    return value;
}

Options parse(char **words) {
    Options options;
    for (; *words != nullptr && (*words)[0] == '-'; words++) {
        if (std::strcmp(*words, "--populate") == 0) {
            options.populate_threads = static_cast<unsigned>(std::min<std::uint64_t>(number(*++words), 256));
        } else if (std::strcmp(*words, "--copy") == 0) {
            options.copy_threads = static_cast<unsigned>(std::min<std::uint64_t>(number(*++words), 256));
        } else if (std::strcmp(*words, "--restore") == 0) {
            options.restores = true;
        } else if (std::strcmp(*words, "--idle") == 0) {
            options.idle_s = number(*++words);
        } else if (std::strcmp(*words, "--wait") == 0) {
            options.wait = true;
        } else if (std::strcmp(*words, "--record") == 0) {
            options.record = true;
        } else if (std::strcmp(*words, "--least") == 0) {
            options.least_bytes = number(*++words);
        } else {
            usage();
        }
    }
    options.pid = static_cast<pid_t>(number(*words));
    if (options.pid <= 0)
        usage();
    while (*++words != nullptr)
        options.threads.push_back(static_cast<pid_t>(number(*words)));
    return options;
}

} // namespace

int main(int, char **arguments) {
    const Options options = parse(arguments + 1);
    // Signals are waited for, by the thread that traces alone; a reader that is gone is noticed by the end of our
    // input.
    sigset_t signals;
    sigemptyset(&signals);
    for (const int one : {SIGCHLD, SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGPIPE})
        sigaddset(&signals, one);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    std::signal(SIGCHLD, SIG_DFL);
    std::thread([] {
        char byte;
        while (read(STDIN_FILENO, &byte, 1) > 0) {
        }
        kill(getpid(), SIGUSR1);
    }).detach();
    Tracer tracer(options);
    if (!tracer.attach())
        return 1;
    tracer.run();
    return 0;
}
