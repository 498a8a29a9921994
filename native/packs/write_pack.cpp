// See write_pack.hpp. Each thread takes the next segment's worth of chunks, and when it knows the segment's length, the
// next offset in the file; what it then writes touches no other segment's pages.
#include "write_pack.hpp"

#include "scan_pack.hpp"
#include "segment.hpp"
#include "transfer/file_queue.hpp"
#include "workers.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unistd.h>

namespace woodfrog::packs {
namespace {

using transfer::File;
using transfer::IntegrityError;
using transfer::Progress;

constexpr const char *operation = "write_pack";

// Fewer and larger writes than this for a segment are made straight from where the chunks are; more, smaller ones cost
// the disk more than gathering the segment in memory costs the processor.
constexpr uint64_t fewest_direct_bytes = 1 << 20;

// Where segments end: the number of the first chunk of each, and the number of chunks.
std::vector<size_t> plan_segments(const Packed<SourceChunk> &chunks, uint64_t most_raw_bytes) {
    std::vector<size_t> starts{0};
    uint64_t raw = 0;
    for (size_t i = 0; i < chunks.size(); i++) {
        const uint32_t size = chunks[i].size;
        if (i > starts.back() && (raw + size > most_raw_bytes || i - starts.back() == most_records)) {
            starts.push_back(i);
            raw = 0;
        }
        raw += size;
    }
    starts.push_back(chunks.size());
    return starts;
}

void check(const Packed<SourceChunk> &chunks, const std::vector<Source> &sources) {
    if (chunks.size() == 0)
        transfer::throw_invalid(operation, "there are no chunks to write");
    for (size_t i = 0; i < chunks.size(); i++) {
        const SourceChunk chunk = chunks[i];
        if (chunk.size == 0 || chunk.size > largest_raw_bytes)
            transfer::throw_invalid(operation, "chunk " + std::to_string(i) + " has " + std::to_string(chunk.size) +
                                                   " bytes: 1 to " + std::to_string(largest_raw_bytes) +
                                                   " are possible");
        if (chunk.source >= sources.size())
            transfer::throw_invalid(operation, "chunk " + std::to_string(i) + " names a source that is not given");
        if (const Source &source = sources[chunk.source]; source.arena)
            source.arena->check_range(operation, chunk.offset, chunk.size);
        else if (chunk.offset > static_cast<uint64_t>(INT64_MAX) - chunk.size)
            transfer::throw_invalid(operation, "chunk " + std::to_string(i) + " lies behind where files can end");
    }
}

uint64_t total_bytes(const Packed<SourceChunk> &chunks) {
    uint64_t total = 0;
    for (size_t i = 0; i < chunks.size(); i++)
        total += chunks[i].size;
    return total;
}

// With chunks of many MiB (a segment each) fewer threads than asked for, because each may hold two segments (one being
// written) three times: read, encoded, gathered.
unsigned affordable_threads(unsigned asked, const Packed<SourceChunk> &chunks) {
    constexpr uint64_t most_memory_bytes = 1ull << 30;
    uint64_t segment = segment_raw_bytes;
    for (size_t i = 0; i < chunks.size(); i++)
        segment = std::max<uint64_t>(segment, chunks[i].size);
    const auto most = static_cast<unsigned>(most_memory_bytes / (6 * segment)); // 2 to 21
    return std::min(transfer::thread_count(asked), most);
}

// The bytes that segments of raw chunks take; with compression it will be less.
uint64_t uncompressed_bytes(const Packed<SourceChunk> &chunks, const std::vector<size_t> &starts) {
    uint64_t total = 0;
    for (size_t segment = 0; segment + 1 < starts.size(); segment++) {
        uint64_t end = 0;
        for (size_t i = starts[segment]; i < starts[segment + 1]; i++)
            end = place(end, chunks[i].size, static_cast<uint32_t>(Encoding::raw)) + chunks[i].size;
        total += header_bytes(starts[segment + 1] - starts[segment]) + round_up(end, page_bytes);
    }
    return total;
}

// What all threads share.
class PackWriter {
  public:
    PackWriter(int fd, const Packed<SourceChunk> &chunks, const std::vector<Source> &sources,
               const WriteOptions &options, Progress &progress)
        : chunks(chunks), sources(sources), compression(options.compression), progress(progress),
          file_(fd, options.cached ? File::Use::write_cached : File::Use::write), start_(length_of(fd)),
          next_offset_(start_) {
        for (const Source &source : sources) {
            if (source.arena)
                uses_.push_back(source.arena->use());
            files_.push_back(source.arena ? nullptr : std::make_unique<File>(source.fd, File::Use::read_cached));
        }
        if (start_ > 0) {
            File before(fd, options.cached ? File::Use::read_cached : File::Use::read);
            for (const Digest &digest : header_digests(before, start_))
                headers_.emplace(headers_.size(), digest); // keys below any offset that is to come, in order
        }
        records_.resize(chunks.size() * sizeof(Record));
    }

