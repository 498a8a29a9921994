// Our file descriptors in the application's table; see kept_fd.hpp.
#include "kept_fd.hpp"

#include "debug.hpp"

#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <mutex>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace woodfrog::interpose {
namespace {

// The kernel's table has a slot for every number up to the highest one in use, and fork copies it: high, but no higher
// than keeps clear of what an ordinary application (limit 1024) uses.
constexpr rlim_t kHighestBase = 4096;
constexpr rlim_t kBelowLimit = 512;
constexpr rlim_t kMargin = 64; // for what the application opens meanwhile

struct Registry {
    std::mutex mutex;
    std::unordered_map<int, KeptFd> fds; // by their numbers
    std::vector<int> passing;            // announced, for moments only
};

Registry &registry() {
    static Registry *const instance = new Registry; // never destroyed: threads outlive the destructors of exit()
    return *instance;
}

rlim_t soft_limit() {
    rlimit limit{};
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

int high_base() {
    const rlim_t limit = std::min(soft_limit(), kHighestBase);
    return static_cast<int>(limit > 2 * kBelowLimit ? limit - kBelowLimit : limit / 2);
}

void identify(KeptFd *kept, const struct stat &status) {
    kept->device = status.st_dev;
    kept->inode = status.st_ino;
    kept->special = status.st_rdev;
}

size_t open_fds() {
    DIR *directory = opendir("/proc/self/fd");
    if (directory == nullptr)
        return 0;
    size_t count = 0;
    while (readdir(directory) != nullptr)
        ++count;
    closedir(directory);
    return count;
}

int raise_soft_limit(rlim_t wanted) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return errno;
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted)
        return 0;
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < wanted)
        return EMFILE;
    limit.rlim_cur = wanted;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? 0 : errno;
}

} // namespace

int keep_fd(int fd, KeptFd *kept) {
    std::lock_guard lock(registry().mutex);
    std::erase(registry().passing, fd);
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, high_base());
    if (moved < 0) // the upper numbers are full: any number will do
        moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    const int error = errno;
    close(fd);
    if (moved < 0)
        return error;
    struct stat status{};
    if (fstat(moved, &status) != 0) {
        const int reason = errno;
        close(moved);
        return reason;
    }
    kept->fd = moved;
    identify(kept, status);
    registry().fds[moved] = *kept;
    return 0;
}

bool fd_is_ours(const KeptFd &kept) {
    struct stat status{};
    return kept.fd >= 0 && fstat(kept.fd, &status) == 0 && status.st_dev == kept.device &&
           status.st_ino == kept.inode && status.st_rdev == kept.special;
}

ForkPause::ForkPause() {
    registry().mutex.lock();
}
ForkPause::~ForkPause() {
    registry().mutex.unlock();
}
void ForkPause::announce(int fd) {
    registry().passing.push_back(fd);
}

void finish_fd(int fd, bool keep_open) {
    std::lock_guard lock(registry().mutex);
    std::erase(registry().passing, fd);
    if (!keep_open)
        close(fd);
}

void close_kept(KeptFd *kept) {
    if (kept->fd < 0)
        return;
    std::lock_guard lock(registry().mutex);
    registry().fds.erase(kept->fd);
    if (fd_is_ours(*kept))
        close(kept->fd);
    else
        debug("descriptor %d was closed by the application", kept->fd);
    *kept = KeptFd{};
}

int make_room_for_fds(size_t more) {
    const rlim_t needed = static_cast<rlim_t>(high_base()) + open_fds() + more + kMargin;
    if (raise_soft_limit(needed) == 0)
        return 0;
    // Tight: the hard limit does not leave the low numbers to the application, but it may still be enough.
    const rlim_t least = open_fds() + more + kMargin / 4;
    return raise_soft_limit(least);
}

void kept_fds_before_fork() {
    registry().mutex.lock();
}

void kept_fds_after_fork_in_parent() {
    registry().mutex.unlock();
}

void kept_fds_after_fork_in_child() {
    for (const auto &[number, kept] : registry().fds)
        if (fd_is_ours(kept))
            close(kept.fd);
    for (const int fd : registry().passing)
        close(fd);
    registry().fds.clear();
    registry().passing.clear();
    registry().mutex.unlock();
}

} // namespace woodfrog::interpose
