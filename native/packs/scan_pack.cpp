// See scan_pack.hpp.
#include "scan_pack.hpp"

#include "read_chunks.hpp"
#include "workers.hpp"

#include <algorithm>
#include <cerrno>
#include <sys/stat.h>
#include <unistd.h>

namespace woodfrog::packs {
namespace {

using transfer::File;
using transfer::IntegrityError;
using transfer::Progress;
using transfer::TransferError;

[[noreturn]] void throw_damage(size_t chunks_before, uint64_t offset, const char *reason) {
    throw IntegrityError(chunks_before, "the pack is damaged at offset " + std::to_string(offset) + ": " + reason);
}

// The segments one after the other. Nothing may be damaged.
std::vector<Segment> read_segments(File &file, uint64_t length) {
    if (length == 0)
        throw_damage(0, 0, "the file is empty");
    HeaderReader reader(file, length);
    std::vector<Segment> segments;
    size_t chunks = 0;
    for (uint64_t offset = 0; offset < length;) {
        Segment segment;
        const char *reason = reader.read(offset, segment);
        if (!reason && segment.end() > length)
            reason = "the file ends within the segment";
        if (reason)
            throw_damage(chunks, offset, reason);
        offset = segment.end();
        chunks += segment.records.size();
        segments.push_back(std::move(segment));
    }
    return segments;
}

// Compares a segment's contents. One thread's.
class ContentsReader {
  public:
    // `fds` maps pack 0 to the file.
    ContentsReader(const PackFiles &files, uint64_t length, Progress &progress)
        : files_(files), length_(length), reader_(files, queue_, progress) {}

    // Calls damaged(index within the segment, reason) for each chunk that is not whole.
    void read(const Segment &segment, const Damaged &damaged) {
        std::vector<Wanted> wanted;
        uint64_t raw_bytes = 0;
        for (const Record &record : segment.records)
            raw_bytes += round_up(record.raw, page_bytes);
        uint8_t *to = raw_.at_least(raw_bytes);
        for (size_t i = 0; i < segment.records.size(); i++) {
            const Record &record = segment.records[i];
            if (record.offset + record.stored > length_) {
                damaged(i, "the file ends before chunk " + std::to_string(i) + " of the segment");
                continue;
            }
            require("scan_pack", static_cast<Encoding>(record.encoding));
            wanted.push_back({i, record.digest, {record.offset, record.stored, record.raw, record.encoding, 0, 0}, to});
            to += round_up(record.raw, page_bytes);
        }
        reader_.read(wanted, damaged);
    }

    // A byte between chunks that is not zero is damage of the segment: the reason, else null.
    const char *check_padding(const Segment &segment) {
        uint64_t end = segment.offset + segment.header_bytes;
        for (const Record &record : segment.records) {
            if (!is_zero(end, record.offset))
                return "a byte between two chunks is not zero";
            end = record.offset + record.stored;
        }
        return is_zero(end, segment.end()) ? nullptr : "a byte behind the last chunk is not zero";
    }

  private:
    // Gaps are shorter than a page and end on one, so each is one small read.
    bool is_zero(uint64_t from, uint64_t to) {
        if (from == to)
            return true;
        const uint64_t start = from / page_bytes * page_bytes;
        uint8_t *page = page_.at_least(page_bytes);
        files_.file(0).read(page, page_bytes, start);
        return std::all_of(page + (from - start), page + (to - start), [](uint8_t byte) { return byte == 0; });
    }

