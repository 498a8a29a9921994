// The GPU's device files that a forked child inherits.
#pragma once

namespace woodfrog::interpose {

// In the child: descriptors of /dev/nvidia* files become ones of /dev/null, their mappings empty memory. Only calls
// that are safe there.
void inherited_files_after_fork_in_child();

} // namespace woodfrog::interpose
