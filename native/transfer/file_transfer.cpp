// See file_transfer.hpp. Each operation is: check and cut, then one short function a chunk.
#include "file_transfer.hpp"

#include "digests.hpp"
#include "file.hpp"
#include "parallel.hpp"

#include <cstdlib>
#include <memory>

namespace woodfrog::transfer {
namespace {

struct Free {
    void operator()(uint8_t *buffer) const { std::free(buffer); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

Buffer aligned_buffer(uint64_t size) {
    void *memory = std::aligned_alloc(page_alignment, size);
    if (!memory)
        throw std::bad_alloc();
    return Buffer(static_cast<uint8_t *>(memory));
}

// Works on every chunk in up to options.threads threads, none of which is kept.
void for_each_chunk(const ChunkList &list, const FileOptions &options, Progress &progress,
                    const std::function<void(size_t, const Chunk &)> &work) {
    progress.begin(list.size_bytes);
    for_each_index(options.threads, list.chunks.size(), [&](size_t i) {
        progress.check();
        work(i, list.chunks[i]);
        progress.add(list.chunks[i].size);
    });
}

} // namespace

std::string drain_to_file(const std::vector<Piece> &pieces, int fd, uint64_t file_offset, const RingPart &ring,
                          const FileOptions &options, Progress &progress) {
    Use arena_use = ring.arena.use();
    const std::vector<Use> uses = use_all(pieces);
    check_ring("drain_to_file", ring, options.chunk_bytes);
    const ChunkList list = cut("drain_to_file", pieces, file_offset, options.chunk_bytes);
    File file(fd, File::Use::write);
    file.reserve(file_offset, list.size_bytes);
    DigestList digests(list.chunks.size());
    drain_through(list, ring, options.chunk_bytes, thread_count(options.threads), progress,
                  [&](size_t i, uint8_t *data) {
                      const Chunk &chunk = list.chunks[i];
                      digests.set(i, data, chunk.size);
                      file.write(data, chunk.size, chunk.file_offset);
                  });
    return digests.take();
}

void refill_from_file(const std::vector<Piece> &pieces, int fd, uint64_t file_offset, const RingPart &ring,
                      std::optional<std::string_view> digests, const FileOptions &options, Progress &progress) {
    Use arena_use = ring.arena.use();
    const std::vector<Use> uses = use_all(pieces);
    check_ring("refill_from_file", ring, options.chunk_bytes);
    const ChunkList list = cut("refill_from_file", pieces, file_offset, options.chunk_bytes);
    const ExpectedDigests expected("refill_from_file", digests, list.chunks.size());
    File file(fd, File::Use::read);
    refill_through(list, ring, options.chunk_bytes, thread_count(options.threads), progress,
                   [&](size_t i, uint8_t *data) {
                       const Chunk &chunk = list.chunks[i];
                       file.read(data, chunk.size, chunk.file_offset);
                       expected.verify(i, data, chunk.size);
                   });
}

std::string hash_memory(const std::vector<Piece> &pieces, const RingPart &ring, const FileOptions &options,
                        Progress &progress) {
    Use arena_use = ring.arena.use();
    const std::vector<Use> uses = use_all(pieces);
    check_ring("hash_memory", ring, options.chunk_bytes);
    const ChunkList list = cut("hash_memory", pieces, 0, options.chunk_bytes);
    DigestList digests(list.chunks.size());
    drain_through(list, ring, options.chunk_bytes, thread_count(options.threads), progress,
                  [&](size_t i, uint8_t *data) { digests.set(i, data, list.chunks[i].size); });
    return digests.take();
}

std::string write_arena(Arena &arena, const std::vector<Range> &ranges, int fd, uint64_t file_offset,
                        const FileOptions &options, Progress &progress) {
    Use arena_use = arena.use();
    const ChunkList list = cut("write_arena", arena, ranges, file_offset, options.chunk_bytes);
    File file(fd, File::Use::write);
    file.reserve(file_offset, list.size_bytes);
    DigestList digests(list.chunks.size());
    for_each_chunk(list, options, progress, [&](size_t i, const Chunk &chunk) {
        const uint8_t *data = arena.data() + chunk.place;
        digests.set(i, data, chunk.size);
        file.write(data, chunk.size, chunk.file_offset);
    });
    return digests.take();
}

void read_to_arena(Arena &arena, const std::vector<Range> &ranges, int fd, uint64_t file_offset,
                   std::optional<std::string_view> digests, const FileOptions &options, Progress &progress) {
    Use arena_use = arena.use();
    const ChunkList list = cut("read_to_arena", arena, ranges, file_offset, options.chunk_bytes);
    const ExpectedDigests expected("read_to_arena", digests, list.chunks.size());
    File file(fd, File::Use::read);
    for_each_chunk(list, options, progress, [&](size_t i, const Chunk &chunk) {
        uint8_t *data = arena.data() + chunk.place;
        file.read(data, chunk.size, chunk.file_offset);
        expected.verify(i, data, chunk.size);
    });
}

std::string hash_file(int fd, uint64_t offset, uint64_t size, const FileOptions &options, Progress &progress) {
    check_chunk_bytes("hash_file", options.chunk_bytes);
    if (offset > static_cast<uint64_t>(INT64_MAX) || size > static_cast<uint64_t>(INT64_MAX) - offset)
        throw_invalid("hash_file", "the range is larger than files can be");
    const uint64_t chunk_bytes = options.chunk_bytes;
    const size_t count = size / chunk_bytes + (size % chunk_bytes != 0);
    File file(fd, File::Use::read);
    DigestList digests(count);
    progress.begin(size);
    std::atomic<size_t> next{0};
    run_parallel(static_cast<unsigned>(std::min<size_t>(thread_count(options.threads), std::max<size_t>(count, 1))),
                 [&](Failure &failure) {
                     Buffer buffer =
                         aligned_buffer(std::min(chunk_bytes, (size / page_alignment + 1) * page_alignment));
                     while (!failure.happened()) {
                         const size_t i = next++;
                         if (i >= count)
                             return;
                         progress.check();
                         const uint64_t here = std::min(chunk_bytes, size - i * chunk_bytes);
                         file.read(buffer.get(), here, offset + i * chunk_bytes);
                         digests.set(i, buffer.get(), here);
                         progress.add(here);
                     }
                 });
    return digests.take();
}

std::string hash_arena(Arena &arena, const std::vector<Range> &ranges, const FileOptions &options, Progress &progress) {
    Use arena_use = arena.use();
    const ChunkList list = cut("hash_arena", arena, ranges, 0, options.chunk_bytes);
    DigestList digests(list.chunks.size());
    for_each_chunk(list, options, progress,
                   [&](size_t i, const Chunk &chunk) { digests.set(i, arena.data() + chunk.place, chunk.size); });
    return digests.take();
}

} // namespace woodfrog::transfer
