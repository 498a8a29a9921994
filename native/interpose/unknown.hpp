// Driver functions that are newer than the headers of this build: their types are not known, but they must not pass by
// the gate, since one of them may launch.
#pragma once

namespace woodfrog::interpose {

// An entry point that passes the gate around `function`, whatever its arguments; `function` itself where that cannot be
// had (another machine than x86-64, or more such functions than there are entry points).
void *gate_unknown(void *function);

} // namespace woodfrog::interpose
