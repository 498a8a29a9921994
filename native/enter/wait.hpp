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

} // namespace woodfrog::enter
