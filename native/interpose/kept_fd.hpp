// The file descriptors that this library holds inside the application.
//
// They lie at high numbers, close on exec, are known to the fork handler, and are never trusted: an application may
// close any descriptor it likes (closefrom, daemonising) and get the number back for a file of its own. Nothing here
// may close or use a number that is no longer the file we put there.
#pragma once

#include <cstddef>
#include <sys/types.h>

namespace woodfrog::interpose {

// A descriptor of ours and the identity of the file behind it.
struct KeptFd {
    int fd = -1;
    dev_t device = 0;
    ino_t inode = 0;
    dev_t special = 0;
};

// Takes over `fd` (which must be one that the application has never seen) and moves it to a high number. Returns 0, or
// an errno; `fd` is closed in both cases unless it could be moved.
int keep_fd(int fd, KeptFd *kept);
// Whether the number still is the file that was kept.
bool fd_is_ours(const KeptFd &kept);
// Closes it when it still is ours; forgets it in any case.
void close_kept(KeptFd *kept);

// While it lives no fork happens: what is opened meanwhile can be made known before a child could inherit it.
class ForkPause {
  public:
    ForkPause();
    ~ForkPause();
    ForkPause(const ForkPause &) = delete;
    ForkPause &operator=(const ForkPause &) = delete;
    // A descriptor on its way through this process, not to be kept; a forked child closes it.
    void announce(int fd);
};
// Closes a descriptor that was announced, or (`keep_open`) only says that it is no longer on its way.
void finish_fd(int fd, bool keep_open);

// Raises the soft limit so that `more` descriptors fit besides those open now. Returns 0, or EMFILE when the hard limit
// forbids it.
int make_room_for_fds(size_t more);

// Around fork: the child closes what it inherited.
void kept_fds_before_fork();
void kept_fds_after_fork_in_parent();
void kept_fds_after_fork_in_child();

} // namespace woodfrog::interpose
