// Whole extents between GPU memory and the arena, at the speed of the bus: what a checkpoint does beside the driver's
// own work, and what a resume does. Nothing is hashed and no file is touched here.
#pragma once
#include "chunks.hpp"
#include "progress.hpp"
#include "streams.hpp"

namespace woodfrog::transfer {

// Returns when all bytes have arrived; throws TransferError or CancelledError when everything in flight has stopped,
// the destination then holding some of them. `operation` names it in errors. Extents on several GPUs are copied side by
// side. chunk_bytes is how much is submitted at once.
void copy_extents(const char *operation, Direction direction, const std::vector<Extent> &extents, Arena &arena,
                  uint64_t chunk_bytes, Progress &progress);

} // namespace woodfrog::transfer
