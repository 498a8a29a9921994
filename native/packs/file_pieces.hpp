// Ranges of files that the caller has open, cut into chunks like pieces of memory, and their digests.
#pragma once
#include "records.hpp"
#include "transfer/chunks.hpp"
#include "transfer/progress.hpp"

#include <optional>
#include <string>
#include <vector>

namespace woodfrog::packs {

// The descriptor stays the caller's.
struct FilePiece {
    int fd;
    uint64_t offset;
    uint64_t size;
};

// How pieces are cut: at multiples of chunk_bytes from each one's start, or, with `sizes`, into chunks of these bytes,
// through all pieces in their order. They must make up every piece exactly; each has 1 … chunk_bytes, and all but a
// piece's last are multiples of page_bytes, so that whoever reads them may count on aligned memory.
struct Cutting {
    uint64_t chunk_bytes;
    std::optional<Packed<uint32_t>> sizes;
};

// The chunks' `place` is the offset in the file, their `context` the number of the piece. TransferError(-EINVAL).
transfer::ChunkList cut(const char *operation, const std::vector<FilePiece> &pieces, const Cutting &cutting);

// The digests of all chunks, 32 bytes each, read through the page cache.
std::string hash_pieces(const std::vector<FilePiece> &pieces, const Cutting &cutting, unsigned threads,
                        transfer::Progress &progress);

} // namespace woodfrog::packs
