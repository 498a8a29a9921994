// The plan of moving some chunks: which lie side by side, in GPU memory and where they go. Nothing here touches a GPU.
#pragma once
#include "chunks.hpp"

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace woodfrog::transfer {

// One chunk and its slot: an offset in the arena, or a device address on its own GPU. `size` is at most chunk_bytes.
struct PlacedChunk {
    CUdeviceptr address;
    uint64_t place;
    uint64_t size;
};

// Chunks [first, first+count) of a GPU's list, whose slots follow each other. If `direct`, they follow each other in
// GPU memory too, and are copied as they lie; else they are gathered.
struct ChunkRun {
    size_t first;
    size_t count;
    uint64_t size; // from the first byte to the last, in the slots
    bool direct;
};

struct DeviceChunks {
    std::shared_ptr<Context> context;
    std::vector<PlacedChunk> chunks; // by place
    std::vector<ChunkRun> runs;      // all chunks, in order
};

struct ChunkPlan {
    std::vector<DeviceChunks> devices;
    std::string places; // u64 of every position, in their order
    uint64_t size_bytes = 0;
};

// A run of at least this is copied as it lies. Shorter ones are gathered: on an H200, with nine chunks of ten new in
// random places, direct copies of 1 MiB between the gathered ones brought the drain from 51 to 35 GB/s
// (bench/results/h200).
constexpr uint64_t direct_run_bytes = 8ull << 20;

// The chunks take the slots of the ranges of places one after the other. TransferError(-EINVAL, operation) if ranges
// overlap, have too few slots, or the positions make no sense; that the places exist is the caller's to check.
ChunkPlan plan_chunks(const char *operation, const std::vector<Piece> &pieces, std::string_view positions,
                      const std::vector<Range> &ranges, uint64_t chunk_bytes);

// Fills in the runs of one GPU. Without `gather` all are direct.
void find_runs(DeviceChunks &device, uint64_t chunk_bytes, bool gather);

} // namespace woodfrog::transfer
