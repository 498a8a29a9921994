// The layout of a segment, docs/format.md, "Packs": headers are built and taken apart here and nowhere else. Nothing in
// a header is believed before it has been checked. It must never do I/O.
#pragma once
#include "records.hpp"

#include <span>
#include <vector>

namespace woodfrog::packs {

constexpr uint32_t most_records = 2048;            // of a segment: a header has at most 100 KiB
constexpr uint64_t segment_raw_bytes = 8ull << 20; // where a writer ends a segment: a few ms of work for a thread
// … in a file in memory: what has been hashed is still in the processor's cache when it is copied there.
constexpr uint64_t segment_raw_bytes_in_memory = 1ull << 20;
constexpr uint64_t fixed_bytes = 32;
constexpr uint64_t digest_bytes = sizeof(Digest);

// A record as a header holds it. A chunk's place follows from the records before it.
struct SegmentRecord {
    Digest digest;
    uint32_t stored;
    uint32_t raw;
    uint32_t encoding;
    uint32_t reserved;
};
static_assert(sizeof(SegmentRecord) == 48);

constexpr uint64_t header_bytes(size_t records) {
    return round_up(fixed_bytes + records * sizeof(SegmentRecord) + digest_bytes, page_bytes);
}

// Where in the payload a chunk starts if the one before it ended at `end`.
constexpr uint64_t place(uint64_t end, uint32_t stored, uint32_t encoding) {
    const bool aligned = encoding == static_cast<uint32_t>(Encoding::raw) && stored >= page_bytes;
    return aligned ? round_up(end, page_bytes) : end;
}

// Writes header_bytes(records.size()) bytes at `out`; returns the header digest.
Digest build_header(std::span<const SegmentRecord> records, uint64_t payload_bytes, uint8_t *out);

struct Segment {
    uint64_t offset; // of the header, from the start of the pack
    uint64_t header_bytes;
    uint64_t payload_bytes;
    Digest header_digest;
    std::vector<Record> records;

    uint64_t end() const { return offset + header_bytes + payload_bytes; }
};

// The fixed part alone. Gives the header's length, or the reason why this is no header.
const char *parse_fixed(const uint8_t *fixed, uint64_t &header_bytes_out);

// A whole header whose fixed part is fine, at `offset` of its pack. Fills `segment` or returns what is wrong with it.
const char *parse_header(const uint8_t *header, uint64_t offset, Segment &segment);

} // namespace woodfrog::packs
