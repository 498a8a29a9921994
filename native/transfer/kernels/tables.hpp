// What the host tells the kernels: the layout of their tables in device memory, and the limits both sides rely on.
// Included by host and device code, so it must use nothing that device code does not have.
#pragma once
#include <cstdint>

namespace woodfrog::kernels {

// A contiguous range of device memory, cut into chunks from its start; the last one may be short. `first_tile` and
// `first_chunk` count through all rows of a launch; rows are in their order, and none is empty. A tile is as many
// leaves as a block of the leaf kernel has threads.
struct HashRow {
    uint64_t address;
    uint64_t size_bytes;
    uint32_t first_tile;
    uint32_t first_chunk;
};

constexpr uint32_t most_hash_leaves = 1u << 16; // of a chunk: 64 MiB
constexpr uint32_t fewest_tile_leaves = 128;    // so that the nodes of a chunk fit into a block's shared memory
constexpr uint32_t join_threads = 256;          // of a block of the kernel that joins tiles

// One chunk that is gathered into slot number `row` of a staging buffer.
struct GatherRow {
    uint64_t address;
    uint64_t size_bytes; // at most a slot; the rest of the slot becomes zero
};

constexpr uint32_t gather_threads = 256;
constexpr uint32_t gather_slice_bytes = 16u << 10; // of a slot, copied by one block: four 16-byte words a thread

constexpr uint32_t read_threads = 512;

} // namespace woodfrog::kernels
