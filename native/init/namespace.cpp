// See namespace.hpp.
#include "namespace.hpp"

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::init {
namespace {

bool failed(const char *what) {
    std::fprintf(stderr, "woodfrog-init: %s: %s\n", what, std::strerror(errno));
    return false;
}

} // namespace

pid_t fork_into_new() {
    // No stack: a plain fork, with the namespaces made on the way. Only the raw call can do that.
    return static_cast<pid_t>(syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, nullptr, nullptr, nullptr, 0));
}

bool prepare_mounts(const std::vector<Bind> &binds) {
    if (mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0)
        return failed("the mounts cannot be made this namespace's own");
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0)
        return failed("/proc cannot be mounted in the new PID namespace");
    for (const Bind &bind : binds) {
        if (mount(bind.from.c_str(), bind.onto.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0)
            return failed(("cannot bind " + bind.from + " over " + bind.onto).c_str());
    }
    return true;
}

bool set_last_number(pid_t last) {
    if (last <= 0)
        return true;
    const int file = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    char text[16];
    const int length = std::snprintf(text, sizeof text, "%d", static_cast<int>(last));
    const bool written = file >= 0 && write(file, text, static_cast<size_t>(length)) == length;
    if (!written)
        failed("/proc/sys/kernel/ns_last_pid cannot be set");
    if (file >= 0)
        close(file);
    return written;
}

bool join(pid_t pid) {
    char here[PATH_MAX];
    if (getcwd(here, sizeof here) == nullptr)
        return failed("the working directory is gone");
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (pidfd < 0)
        return failed("the process whose namespaces are wanted is gone");
    const bool joined = setns(pidfd, CLONE_NEWPID | CLONE_NEWNS) == 0;
    if (!joined)
        failed("the namespaces of the process cannot be entered");
    close(pidfd);
    // Entering a mount namespace leads to its root directory.
    if (joined && chdir(here) != 0)
        return failed("the working directory is not there in the mount namespace of the process");
    return joined;
}

} // namespace woodfrog::init
