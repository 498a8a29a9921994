// The clock by which PyTorch's libraries tell what has taken too long: it stands still while their process is held.
// Their watchdogs end a job whose collective, or whose watchdog thread, has not come on for minutes, and a suspend may
// last longer. Only those libraries' own references to the clock lead here, from the first operation on; everything
// else in the process has the system's time.
#pragma once

#include <cstddef>

namespace woodfrog::interpose {

// Leads them here; the clock goes on as before. How many libraries follow it: 0 where there is no PyTorch, or one whose
// references cannot be written. Called by the agent while the target runs; takes none of the loader's locks.
size_t arm_torch_clock();

// From now on it stands still, if it was armed; and goes on, behind by as long as it stood. Any number of times.
void stop_torch_clock();
void start_torch_clock();

// The child has no agent that would start it.
void torch_clock_after_fork_in_child();

} // namespace woodfrog::interpose
