// See segment.hpp.
#include "segment.hpp"

#include <algorithm>

namespace woodfrog::packs {
namespace {

constexpr char magic[8] = {'W', 'F', 'R', 'G', 'S', 'E', 'G', '\0'};
constexpr uint32_t version = 1;

struct Fixed {
    char magic[8];
    uint32_t version;
    uint32_t records;
    uint32_t header_bytes;
    uint32_t reserved;
    uint64_t payload_bytes;
};
static_assert(sizeof(Fixed) == fixed_bytes);

template <typename T> T load(const uint8_t *from) {
    T value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

} // namespace

Digest build_header(std::span<const SegmentRecord> records, uint64_t payload_bytes, uint8_t *out) {
    const uint64_t size = header_bytes(records.size());
    std::memset(out, 0, size);
    Fixed fixed{};
    std::memcpy(fixed.magic, magic, sizeof(magic));
    fixed.version = version;
    fixed.records = static_cast<uint32_t>(records.size());
    fixed.header_bytes = static_cast<uint32_t>(size);
    fixed.payload_bytes = payload_bytes;
    std::memcpy(out, &fixed, sizeof(fixed));
    std::memcpy(out + fixed_bytes, records.data(), records.size_bytes());
    const Digest digest = blake3::hash(out, size - digest_bytes);
    std::memcpy(out + size - digest_bytes, digest.data(), digest_bytes);
    return digest;
}

const char *parse_fixed(const uint8_t *fixed_part, uint64_t &header_bytes_out) {
    const auto fixed = load<Fixed>(fixed_part);
    if (std::memcmp(fixed.magic, magic, sizeof(magic)) != 0)
        return "there is no segment";
    if (fixed.version != version)
        return "the segment's version is unknown";
    if (fixed.records == 0 || fixed.records > most_records)
        return "the segment's number of chunks is out of range";
    if (fixed.header_bytes != header_bytes(fixed.records))
        return "the header's length does not fit its number of chunks";
    if (fixed.reserved != 0)
        return "a reserved field is in use";
    header_bytes_out = fixed.header_bytes;
    return nullptr;
}

const char *parse_header(const uint8_t *header, uint64_t offset, Segment &segment) {
    const auto fixed = load<Fixed>(header);
    const uint64_t size = fixed.header_bytes;
    segment.header_digest = load<Digest>(header + size - digest_bytes);
    if (blake3::hash(header, size - digest_bytes) != segment.header_digest)
        return "the header does not have its digest";
    segment.offset = offset;
    segment.header_bytes = size;
    segment.records.clear();
    segment.records.reserve(fixed.records);
    uint64_t end = 0, raw_bytes = 0;
    for (uint32_t i = 0; i < fixed.records; i++) {
        const auto record = load<SegmentRecord>(header + fixed_bytes + i * sizeof(SegmentRecord));
        if (record.reserved != 0 || !is_plausible(record.stored, record.raw, record.encoding))
            return "a record makes no sense";
        raw_bytes += record.raw;
        if (raw_bytes > largest_raw_bytes)
            return "the segment's chunks are larger than a segment may be";
        const uint64_t at = place(end, record.stored, record.encoding);
        segment.records.push_back({record.digest, offset + size + at, record.stored, record.raw, record.encoding, 0});
        end = at + record.stored;
    }
    const uint8_t *padding = header + fixed_bytes + fixed.records * sizeof(SegmentRecord);
    if (!std::all_of(padding, header + size - digest_bytes, [](uint8_t byte) { return byte == 0; }))
        return "the header's padding is not zero";
    segment.payload_bytes = round_up(end, page_bytes);
    if (fixed.payload_bytes != segment.payload_bytes)
        return "the payload's length does not fit the records";
    return nullptr;
}

} // namespace woodfrog::packs
