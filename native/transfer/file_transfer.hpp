// The operations that move bytes to and from files, with a digest for each chunk. Chunks follow each other in the file
// without gaps, in the order of the pieces or ranges; each piece or range starts a new chunk, and its last one may be
// short. A file is neither shortened nor synced here; its room is taken before anything
// is written.
#pragma once
#include "chunks.hpp"
#include "progress.hpp"
#include "ring.hpp"

#include <optional>
#include <string>
#include <string_view>

namespace woodfrog::transfer {

struct FileOptions {
    uint64_t chunk_bytes;
    unsigned threads; // 0: see thread_count()
};

// GPU → ring → file; returns the digests, 32 bytes a chunk.
std::string drain_to_file(const std::vector<Piece> &pieces, int fd, uint64_t file_offset, const RingPart &ring,
                          const FileOptions &options, Progress &progress);

// File → ring → GPU, each chunk compared with its digest before it is copied. IntegrityError names the first chunk that
// differs; the GPU memory then holds some of the chunks.
void refill_from_file(const std::vector<Piece> &pieces, int fd, uint64_t file_offset, const RingPart &ring,
                      std::optional<std::string_view> digests, const FileOptions &options, Progress &progress);

// GPU → ring, hashed and thrown away.
std::string hash_memory(const std::vector<Piece> &pieces, const RingPart &ring, const FileOptions &options,
                        Progress &progress);

// Arena → file, and back.
std::string write_arena(Arena &arena, const std::vector<Range> &ranges, int fd, uint64_t file_offset,
                        const FileOptions &options, Progress &progress);
void read_to_arena(Arena &arena, const std::vector<Range> &ranges, int fd, uint64_t file_offset,
                   std::optional<std::string_view> digests, const FileOptions &options, Progress &progress);

// The digests of [offset, +size) of a file. Uses a buffer of chunk_bytes a thread.
std::string hash_file(int fd, uint64_t offset, uint64_t size, const FileOptions &options, Progress &progress);

// The digests of ranges of the arena.
std::string hash_arena(Arena &arena, const std::vector<Range> &ranges, const FileOptions &options, Progress &progress);

} // namespace woodfrog::transfer
