// Which encoding the chunks of a segment are tried with: by a quick sample of the segment, and by how the chunks before
// fared. Compression that does not pay must cost next to nothing: weights in bf16 hardly compress, and there are many.
#pragma once
#include "codecs.hpp"

#include <optional>
#include <span>
#include <string>

namespace woodfrog::packs {

enum class Compress { none, lz4, zstd, automatic };

struct Compression {
    Compress mode;
    int level; // of Zstandard
};

// From what the caller says. TransferError: -EINVAL for an unknown word or level, -ENOTSUP if the library is not here.
Compression parse_compression(const char *operation, const std::string &word, int level);

// The most bytes that an encoded chunk may have to be kept: a sixteenth less, or reading it costs more than it saves.
constexpr uint32_t room_for(uint32_t raw) {
    return raw - (raw + 15) / 16;
}

struct Bytes {
    const uint8_t *data;
    uint32_t size;
};

class Trial {
  public:
    // Looks at a sample of the chunks where there is something to choose.
    Trial(const Compression &compression, std::span<const Bytes> chunks, Coder &coder, Buffer &scratch);

    // The encoding to try for the next chunk, if any.
    std::optional<Encoding> next();

    // How the try went.
    void report(bool kept) { failures_ = kept ? 0 : failures_ + 1; }

  private:
    static constexpr unsigned failures_before_sampling = 4; // in a row; from then on only every 8th chunk is tried
    static constexpr unsigned sampling_interval = 8;

    std::optional<Encoding> encoding_;
    unsigned failures_ = 0;
    unsigned skipped_ = 0;
};

} // namespace woodfrog::packs
