// See file_pieces.hpp.
#include "file_pieces.hpp"

#include "buffer.hpp"
#include "transfer/digests.hpp"
#include "transfer/file.hpp"
#include "workers.hpp"

#include <map>

namespace woodfrog::packs {
namespace {

using transfer::File;

constexpr uint64_t read_bytes = 1 << 20; // at once: what stays in a processor's own cache until it is hashed

// Chunks of one piece that are read together.
struct Reading {
    size_t first;
    size_t count;
    uint64_t size_bytes;
};

std::vector<Reading> group(const transfer::ChunkList &list) {
    std::vector<Reading> readings;
    for (size_t i = 0; i < list.chunks.size(); i++) {
        const transfer::Chunk &chunk = list.chunks[i];
        if (readings.empty() || list.chunks[i - 1].context != chunk.context ||
            readings.back().size_bytes + chunk.size > read_bytes)
            readings.push_back({i, 0, 0});
        readings.back().count++;
        readings.back().size_bytes += chunk.size;
    }
    return readings;
}

// The size of the next chunk where `left` bytes of its piece are still to be cut.
class NextSize {
  public:
    NextSize(const char *operation, const Cutting &cutting) : operation_(operation), cutting_(cutting) {}

    uint32_t operator()(uint64_t left) {
        if (!cutting_.sizes)
            return static_cast<uint32_t>(std::min(cutting_.chunk_bytes, left));
        const uint32_t size = used_ < cutting_.sizes->size() ? (*cutting_.sizes)[used_] : 0;
        if (size == 0 || size > std::min(cutting_.chunk_bytes, left) || (size != left && size % page_bytes))
            transfer::throw_invalid(operation_, "the size of chunk " + std::to_string(used_) + " does not fit");
        used_++;
        return size;
    }

    void finish() const {
        if (cutting_.sizes && used_ != cutting_.sizes->size())
            transfer::throw_invalid(operation_, "there are " + std::to_string(cutting_.sizes->size()) + " sizes for " +
                                                    std::to_string(used_) + " chunks");
    }

  private:
    const char *operation_;
    const Cutting &cutting_;
    size_t used_ = 0;
};

} // namespace

transfer::ChunkList cut(const char *operation, const std::vector<FilePiece> &pieces, const Cutting &cutting) {
    transfer::check_chunk_bytes(operation, cutting.chunk_bytes);
    transfer::ChunkList list;
    NextSize next_size(operation, cutting);
    for (size_t number = 0; number < pieces.size(); number++) {
        const FilePiece &piece = pieces[number];
        if (piece.offset > static_cast<uint64_t>(INT64_MAX) ||
            piece.size > static_cast<uint64_t>(INT64_MAX) - piece.offset)
            transfer::throw_invalid(operation, "piece " + std::to_string(number) + " is larger than files can be");
        for (uint64_t done = 0; done < piece.size;) {
            const uint32_t size = next_size(piece.size - done);
            list.chunks.push_back({list.size_bytes, piece.offset + done, size, static_cast<uint32_t>(number)});
            list.size_bytes += size;
            done += size;
        }
    }
    next_size.finish();
    return list;
}

std::string hash_pieces(const std::vector<FilePiece> &pieces, const Cutting &cutting, unsigned threads,
                        transfer::Progress &progress) {
    const transfer::ChunkList list = cut("hash_pieces", pieces, cutting);
    std::map<int, std::unique_ptr<File>> files;
    for (const FilePiece &piece : pieces)
        if (!files.contains(piece.fd))
            files.emplace(piece.fd, std::make_unique<File>(piece.fd, File::Use::read_cached));
    const std::vector<Reading> readings = group(list);
    transfer::DigestList digests(list.chunks.size());
    progress.begin(list.size_bytes);
    for_each_with(threads, readings.size(), [&] {
        return [&, buffer = Buffer()](size_t number) mutable {
            progress.check();
            const Reading &reading = readings[number];
            const transfer::Chunk &first = list.chunks[reading.first];
            uint8_t *data = buffer.at_least(reading.size_bytes);
            files.at(pieces[first.context].fd)->read(data, reading.size_bytes, first.place);
            for (size_t i = reading.first; i < reading.first + reading.count; i++)
                digests.set(i, data + (list.chunks[i].place - first.place), list.chunks[i].size);
            progress.add(reading.size_bytes);
        };
    });
    return digests.take();
}

} // namespace woodfrog::packs