    const Packed<SourceChunk> &chunks;
    const std::vector<Source> &sources;
    const Compression &compression;
    Progress &progress;

    uint64_t start() const { return start_; }
    File &source_file(uint32_t source) { return *files_[source]; }
    File &file() { return file_; }

    // The offset for the next segment of this length.
    uint64_t claim(uint64_t size, const Digest &header_digest) {
        std::lock_guard lock(mutex_);
        const uint64_t offset = next_offset_;
        next_offset_ += size;
        headers_.emplace(offset, header_digest);
        return offset;
    }

    void set_record(size_t index, const Record &record) {
        std::memcpy(records_.data() + index * sizeof(Record), &record, sizeof(Record));
    }

    Written finish() {
        std::vector<Digest> digests;
        for (const auto &[_, digest] : headers_)
            digests.push_back(digest);
        return {std::move(records_), name_of(digests)};
    }

  private:
    File file_;
    const uint64_t start_;
    std::vector<transfer::Use> uses_;
    std::vector<std::unique_ptr<File>> files_;
    std::string records_;

    std::mutex mutex_; // of what follows
    uint64_t next_offset_;
    std::map<uint64_t, Digest> headers_; // by offset
};

// One thread's work on one segment, and later on another.
class SegmentWriter {
  public:
    SegmentWriter(PackWriter &pack, transfer::FileQueue &queue) : pack_(pack), writes_(queue) {}

    // Begins to write the chunks from `first` to `end`, or does it. `finish` comes before the next segment.
    void begin(size_t first, size_t end) {
        gather(first, end);
        verify(first);
        encode();
        lay_out();
        uint8_t *header = header_.at_least(header_bytes(segment_.size()));
        const Digest digest = build_header(segment_, payload_bytes_, header);
        const uint64_t size = header_bytes(segment_.size()) + payload_bytes_;
        const uint64_t offset = pack_.claim(size, digest);
        if (can_write_directly())
            write_directly(offset, header);
        else
            write_gathered(offset, header);
        const uint64_t payload = offset + header_bytes(segment_.size());
        for (size_t i = 0; i < segment_.size(); i++) {
            const SegmentRecord &record = segment_[i];
            pack_.set_record(first + i,
                             {record.digest, payload + places_[i], record.stored, record.raw, record.encoding, 0});
        }
    }

    // The segment that was begun, if there is one, is in the file afterwards.
    void finish() {
        writes_.wait();
        pack_.progress.add(raw_bytes());
        raw_.clear();
    }

  private:
    uint64_t raw_bytes() const {
        uint64_t total = 0;
        for (const Bytes &raw : raw_)
            total += raw.size;
        return total;
    }

    // Where each chunk's bytes are in memory; those of files are read first.
    void gather(size_t first, size_t end) {
        uint64_t read = 0;
        for (size_t i = first; i < end; i++)
            if (!pack_.sources[pack_.chunks[i].source].arena)
                read += round_up(pack_.chunks[i].size, page_bytes);
        uint8_t *to = read > 0 ? read_.at_least(read) : nullptr;
        raw_.clear();
        for (size_t i = first; i < end; i++) {
            const SourceChunk chunk = pack_.chunks[i];
            if (const transfer::Arena *arena = pack_.sources[chunk.source].arena) {
                raw_.push_back({arena->data() + chunk.offset, chunk.size});
                continue;
            }
            pack_.progress.check();
            pack_.source_file(chunk.source).read(to, chunk.size, chunk.offset);
            raw_.push_back({to, chunk.size});
            to += round_up(chunk.size, page_bytes);
        }
    }

    void verify(size_t first) {
        segment_.clear();
        for (size_t i = 0; i < raw_.size(); i++) {
            pack_.progress.check();
            const Digest digest = blake3::hash(raw_[i].data, raw_[i].size);
            if (digest != pack_.chunks[first + i].digest)
                throw IntegrityError(first + i);
            segment_.push_back({digest, raw_[i].size, raw_[i].size, static_cast<uint32_t>(Encoding::raw), 0});
        }
    }

    // Chunks that get smaller are in encoded_ afterwards, one after the other.
    void encode() {
        stored_.assign(raw_.begin(), raw_.end());
        if (pack_.compression.mode == Compress::none)
            return;
        uint8_t *to = encoded_.at_least(raw_bytes());
        Trial trial(pack_.compression, raw_, coder_, sample_);
        for (size_t i = 0; i < raw_.size(); i++) {
            pack_.progress.check();
            const std::optional<Encoding> encoding = trial.next();
            const uint32_t most = room_for(raw_[i].size);
            if (!encoding || most == 0)
                continue;
            const uint32_t size =
                coder_.encode(*encoding, pack_.compression.level, raw_[i].data, raw_[i].size, to, most);
            trial.report(size > 0);
            if (size == 0)
                continue;
            stored_[i] = {to, size};
            segment_[i].stored = size;
            segment_[i].encoding = static_cast<uint32_t>(*encoding);
            to += size;
        }
    }

