// The driver's copies of a process's control state, made by several threads. Its checkpoint copies that state into the
// process's memory by the C library's memcpy, on one thread and 2 MiB at a time, and its restore copies it back; that
// was four fifths of the time that its thread ran for (driver 580, seen by sampling). While an operation is under way
// the driver's own reference to memcpy leads here. The bytes are the same, only time depends on it.
#pragma once

namespace woodfrog::interpose {

// From now on threads of ours help with the driver's large copies. They are started here and sleep but for a copy. Does
// nothing if the driver's reference cannot be found, on one processor, or with WOODFROG_CONTROL_COPIES=0 (any other
// number: so many threads help). Called by the agent, while the target runs.
void begin_control_copies();

// The driver copies by itself again, and the threads end. May be called any number of times.
void end_control_copies();

// The child has none of the threads.
void control_copies_after_fork_in_child();

} // namespace woodfrog::interpose
