// See quiet.hpp.
#include "quiet.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <sys/ptrace.h>
#include <sys/wait.h>

#if defined(__x86_64__)
#include <sys/user.h>
#endif

#include "remote.hpp"
#include "wait.hpp"

namespace woodfrog::enter {
namespace {

enum class Told { nothing, gone, place };

// Of a thread that does not run: the last word of the line is where it goes on.
Told place_of_sleeping(pid_t pid, pid_t tid, std::uintptr_t &place) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid) + "/syscall");
    if (!file)
        return errno == ENOENT || errno == ESRCH ? Told::gone : Told::nothing;
    std::string line;
    if (!std::getline(file, line))
        return Told::gone;
    const std::size_t last = line.rfind(' ');
    if (last == std::string::npos)
        return Told::nothing; // "running"
    place = std::strtoull(line.c_str() + last + 1, nullptr, 16);
    return Told::place;
}

#if defined(__x86_64__)
Told place_of_running(pid_t tid, std::uintptr_t &place) {
    if (ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0)
        return errno == ESRCH ? Told::gone : Told::nothing;
    ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
    int status = 0;
    if (wait_for(tid, status) != Waited::stopped)
        return Told::gone;
    user_regs_struct registers;
    const bool read = ptrace(PTRACE_GETREGS, tid, nullptr, &registers) == 0;
    if (read)
        place = registers.rip;
    // It may have stopped for a signal, which is its own.
    const int signal = status >> 16 == 0 ? WSTOPSIG(status) : 0;
    ptrace(PTRACE_DETACH, tid, nullptr, reinterpret_cast<void *>(static_cast<std::intptr_t>(signal)));
    return read ? Told::place : Told::nothing;
}
#else
Told place_of_running(pid_t, std::uintptr_t &) {
    return Told::nothing;
}
#endif

} // namespace

bool any_thread_in(pid_t pid, std::uintptr_t begin, std::uintptr_t end) {
    const auto all = threads(pid);
    return std::any_of(all.begin(), all.end(), [&](pid_t tid) {
        std::uintptr_t place = 0;
        Told told = place_of_sleeping(pid, tid, place);
        if (told == Told::nothing)
            told = place_of_running(tid, place);
        return told == Told::nothing || (told == Told::place && place >= begin && place < end);
    });
}

} // namespace woodfrog::enter
