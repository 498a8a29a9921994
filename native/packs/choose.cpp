// See choose.hpp.
#include "choose.hpp"

#include <algorithm>
#include <cerrno>

namespace woodfrog::packs {
namespace {

constexpr int default_level = 1;  // what keeps up with a disk
constexpr int highest_level = 19; // above, Zstandard wants much more memory

// 3 samples of up to 16 KiB of a segment of 8 MiB: tried three times over, less than 2 % of hashing it.
constexpr size_t samples = 3;
constexpr uint32_t sample_bytes = 16 << 10;

// LZ4 reads and writes several times faster than Zstandard, so it may be that much larger.
constexpr double lz4_handicap = 1.15;

struct Sample {
    Bytes parts[samples];
    size_t count = 0;
    uint64_t size_bytes = 0;
};

Sample take_sample(std::span<const Bytes> chunks) {
    Sample sample;
    const size_t count = std::min(samples, chunks.size());
    for (size_t i = 0; i < count; i++) {
        const Bytes &chunk = chunks[(2 * i + 1) * chunks.size() / (2 * count)]; // from the middle of each part
        const uint32_t size = std::min(chunk.size, sample_bytes);
        const uint32_t start = (chunk.size - size) / 2 & ~1u; // even: for the byte split
        sample.parts[sample.count++] = {chunk.data + start, size};
        sample.size_bytes += size;
    }
    return sample;
}

// The sample's size when encoded; a part that does not get smaller counts whole.
uint64_t encoded_bytes(const Sample &sample, Encoding encoding, int level, Coder &coder, uint8_t *scratch) {
    uint64_t total = 0;
    for (size_t i = 0; i < sample.count; i++) {
        const Bytes &part = sample.parts[i];
        const uint32_t room = part.size > 1 ? part.size - 1 : 0;
        const uint32_t written = room > 0 ? coder.encode(encoding, level, part.data, part.size, scratch, room) : 0;
        total += written > 0 ? written : part.size;
    }
    return total;
}

} // namespace

Compression parse_compression(const char *operation, const std::string &word, int level) {
    if (level != 0 && word != "zstd")
        transfer::throw_invalid(operation, "only zstd has levels");
    if (level < 0 || level > highest_level)
        transfer::throw_invalid(operation, "zstd's level is 1 to " + std::to_string(highest_level));
    level = level == 0 ? default_level : level;
    if (word == "none")
        return {Compress::none, level};
    if (word == "auto")
        return {Compress::automatic, level};
    if (word == "lz4") {
        require(operation, Encoding::lz4);
        return {Compress::lz4, level};
    }
    if (word == "zstd") {
        require(operation, Encoding::zstd);
        return {Compress::zstd, level};
    }
    transfer::throw_invalid(operation, "compression is none, lz4, zstd or auto, not '" + word + "'");
}

Trial::Trial(const Compression &compression, std::span<const Bytes> chunks, Coder &coder, Buffer &scratch) {
    if (compression.mode == Compress::none)
        return;
    if (compression.mode == Compress::lz4) {
        encoding_ = Encoding::lz4;
        return;
    }
    const Sample sample = take_sample(chunks);
    uint8_t *room = scratch.at_least(sample_bytes);
    const bool automatic = compression.mode == Compress::automatic;
    const auto size = [&](Encoding encoding) {
        return is_available(encoding) ? encoded_bytes(sample, encoding, compression.level, coder, room) : UINT64_MAX;
    };
    const uint64_t zstd = size(Encoding::zstd), split = size(Encoding::split_zstd);
    const uint64_t lz4 = automatic ? size(Encoding::lz4) : UINT64_MAX;
    uint64_t best = std::min(zstd, split);
    if (best != UINT64_MAX)
        encoding_ = split < zstd ? Encoding::split_zstd : Encoding::zstd;
    if (lz4 != UINT64_MAX && static_cast<double>(lz4) <= lz4_handicap * static_cast<double>(best)) {
        encoding_ = Encoding::lz4;
        best = lz4;
    }
    if (best == UINT64_MAX)
        encoding_.reset(); // nothing is available
    else if (best * 16 > sample.size_bytes * 15)
        failures_ = failures_before_sampling; // hardly anything to gain: look at a chunk now and then
}

std::optional<Encoding> Trial::next() {
    if (!encoding_ || failures_ < failures_before_sampling)
        return encoding_;
    if (++skipped_ % sampling_interval != 0)
        return std::nullopt;
    return encoding_;
}

} // namespace woodfrog::packs