    const PackFiles &files_;
    const uint64_t length_;
    transfer::FileQueue queue_;
    ChunkReader reader_;
    Buffer raw_, page_;
};

uint64_t raw_bytes(const Segment &segment) {
    uint64_t total = 0;
    for (const Record &record : segment.records)
        total += record.raw;
    return total;
}

void append(std::string &records, const Record &record) {
    records.append(reinterpret_cast<const char *>(&record), sizeof(record));
}

void compare_contents(const std::vector<Segment> &segments, const PackFiles &files, uint64_t length, unsigned threads,
                      Progress &progress) {
    std::vector<size_t> chunks_before;
    size_t chunks = 0;
    for (const Segment &segment : segments) {
        chunks_before.push_back(chunks);
        chunks += segment.records.size();
        progress.begin(raw_bytes(segment));
    }
    for_each_with(threads, segments.size(), [&] {
        return [&, reader = std::make_unique<ContentsReader>(files, length, progress)](size_t number) {
            const Segment &segment = segments[number];
            reader->read(segment, [&](size_t i, const std::string &) {
                throw_damage(chunks_before[number] + i, segment.records[i].offset,
                             "a chunk does not have its digest, or cannot be read or decoded");
            });
            if (const char *reason = reader->check_padding(segment))
                throw_damage(chunks_before[number], segment.offset, reason);
            progress.add(raw_bytes(segment));
        };
    });
}

// How much may be read for what looks like a segment in a damaged pack and is not whole, until the rest is given up: a
// file made of nothing but such headers would otherwise be read thousands of times over. Damage alone stays below its
// length.
uint64_t most_wasted(uint64_t length) {
    return 4 * length + largest_raw_bytes;
}

// From one valid header to the next, by one thread: this is done once in a pack's life, if ever. While nothing has been
// damaged a segment's end is known; after damage a valid header may be part of a chunk, so that what it says about its
// end counts only if all its chunks are there.
Scanned salvage(const PackFiles &files, File &file, uint64_t length, Progress &progress) {
    HeaderReader headers(file, length);
    ContentsReader contents(files, length, progress);
    std::string records;
    std::vector<Digest> digests;
    bool in_step = true;
    uint64_t wasted = 0;
    progress.begin(length);
    for (uint64_t offset = 0; offset < length && wasted <= most_wasted(length);) {
        progress.check();
        Segment segment;
        uint64_t next = offset + page_bytes;
        if (headers.read(offset, segment)) {
            in_step = false;
        } else {
            std::vector<bool> whole(segment.records.size(), true);
            contents.read(segment, [&](size_t i, const std::string &) { whole[i] = false; });
            for (size_t i = 0; i < whole.size(); i++)
                if (whole[i])
                    append(records, segment.records[i]);
            const bool all = std::find(whole.begin(), whole.end(), false) == whole.end();
            if (all || in_step) {
                digests.push_back(segment.header_digest);
                next = segment.end();
            } else {
                wasted += raw_bytes(segment);
            }
        }
        next = std::min(next, length);
        progress.add(next - offset);
        offset = next;
    }
    return {std::move(records), name_of(digests)};
}

} // namespace

uint64_t length_of(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0)
        transfer::throw_errno(errno, "fstat", "descriptor " + std::to_string(fd));
    if (!S_ISREG(status.st_mode))
        transfer::throw_invalid("fstat", "a pack is a regular file");
    return static_cast<uint64_t>(status.st_size);
}

const char *HeaderReader::read(uint64_t offset, Segment &segment) {
    uint8_t *header = buffer_.at_least(header_bytes(most_records));
    if (length_ - offset < page_bytes)
        return "the file ends within a header";
    uint64_t size = 0;
    try {
        file_.read(header, page_bytes, offset);
        if (const char *reason = parse_fixed(header, size))
            return reason;
        if (size > length_ - offset)
            return "the file ends within a header";
        if (size > page_bytes)
            file_.read(header + page_bytes, size - page_bytes, offset + page_bytes);
    } catch (const TransferError &error) {
        if (error.code != -EIO && error.code != -ENODATA)
            throw;
        return "the header cannot be read";
    }
    return parse_header(header, offset, segment);
}

std::vector<Digest> header_digests(File &file, uint64_t length) {
    std::vector<Digest> digests;
    for (const Segment &segment : read_segments(file, length))
        digests.push_back(segment.header_digest);
    return digests;
}

Digest name_of(const std::vector<Digest> &header_digests) {
    return blake3::hash(header_digests.data(), header_digests.size() * sizeof(Digest));
}

Scanned scan_pack(int fd, const ScanOptions &options, Progress &progress) {
    const uint64_t length = length_of(fd);
    const std::unordered_map<uint32_t, int> fds{{0, fd}};
    PackFiles files(fds);
    files.open(0);
    if (options.salvage)
        return salvage(files, files.file(0), length, progress);
    const std::vector<Segment> segments = read_segments(files.file(0), length);
    if (options.contents)
        compare_contents(segments, files, length, options.threads, progress);
    Scanned scanned;
    std::vector<Digest> digests;
    for (const Segment &segment : segments) {
        digests.push_back(segment.header_digest);
        for (const Record &record : segment.records)
            append(scanned.records, record);
    }
    scanned.name = name_of(digests);
    return scanned;
}

} // namespace woodfrog::packs
