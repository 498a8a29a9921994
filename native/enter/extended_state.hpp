// What a thread has in its processor's registers beside the general ones: x87, SSE, and whatever the processor has more
// (AVX, AVX-512, protection keys, AMX). Read by ptrace, and brought into the form in which a signal's frame has it, so
// that a signal return gives all of it back. x86-64 only.
#pragma once

#include <sys/types.h>
#include <vector>

namespace woodfrog::enter {

// Of a thread in a ptrace stop of ours: as it lies in a signal's frame, at an address that is a multiple of 64. Empty
// when the kernel does not tell all of it.
std::vector<unsigned char> read_extended_state(pid_t tid);

} // namespace woodfrog::enter
