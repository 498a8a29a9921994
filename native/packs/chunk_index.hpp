// Which pack holds a digest, and where: what a store's index files say, in memory, for a million chunks and more. Knows
// nothing of files. From any thread: look-ups run side by side, changes by themselves.
//
//     entries   52 bytes a chunk, in blocks, so that growing copies nothing
//     slots     open addressing, 4 bytes a slot: number of an entry; at most 7/8 full
//     doubles   the few digests that more than one pack holds
#pragma once
#include "records.hpp"
#include "zero_digests.hpp"

#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace woodfrog::packs {

class ChunkIndex {
  public:
    // chunk_bytes: size of a full chunk. TransferError(-EINVAL) unless it is 4 KiB … 64 MiB.
    explicit ChunkIndex(uint64_t chunk_bytes);

    // All or, with TransferError(-EINVAL), none. A digest that the same pack has given before is left as it is.
    void add(uint32_t pack, const Packed<Record> &records);

    // Forgets the pack; the number of digests that are in no pack any more.
    size_t remove_pack(uint32_t pack);

    // A Location a digest. With `sizes` (one a digest) chunks of zeros of any size are known, else full ones.
    std::string find(const Packed<Digest> &digests, const std::optional<Packed<uint32_t>> &sizes) const;

    // Positions (uint32) of the first occurrences of the digests that are neither known nor of zeros. More than 64 Ki
    // digests are looked up by several threads.
    std::string missing(const Packed<Digest> &digests, const std::optional<Packed<uint32_t>> &sizes) const;

    std::string digests() const;
    size_t size() const;
    uint64_t memory_bytes() const;
    uint64_t chunk_bytes() const { return chunk_bytes_; }

  private:
    // Where a chunk is, packed to 4-byte alignment. A pack is below 2^56 bytes: 64 PiB.
    struct Place {
        uint32_t offset_low;
        uint32_t offset_high_and_encoding; // 24 bits, 8 bits
        uint32_t stored;
        uint32_t raw;
        uint32_t pack;
    };
    struct Entry {
        Digest digest;
        Place place;
    };
    static_assert(sizeof(Entry) == 52);

    static constexpr uint32_t entries_per_block = 1 << 14;
    static constexpr uint32_t no_entry = 0xffffffff;

    Entry &entry(uint32_t number) const { return blocks_[number / entries_per_block][number % entries_per_block]; }
    uint64_t hash(const Digest &digest) const;
    size_t home(const Digest &digest) const { return hash(digest) & (slots_.size() - 1); }
    uint32_t look_up(const Digest &digest) const;
    void insert(const Digest &digest, const Place &place);
    void append(const Entry &entry);
    void rebuild_slots(size_t count);
    bool is_zero(const Digest &digest, const std::optional<Packed<uint32_t>> &sizes, size_t i, uint32_t &size) const;

    template <typename Found>
    void look_up_range(const Packed<Digest> &digests, size_t begin, size_t end, const Found &found) const;
    void keep_first_occurrences(const Packed<Digest> &digests, std::vector<uint32_t> &positions) const;

    const uint64_t chunk_bytes_;
    Digest zero_digest_;
    mutable ZeroDigests zeros_;
    uint64_t key_[4];

    mutable std::shared_mutex mutex_; // of what follows
    std::vector<std::unique_ptr<Entry[]>> blocks_;
    uint32_t count_ = 0;
    std::vector<uint32_t> slots_;
    std::map<std::pair<Digest, uint32_t>, Place> doubles_;
};

} // namespace woodfrog::packs
