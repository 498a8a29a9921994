// GPU memory streamed through a part of the arena used as a ring of chunk-sized slots: the copies of this thread, and
// the hashing and file I/O of others, side by side, in bounded memory. Nothing here knows what the others do with a
// slot.
//
//     drain:   GPU ──copy──▶ slot ──▶ ready queue ──▶ threads: consume(chunk, bytes) ──▶ slot is free again
//     refill:  threads: produce(chunk, bytes) ──▶ ready queue ──▶ slot ──copy──▶ GPU ──▶ slot is free again
#pragma once
#include "chunks.hpp"
#include "progress.hpp"

#include <cstdint>
#include <functional>

namespace woodfrog::transfer {

// [offset, +size) of the arena, the operation's alone while it runs.
struct RingPart {
    Arena &arena;
    uint64_t offset;
    uint64_t size;
};

// Throws TransferError(-EINVAL, operation) unless the part lies within the arena, on a page, with room for a chunk.
void check_ring(const char *operation, const RingPart &part, uint64_t chunk_bytes);

// Works on the bytes of one chunk; called in several threads, for each chunk once, in no particular order.
using ChunkWork = std::function<void(size_t index, uint8_t *data)>;

// Both expect a checked ring. They return when every chunk is done; they throw when everything in flight has stopped.
// Progress counts a chunk when its last step is done.
void drain_through(const ChunkList &list, const RingPart &part, uint64_t chunk_bytes, unsigned threads,
                   Progress &progress, const ChunkWork &consume);
void refill_through(const ChunkList &list, const RingPart &part, uint64_t chunk_bytes, unsigned threads,
                    Progress &progress, const ChunkWork &produce);

} // namespace woodfrog::transfer
