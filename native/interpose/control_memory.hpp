// Memory for the driver's control state, made ready before the target waits for it. The driver's checkpoint maps some
// hundred MiB and has the kernel populate them page by page, which is more than half of what an empty context's
// checkpoint takes; that one mapping is answered with pages that are there already. Only time depends on it: whenever
// something does not fit, the kernel answers.
#pragma once

#include <cstddef>

namespace woodfrog::interpose {

// Makes at least `bytes` ready, or as many as the driver took last time, and offers them to the next large populated
// mapping. Returns the bytes offered: 0 if there is nothing to offer or no memory. Called by the agent, while the
// target runs.
size_t offer_control_memory(size_t bytes);

// How many bytes of somebody else's memory could be offered: as many as the driver took last time, or `bytes`. 0 when
// the target declines that, and until it is known how much it will be.
size_t wanted_control_memory(size_t bytes);

// Offers `bytes` of the file `fd` (a multiple of huge pages), mapped shared and populated; the caller keeps `fd`. All
// of it or nothing: returns `bytes` or 0. A driver that wants more than that is answered by the kernel.
size_t offer_shared_control_memory(int fd, size_t bytes);

// Whether all of that is where the driver keeps its control state.
bool is_control_memory(const void *address, size_t size);

// What the driver has taken since the offer.
size_t control_memory_taken();

// Takes back what nobody took, unmaps what the driver let go of meanwhile, and has the driver copy alone again (see
// control_copy.hpp: with an offer, others help it). May be called any number of times.
void settle_control_memory();

// The child's copies are its own; it has no agent that would settle anything.
void control_memory_after_fork_in_child();

} // namespace woodfrog::interpose
