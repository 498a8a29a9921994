// Which memory launches name, noted while a target is promoted (hosted.hpp): what is named moves next, and the order of
// first use is kept for the next restore of the image.
//
// Only while it is switched on: then the table of real functions has functions of this file in the place of the six
// that launch a kernel. What a launch names are the pointers found in its arguments, structs included: an allocation
// that is reached in another way (through memory, by a graph, by a copy) is not seen. It moves later, and is right.
#pragma once

#include "handover.hpp"

namespace woodfrog::interpose {

// Begins to note, of the blocks that lie on host memory now. Only with the gate closed and nothing running.
void follow_access();
// Notes no more. The table of real functions is put back now (`at_rest`: the gate is closed and nothing runs), or by
// the next call of `settle_access`.
void leave_access(bool at_rest);
// At rest: the table is put back if nothing is noted any more.
void settle_access();
// What was named since follow_access, in the order of first use.
using SendNamed = std::function<bool(const std::vector<wire::Handle> &, bool last)>;
Outcome send_accessed(const SendNamed &send);

} // namespace woodfrog::interpose
