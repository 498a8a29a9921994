// Threads of ours in a process that is not ours.
#pragma once

#include <cstddef>

namespace woodfrog::interpose {

// Starts a detached thread in which every signal is blocked, so that no handler of the application ever runs there.
// The error number of pthread_create, 0 if it runs.
int start_thread(const char *name, void *(*body)(void *), void *argument, size_t stack_bytes);

} // namespace woodfrog::interpose
