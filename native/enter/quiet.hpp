// Whether any thread of a process is just then running code of ours: before that is unmapped.
#pragma once

#include <cstdint>
#include <sys/types.h>

namespace woodfrog::enter {

// Whether a thread stands in [begin, end). Most are asleep in the kernel, or stopped, and /proc says where; one that
// runs is stopped for that, for some microseconds. A thread whose place cannot be told, as one that runs and is traced
// already, counts as one that stands there.
bool any_thread_in(pid_t pid, std::uintptr_t begin, std::uintptr_t end);

} // namespace woodfrog::enter
