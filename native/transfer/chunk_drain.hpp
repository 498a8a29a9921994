// Some chunks of GPU memory to the arena: what an incremental checkpoint moves. Chunks that lie side by side in long
// runs are copied as they are; short runs are gathered in GPU memory first, so that the bus only sees large transfers.
// Nothing is hashed here, and nothing is written to the memory that is read.
#pragma once
#include "chunks.hpp"
#include "progress.hpp"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace woodfrog::transfer {

struct ChunkDrainOptions {
    uint64_t chunk_bytes;
    // Whether short runs are gathered by a kernel; none: where Kernels::way() is gpu.
    std::optional<bool> gather;
    uint64_t staging_bytes; // of each of two buffers in GPU memory; with no room for one, nothing is gathered
    // Others use the bus: little is under way at a time.
    bool background = false;
    // Of each GPU; 0: as many as the bus takes.
    uint64_t most_bytes_per_s = 0;
};

constexpr uint64_t default_staging_bytes = 32ull << 20; // 0.6 ms at 55 GB/s

// `positions`: u32 numbers of chunks, ascending, counted through all pieces (cut as cut() does it). The chunks take the
// slots of the ranges one after the other: a range has size / chunk_bytes of them, one chunk each, whatever its size.
// What a short chunk leaves of its slot is undefined. Returns the arena offset of each as a u64. Extents on several
// GPUs are copied side by side. TransferError(-EINVAL) before anything moves; -ENOTSUP if a gathering is demanded that
// cannot be done.
std::string drain_chunks(const std::vector<Piece> &pieces, std::string_view positions, Arena &arena,
                         const std::vector<Range> &ranges, const ChunkDrainOptions &options, Progress &progress);

} // namespace woodfrog::transfer
