// PID namespaces as woodfrog uses them: making one together with a mount namespace, preparing its mounts from inside,
// and going into one that is there.
#pragma once

#include <string>
#include <sys/types.h>
#include <vector>

namespace woodfrog::init {

struct Bind {
    std::string from;
    std::string onto;
};

// Forks into a new PID namespace and a new mount namespace: 0 in the child, which is process 1 there, and the child's
// number here in the parent. -1 and errno when the kernel refuses.
pid_t fork_into_new();

// In the child: mounts of the machine go on arriving here, ours stay here; /proc is that of the new namespace. False
// after a message on standard error.
bool prepare_mounts(const std::vector<Bind> &binds);

// The next process of this namespace gets a number above `last` (0: whatever comes). False after a message.
bool set_last_number(pid_t last);

// Every further child is in the namespaces of `pid`, and files are looked up there. False after a message.
bool join(pid_t pid);

} // namespace woodfrog::init
