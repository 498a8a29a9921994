// The GPU's device files that a forked child inherits.
#pragma once

namespace woodfrog::interpose {

// In the child: every descriptor of a /dev/nvidia* file becomes one of /dev/null. Only async-signal-safe calls.
void inherited_files_after_fork_in_child();

} // namespace woodfrog::interpose
