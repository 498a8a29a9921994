// From what the caller names (pieces of GPU memory, ranges of the arena) to what is moved: checked ranges, cut into
// chunks. Everything is checked here, before a byte moves; nothing behind it checks again.
#pragma once
#include "arena.hpp"
#include "memory.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace woodfrog::transfer {

// A part of one Memory. While it exists the memory cannot be released.
struct Piece {
    std::shared_ptr<Memory> memory;
    uint64_t offset;
    uint64_t size;
};

// A part of one Memory and its place in the arena.
struct Extent {
    std::shared_ptr<Memory> memory;
    uint64_t memory_offset;
    uint64_t arena_offset;
    uint64_t size;
};

struct Range {
    uint64_t offset;
    uint64_t size;
};

// A chunk of a file: `size` bytes at `file_offset`, and where its bytes are or go in memory (an offset within the
// arena, or a device address on the GPU of context number `context`).
struct Chunk {
    uint64_t file_offset;
    uint64_t place;
    uint32_t size;
    uint32_t context;
};

struct ChunkList {
    std::vector<Chunk> chunks;
    std::vector<std::shared_ptr<Context>> contexts; // of the pieces' GPUs
    uint64_t size_bytes = 0;
};

// A copy between [arena_offset, +size) and the device addresses [device, +size).
struct Copy {
    uint64_t arena_offset;
    CUdeviceptr device;
    uint64_t size;
};

// The extents of one GPU, by arena offset, neighbours in both spaces joined.
struct DeviceCopies {
    std::shared_ptr<Context> context;
    std::vector<Copy> copies;
};

constexpr uint64_t page_alignment = 4096; // of ring slots, so that O_DIRECT may be used on them
constexpr uint64_t largest_chunk_bytes = 1ull << 30;

// All of these throw TransferError(-EINVAL, operation, reason) for what does not fit.
void check_chunk_bytes(const char *operation, uint64_t chunk_bytes);
std::vector<Use> use_all(const std::vector<Piece> &pieces);
std::vector<Use> use_all(const std::vector<Extent> &extents);
void check_pieces(const char *operation, const std::vector<Piece> &pieces);
ChunkList cut(const char *operation, const std::vector<Piece> &pieces, uint64_t file_offset, uint64_t chunk_bytes);
ChunkList cut(const char *operation, const Arena &arena, const std::vector<Range> &ranges, uint64_t file_offset,
              uint64_t chunk_bytes);
std::vector<DeviceCopies> join(const char *operation, const Arena &arena, const std::vector<Extent> &extents);

} // namespace woodfrog::transfer
