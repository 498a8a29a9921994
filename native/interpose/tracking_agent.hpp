// What followed launches may have written, as the agent's messages have it.
#pragma once

#include "quiesce.hpp"
#include "shadow_worker.hpp"
#include "transport.hpp"

namespace woodfrog::interpose {

// The answer to `dirty` but for its end: ranges of memory, then the kernels that were launched.
Outcome send_dirty(Connection &connection, uint64_t sequence, const shadow::Report &report);

} // namespace woodfrog::interpose
