// Ranges of files that the caller has open, cut into chunks like pieces of memory, and their digests.
#pragma once
#include "transfer/chunks.hpp"
#include "transfer/progress.hpp"

#include <string>
#include <vector>

namespace woodfrog::packs {

// The descriptor stays the caller's.
struct FilePiece {
    int fd;
    uint64_t offset;
    uint64_t size;
};

// The chunks' `place` is the offset in the file, their `context` the number of the piece. TransferError(-EINVAL).
transfer::ChunkList cut(const char *operation, const std::vector<FilePiece> &pieces, uint64_t chunk_bytes);

// The digests of all chunks, 32 bytes each, read through the page cache.
std::string hash_pieces(const std::vector<FilePiece> &pieces, uint64_t chunk_bytes, unsigned threads,
                        transfer::Progress &progress);

} // namespace woodfrog::packs
