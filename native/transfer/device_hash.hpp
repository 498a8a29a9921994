// The digests of GPU memory, computed where the memory is: by a CUDA kernel; on the simulated GPU, whose memory the CPU
// can read, by threads; else through a bounded host buffer. Nothing is written to the memory that is hashed.
#pragma once
#include "chunks.hpp"
#include "kernels.hpp"
#include "progress.hpp"

#include <optional>
#include <string>
#include <vector>

namespace woodfrog::transfer {

// Chunks of these operations: a power of two, so that a chunk is a whole subtree of BLAKE3's and the kernels divide by
// shifting. TransferError(-EINVAL, operation) otherwise.
constexpr uint64_t smallest_store_chunk_bytes = 4096;
constexpr uint64_t largest_store_chunk_bytes = 64ull << 20;
void check_store_chunk_bytes(const char *operation, uint64_t chunk_bytes);

struct HashOptions {
    uint64_t chunk_bytes;
    std::optional<HashWay> way; // none: what Kernels::way() says of each GPU
    std::string variant;        // of the kernel; empty: the first
    unsigned threads;           // of the ways without a kernel; 0: see thread_count()
};

// 32 bytes a chunk, in order. Pieces are cut as cut() does it. TransferError(-ENOTSUP) for a way that does not exist.
std::string hash_device(const std::vector<Piece> &pieces, const HashOptions &options, Progress &progress);

// Reads all of the pieces' whole 16-byte words by a kernel: a measurement's ceiling. TransferError(-ENOTSUP) without
// kernels. blocks_per_multiprocessor 0: 4.
void read_device(const std::vector<Piece> &pieces, unsigned blocks_per_multiprocessor);

const char *to_string(HashWay way);

} // namespace woodfrog::transfer
