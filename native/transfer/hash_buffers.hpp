// What one hash_device call works with on one GPU: two sets of tables and results, so that the host fills and empties
// one while kernels work on the other. Of fixed size, whatever is hashed: larger calls take more launches.
#pragma once
#include "kernel_memory.hpp"
#include "kernels/tables.hpp"

#include <array>

namespace woodfrog::transfer {

// What one launch takes at most. 4 GiB are 3 ms or more of work; the other numbers bound the buffers below.
constexpr uint64_t hash_batch_bytes = 4ull << 30;
constexpr uint32_t hash_batch_rows = 16u << 10;
constexpr uint32_t hash_batch_chunks = 64u << 10;

class HashBuffers {
  public:
    // Every row may end with a tile that is not full.
    static constexpr uint64_t most_tiles =
        hash_batch_bytes / (kernels::fewest_tile_leaves * uint64_t{1024}) + hash_batch_rows;
    static constexpr uint64_t digest_bytes = 32;

    struct Set {
        explicit Set(const Context &context)
            : rows_host(context, hash_batch_rows * sizeof(kernels::HashRow), KernelMemory::Place::host),
              digests(context, hash_batch_chunks * digest_bytes, KernelMemory::Place::host),
              rows(KernelMemory::on_device_or_host(context, hash_batch_rows * sizeof(kernels::HashRow))),
              tiles(KernelMemory::on_device_or_host(context, most_tiles * digest_bytes)), stream(context) {}
        KernelMemory rows_host;
        KernelMemory digests; // written by the kernels across the bus: 32 bytes a chunk, which no one notices
        KernelMemory rows;    // searched by every block, so not across the bus
        KernelMemory tiles;
        KernelStream stream; // last, so that it is gone (and has waited) first
    };

    explicit HashBuffers(const Context &context) : sets{Set(context), Set(context)} {}
    std::array<Set, 2> sets;
};

} // namespace woodfrog::transfer
