// Waiting for one thread that this process traces.
#pragma once

#include <sys/types.h>

namespace woodfrog::enter {

enum class Waited {
    stopped, // `status` is waitpid's, as for the next
    ended,
    dying, // a process's first thread, which waitpid tells of only when all others have been waited for
    lost,  // it is none of ours (any more)
};

// Until there is something to tell of the thread. SIGCHLD must be blocked, and may have been taken afterwards.
Waited wait_for(pid_t tid, int &status);

// The signal for which a thread has stopped, for the ptrace call with which it goes on: it is the process's, a thread
// of ours that took it too (SIGSTOP can be kept from nobody). Null at every other stop.
void *taken_signal(int status);

} // namespace woodfrog::enter
