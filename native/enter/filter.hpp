// What the seccomp filters of a thread say to a system call, before anybody makes it: a filter may kill for one that it
// does not like, and the program was not written with ours in mind.
#pragma once

#include <array>
#include <cstdint>
#include <sys/types.h>

namespace woodfrog::enter {

enum class Filtered {
    passes,
    refused, // an error, a signal, or somebody who is asked
    unknown, // there are filters, and the kernel does not let us read them (it wants CAP_SYS_ADMIN)
};

// For the thread `tid`, which stands in a ptrace stop of ours, and a call whose instruction ends at `behind`. With
// several filters the strictest counts, as in the kernel.
Filtered filtered(pid_t tid, std::uintptr_t behind, long number, const std::array<std::uint64_t, 6> &arguments = {});

} // namespace woodfrog::enter
