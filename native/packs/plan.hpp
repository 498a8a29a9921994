// What is to be read from packs, checked before anything moves, and grouped so that neighbours are read and copied
// together. Knows nothing of where the bytes go.
#pragma once
#include "read_chunks.hpp"
#include "transfer/chunks.hpp"

#include <vector>

namespace woodfrog::packs {

// Neighbouring chunks, in the list and at their destination.
struct Task {
    size_t first;
    size_t count;
    uint64_t size_bytes;
    bool zero; // all of them are zeros
};

class Plan {
  public:
    // Each chunk of `list` with its digest and location. Throws before anything moves: TransferError (-ENOENT for an
    // ABSENT chunk, -ENOTSUP for an encoding whose library is not here, -EINVAL), IntegrityError for a location that
    // cannot be right. Opens the packs that are needed. The arrays are the caller's and must outlive this.
    Plan(const char *operation, const transfer::ChunkList &list, const Packed<Digest> &digests,
         const Packed<Location> &locations, PackFiles &files);

    // All chunks, in order. Tasks of data have at most `task_bytes` (or one chunk); runs of zeros shorter than
    // `inline_zero_bytes` are part of the data around them.
    std::vector<Task> group(uint64_t task_bytes, uint64_t inline_zero_bytes) const;

    // Fills [to, +task.size_bytes) with the chunks of a task of data.
    void fill(const Task &task, uint8_t *to, ChunkReader &reader) const;

    // What of it is to be read; its zeros are in place.
    std::vector<Wanted> prepare(const Task &task, uint8_t *to) const;

    const transfer::Chunk &chunk(size_t i) const { return list_.chunks[i]; }
    bool is_zero(size_t i) const { return locations_[i].pack == pack_zero; }

  private:
    void check(const char *operation, size_t i, PackFiles &files) const;
    bool continues(size_t i) const;

    const transfer::ChunkList &list_;
    const Packed<Digest> &digests_;
    const Packed<Location> &locations_;
};

} // namespace woodfrog::packs
