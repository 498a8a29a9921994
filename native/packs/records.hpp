// The packed arrays in which chunks, records and locations travel between Python and C++ (little-endian, no padding),
// and the limits that hold for every chunk. Layouts and numbers: docs/format.md, "Packs". It must never hold logic.
#pragma once
#include "transfer/blake3.hpp"
#include "transfer/error.hpp"

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace woodfrog::packs {

static_assert(std::endian::native == std::endian::little, "packs are little-endian, as all machines with GPUs are");

using blake3::Digest;

enum class Encoding : uint32_t { raw = 0, lz4 = 1, zstd = 2, split_zstd = 3 };
constexpr uint32_t encoding_count = 4;

constexpr uint64_t page_bytes = 4096; // what O_DIRECT needs of offsets, lengths and addresses
constexpr uint32_t largest_raw_bytes = 64u << 20;

// What is to be stored: `size` bytes at `offset` of source number `source`.
struct SourceChunk {
    Digest digest;
    uint64_t offset;
    uint32_t size;
    uint32_t source;
};
static_assert(sizeof(SourceChunk) == 48);

// Where a pack holds a chunk.
struct Record {
    Digest digest;
    uint64_t offset; // from the start of the pack
    uint32_t stored;
    uint32_t raw;
    uint32_t encoding;
    uint32_t reserved;
};
static_assert(sizeof(Record) == 56);

constexpr uint32_t pack_absent = 0xffffffff; // Location.pack: in no pack
constexpr uint32_t pack_zero = 0xfffffffe;   // a chunk of zeros, in no pack either

// Where some pack holds a chunk; `pack` is the caller's number.
struct Location {
    uint64_t offset;
    uint32_t stored;
    uint32_t raw;
    uint32_t encoding;
    uint32_t pack;
    uint64_t reserved;
};
static_assert(sizeof(Location) == 32);

// A packed array that is the caller's (a bytes object of any alignment).
template <typename T> class Packed {
  public:
    // TransferError(-EINVAL, operation) unless the bytes are a whole number of elements.
    Packed(const char *operation, const char *what, std::string_view bytes) : bytes_(bytes) {
        if (bytes.size() % sizeof(T) != 0)
            transfer::throw_invalid(operation, std::to_string(bytes.size()) + " bytes of " + what +
                                                   " are not a multiple of " + std::to_string(sizeof(T)));
    }
    size_t size() const { return bytes_.size() / sizeof(T); }
    T operator[](size_t i) const {
        T value;
        std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
        return value;
    }
    const char *data(size_t i) const { return bytes_.data() + i * sizeof(T); }

  private:
    std::string_view bytes_;
};

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Whether stored, raw and encoding of a record or location agree with each other and with the limits.
constexpr bool is_plausible(uint32_t stored, uint32_t raw, uint32_t encoding) {
    if (raw == 0 || raw > largest_raw_bytes || stored == 0 || encoding >= encoding_count)
        return false;
    return encoding == static_cast<uint32_t>(Encoding::raw) ? stored == raw : stored < raw;
}

} // namespace woodfrog::packs