    void lay_out() {
        places_.clear();
        uint64_t end = 0;
        for (const SegmentRecord &record : segment_) {
            places_.push_back(place(end, record.stored, record.encoding));
            end = places_.back() + record.stored;
        }
        payload_end_ = end;
        payload_bytes_ = round_up(end, page_bytes);
    }

    bool continues(size_t i) const {
        return stored_[i - 1].data + stored_[i - 1].size == stored_[i].data &&
               places_[i - 1] + stored_[i - 1].size == places_[i];
    }

    bool can_write_directly() const {
        uint64_t runs = 1;
        for (size_t i = 0; i < stored_.size(); i++) {
            const bool aligned = (reinterpret_cast<uintptr_t>(stored_[i].data) | stored_[i].size) % page_bytes == 0;
            if (!aligned || segment_[i].encoding != static_cast<uint32_t>(Encoding::raw))
                return false;
            runs += i > 0 && !continues(i);
        }
        return runs == 1 || payload_bytes_ / runs >= fewest_direct_bytes;
    }

    void write_directly(uint64_t offset, const uint8_t *header) {
        const uint64_t header_size = header_bytes(segment_.size());
        writes_.write(pack_.file(), header, header_size, offset);
        for (size_t first = 0, i = 1; i <= stored_.size(); i++) {
            if (i < stored_.size() && continues(i))
                continue;
            const uint64_t size = places_[i - 1] + stored_[i - 1].size - places_[first];
            pack_.progress.check();
            writes_.write(pack_.file(), stored_[first].data, size, offset + header_size + places_[first]);
            first = i;
        }
    }

    void write_gathered(uint64_t offset, const uint8_t *header) {
        const uint64_t header_size = header_bytes(segment_.size());
        uint8_t *whole = gathered_.at_least(header_size + payload_bytes_);
        std::memcpy(whole, header, header_size);
        uint8_t *payload = whole + header_size;
        uint64_t end = 0;
        for (size_t i = 0; i < stored_.size(); i++) {
            std::memset(payload + end, 0, places_[i] - end);
            std::memcpy(payload + places_[i], stored_[i].data, stored_[i].size);
            end = places_[i] + stored_[i].size;
        }
        std::memset(payload + payload_end_, 0, payload_bytes_ - payload_end_);
        writes_.write(pack_.file(), whole, header_size + payload_bytes_, offset);
    }

    PackWriter &pack_;
    Coder coder_;
    Buffer read_, encoded_, sample_, header_, gathered_;
    std::vector<Bytes> raw_, stored_;
    std::vector<SegmentRecord> segment_;
    std::vector<uint64_t> places_;
    uint64_t payload_end_ = 0, payload_bytes_ = 0;
    transfer::FileBatch writes_; // last: what it writes from goes after it
};

// One thread's segments: while one is on its way to the disk, the next is hashed and encoded.
class SegmentWriters {
  public:
    SegmentWriters(PackWriter &pack, const std::vector<size_t> &starts) : pack_(pack), starts_(starts) {
        for (int i = 0; i < (queue_.is_asynchronous() ? 2 : 1); i++)
            writers_.push_back(std::make_unique<SegmentWriter>(pack, queue_));
    }

    void operator()(size_t segment) {
        pack_.progress.check();
        writers_.front()->finish(); // the one that was begun before the last one
        writers_.front()->begin(starts_[segment], starts_[segment + 1]);
        if (!queue_.is_asynchronous())
            writers_.front()->finish();
        std::rotate(writers_.begin(), writers_.begin() + 1, writers_.end());
    }

    void finish() {
        for (const auto &writer : writers_)
            writer->finish();
    }

  private:
    PackWriter &pack_;
    const std::vector<size_t> &starts_;
    transfer::FileQueue queue_;
    std::vector<std::unique_ptr<SegmentWriter>> writers_;
};

} // namespace

Written write_pack(int fd, const Packed<SourceChunk> &chunks, const std::vector<Source> &sources,
                   const WriteOptions &options, Progress &progress) {
    check(chunks, sources);
    PackWriter pack(fd, chunks, sources, options, progress);
    const std::vector<size_t> starts =
        plan_segments(chunks, pack.file().is_in_memory() ? segment_raw_bytes_in_memory : segment_raw_bytes);
    progress.begin(total_bytes(chunks));
    try {
        if (options.compression.mode == Compress::none)
            pack.file().reserve(pack.start(), uncompressed_bytes(chunks, starts));
        for_each_with(affordable_threads(options.threads, chunks), starts.size() - 1,
                      [&] { return SegmentWriters(pack, starts); });
    } catch (...) {
        // What was begun is no use to anybody and takes room; if this fails the caller's removal of the file must do.
        [[maybe_unused]] const int ignored = ftruncate(fd, static_cast<off_t>(pack.start()));
        throw;
    }
    return pack.finish();
}

} // namespace woodfrog::packs
