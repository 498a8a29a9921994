// Large allocations that share a block, when $WOODFROG_POOL_MIB says how large such a block may be.
//
// A handover and a return cost the driver some 70 us for each handle, whatever its size, on however many threads and in
// however few calls (bench/results: handover.json). Fewer, larger handles are the one thing that helps. The price is
// that memory freed within a block stays with the process until all of the block is free, so it is off unless asked
// for.
#pragma once

#include <cstddef>

namespace woodfrog::interpose {

// How large the next shared block may be on a device of which so much is owned already; 0: there are to be none. It
// grows with that, so that neither many blocks nor much room in the last one comes of it.
size_t pool_block_bytes(size_t owned_bytes, size_t granularity_bytes);
// Whether an allocation of that size is to share a block of that size.
bool pool_takes(size_t size_bytes, size_t pool_bytes);

} // namespace woodfrog::interpose
