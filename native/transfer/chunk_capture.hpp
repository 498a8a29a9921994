// Some chunks of GPU memory to other memory of the same GPU: what lets a target run on before its data has crossed the
// bus. Long runs are copied as they are, short ones by the gather kernel. Nothing is hashed here, and nothing is
// written to the memory that is read.
#pragma once
#include "chunks.hpp"
#include "progress.hpp"

#include <optional>
#include <string_view>
#include <vector>

namespace woodfrog::transfer {

struct ChunkCaptureOptions {
    uint64_t chunk_bytes;
    std::optional<bool> gather; // as in ChunkDrainOptions
};

// `positions` as for drain_chunks. The chunks take the slots of `slots` one after the other: each of these pieces has
// size / chunk_bytes of them, one chunk each; slots beyond the positions stay as they are. What a short chunk leaves of
// its slot becomes zero. All memory is of one GPU, and no slot lies in memory that is read. On return, also by an
// exception, nothing is under way. TransferError(-EINVAL) before anything moves; -ENOTSUP if a gathering is demanded
// that cannot be done.
void capture_chunks(const std::vector<Piece> &pieces, std::string_view positions, const std::vector<Piece> &slots,
                    const ChunkCaptureOptions &options, Progress &progress);

} // namespace woodfrog::transfer
