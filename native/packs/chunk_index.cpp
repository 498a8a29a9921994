// See chunk_index.hpp. Digests may come from a hostile index file, chosen so that they fall into one slot: the hash is
// keyed with random numbers of this process.
#include "chunk_index.hpp"

#include "transfer/parallel.hpp"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <sys/random.h>

namespace woodfrog::packs {
namespace {

constexpr const char *operation = "ChunkIndex";
constexpr uint64_t smallest_chunk_bytes = 4096;
constexpr uint64_t largest_offset = (1ull << 56) - 1;
constexpr size_t fewest_slots = 1024;
constexpr size_t share = 1 << 16; // digests that one thread looks up, in some milliseconds
constexpr size_t batch = 16;      // look-ups whose memory is fetched side by side: about what a core has in flight

} // namespace

ChunkIndex::ChunkIndex(uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
    if (chunk_bytes < smallest_chunk_bytes || chunk_bytes > largest_raw_bytes)
        transfer::throw_invalid(operation, "the chunk size " + std::to_string(chunk_bytes) + " is not from " +
                                               std::to_string(smallest_chunk_bytes) + " to " +
                                               std::to_string(largest_raw_bytes));
    zero_digest_ = zeros_.of(static_cast<uint32_t>(chunk_bytes));
    if (getrandom(key_, sizeof(key_), 0) != static_cast<ssize_t>(sizeof(key_)))
        transfer::throw_errno(errno, "getrandom", "");
    rebuild_slots(fewest_slots);
}

// Sum of products of the digest's words with random odd numbers, folded: two digests that differ collide only by chance
// for whoever does not know the key.
uint64_t ChunkIndex::hash(const Digest &digest) const {
    uint64_t words[4];
    std::memcpy(words, digest.data(), sizeof(words));
    uint64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned __int128 product = static_cast<unsigned __int128>(words[i]) * (key_[i] | 1);
        sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    return sum ^ (sum >> 32);
}

uint32_t ChunkIndex::look_up(const Digest &digest) const {
    const size_t mask = slots_.size() - 1;
    for (size_t slot = home(digest);; slot = (slot + 1) & mask) {
        const uint32_t number = slots_[slot];
        if (number == no_entry || entry(number).digest == digest)
            return number;
    }
}

void ChunkIndex::append(const Entry &added) {
    if (count_ % entries_per_block == 0 && count_ / entries_per_block == blocks_.size())
        blocks_.push_back(std::make_unique_for_overwrite<Entry[]>(entries_per_block));
    entry(count_) = added;
    const size_t mask = slots_.size() - 1;
    size_t slot = home(added.digest);
    while (slots_[slot] != no_entry)
        slot = (slot + 1) & mask;
    slots_[slot] = count_++;
}

void ChunkIndex::insert(const Digest &digest, const Place &place) {
    const uint32_t known = look_up(digest);
    if (known == no_entry)
        append({digest, place});
    else if (entry(known).place.pack != place.pack)
        doubles_.emplace(std::pair(digest, place.pack), place);
}

void ChunkIndex::rebuild_slots(size_t count) {
    std::vector<uint32_t>(count, no_entry).swap(slots_);
    const size_t mask = count - 1;
    for (uint32_t number = 0; number < count_; number++) {
        size_t slot = home(entry(number).digest);
        while (slots_[slot] != no_entry)
            slot = (slot + 1) & mask;
        slots_[slot] = number;
    }
}

void ChunkIndex::add(uint32_t pack, const Packed<Record> &records) {
    if (pack >= pack_zero)
        transfer::throw_invalid(operation, "a pack's number is below " + std::to_string(pack_zero));
    for (size_t i = 0; i < records.size(); i++) {
        const Record record = records[i];
        if (record.reserved != 0 || record.offset > largest_offset ||
            !is_plausible(record.stored, record.raw, record.encoding))
            transfer::throw_invalid(operation, "record " + std::to_string(i) + " makes no sense");
    }
    std::unique_lock lock(mutex_);
    const uint64_t most = static_cast<uint64_t>(count_) + records.size();
    if (most >= no_entry)
        transfer::throw_invalid(operation, "there are more chunks than an index can hold");
    // The exact number is known only afterwards; a table for the largest possible is at most one doubling too large.
    if (most * 8 > slots_.size() * 7)
        rebuild_slots(std::bit_ceil(most * 8 / 7 + 1));
    for (size_t i = 0; i < records.size(); i++) {
        const Record record = records[i];
        insert(record.digest,
               {static_cast<uint32_t>(record.offset), static_cast<uint32_t>(record.offset >> 32 << 8) | record.encoding,
                record.stored, record.raw, pack});
    }
}

size_t ChunkIndex::remove_pack(uint32_t pack) {
    std::unique_lock lock(mutex_);
    std::erase_if(doubles_, [&](const auto &item) { return item.first.second == pack; });
    size_t gone = 0;
    uint32_t kept = 0;
    for (uint32_t number = 0; number < count_; number++) {
        Entry moved = entry(number);
        if (moved.place.pack == pack) {
            const auto other = doubles_.lower_bound({moved.digest, 0});
            if (other == doubles_.end() || other->first.first != moved.digest) {
                gone++;
                continue;
            }
            moved.place = other->second;
            doubles_.erase(other);
        }
        entry(kept++) = moved;
    }
    count_ = kept;
    blocks_.resize((count_ + entries_per_block - 1) / entries_per_block);
    if (gone > 0)
        rebuild_slots(std::bit_ceil(std::max<size_t>(fewest_slots, static_cast<uint64_t>(count_) * 8 / 7 + 1)));
    return gone;
}

bool ChunkIndex::is_zero(const Digest &digest, const std::optional<Packed<uint32_t>> &sizes, size_t i,
                         uint32_t &size) const {
    size = static_cast<uint32_t>(chunk_bytes_);
    if (digest == zero_digest_)
        return true;
    if (!sizes || (*sizes)[i] == chunk_bytes_)
        return false;
    size = (*sizes)[i];
    return size > 0 && size <= largest_raw_bytes && digest == zeros_.of(size);
}

// Calls found(i, entry number or no_entry) for the digests begin … end-1, in order. The memory of a batch is asked for
// before any of it is looked at: a look-up is two cache misses, which then overlap. The caller holds the lock.
template <typename Found>
void ChunkIndex::look_up_range(const Packed<Digest> &digests, size_t begin, size_t end, const Found &found) const {
    const size_t mask = slots_.size() - 1;
    for (size_t first = begin; first < end; first += batch) {
        const size_t count = std::min(batch, end - first);
        Digest wanted[batch];
        size_t slot[batch];
        for (size_t i = 0; i < count; i++) {
            wanted[i] = digests[first + i];
            slot[i] = hash(wanted[i]) & mask;
            __builtin_prefetch(&slots_[slot[i]]);
        }
        for (size_t i = 0; i < count; i++)
            if (slots_[slot[i]] != no_entry)
                __builtin_prefetch(&entry(slots_[slot[i]]));
        for (size_t i = 0; i < count; i++) {
            uint32_t number;
            for (size_t at = slot[i];; at = (at + 1) & mask) {
                number = slots_[at];
                if (number == no_entry || entry(number).digest == wanted[i])
                    break;
            }
            found(first + i, wanted[i], number);
        }
    }
}

std::string ChunkIndex::find(const Packed<Digest> &digests, const std::optional<Packed<uint32_t>> &sizes) const {
    std::string result(digests.size() * sizeof(Location), '\0');
    std::shared_lock lock(mutex_);
    look_up_range(digests, 0, digests.size(), [&](size_t i, const Digest &digest, uint32_t number) {
        Location location{0, 0, 0, 0, pack_absent, 0};
        uint32_t size;
        if (is_zero(digest, sizes, i, size)) {
            location.pack = pack_zero;
            location.raw = size;
        } else if (number != no_entry) {
            const Place &place = entry(number).place;
            location.offset = place.offset_low | static_cast<uint64_t>(place.offset_high_and_encoding >> 8) << 32;
            location.encoding = place.offset_high_and_encoding & 0xff;
            location.stored = place.stored;
            location.raw = place.raw;
            location.pack = place.pack;
        }
        std::memcpy(result.data() + i * sizeof(Location), &location, sizeof(Location));
    });
    return result;
}

void ChunkIndex::keep_first_occurrences(const Packed<Digest> &digests, std::vector<uint32_t> &positions) const {
    // Positions by digest, open addressing, at most half full.
    std::vector<uint32_t> seen(std::bit_ceil(std::max<size_t>(positions.size() * 2, 16)), no_entry);
    const size_t mask = seen.size() - 1;
    size_t kept = 0;
    for (size_t first = 0; first < positions.size(); first += batch) {
        const size_t count = std::min(batch, positions.size() - first);
        Digest wanted[batch];
        size_t slots[batch];
        for (size_t i = 0; i < count; i++) {
            wanted[i] = digests[positions[first + i]];
            slots[i] = hash(wanted[i]) & mask;
            __builtin_prefetch(&seen[slots[i]]);
        }
        for (size_t i = 0; i < count; i++) {
            size_t slot = slots[i];
            while (seen[slot] != no_entry && digests[seen[slot]] != wanted[i])
                slot = (slot + 1) & mask;
            if (seen[slot] != no_entry)
                continue;
            seen[slot] = positions[first + i];
            positions[kept++] = positions[first + i];
        }
    }
    positions.resize(kept);
}

std::string ChunkIndex::missing(const Packed<Digest> &digests, const std::optional<Packed<uint32_t>> &sizes) const {
    if (digests.size() >= no_entry)
        transfer::throw_invalid(operation, "there are more digests than positions");
    // A checkpoint's target may be waiting for this; a share is what a thread's start is worth.
    std::vector<std::vector<uint32_t>> shares((digests.size() + share - 1) / share);
    {
        std::shared_lock lock(mutex_);
        transfer::for_each_index(shares.size() > 1 ? 0 : 1, shares.size(), [&](size_t number) {
            std::vector<uint32_t> &unknown = shares[number];
            const size_t begin = number * share, end = std::min(digests.size(), begin + share);
            look_up_range(digests, begin, end, [&](size_t i, const Digest &digest, uint32_t known) {
                uint32_t size;
                if (known == no_entry && !is_zero(digest, sizes, i, size))
                    unknown.push_back(static_cast<uint32_t>(i));
            });
        });
    }
    std::vector<uint32_t> positions;
    for (const std::vector<uint32_t> &unknown : shares)
        positions.insert(positions.end(), unknown.begin(), unknown.end());
    keep_first_occurrences(digests, positions);
    return std::string(reinterpret_cast<const char *>(positions.data()), positions.size() * sizeof(uint32_t));
}

std::string ChunkIndex::digests() const {
    std::shared_lock lock(mutex_);
    std::string result;
    result.reserve(count_ * sizeof(Digest));
    for (uint32_t number = 0; number < count_; number++)
        result.append(reinterpret_cast<const char *>(entry(number).digest.data()), sizeof(Digest));
    return result;
}

size_t ChunkIndex::size() const {
    std::shared_lock lock(mutex_);
    return count_;
}

uint64_t ChunkIndex::memory_bytes() const {
    // A node of the map: its key and value and about 40 bytes of the tree.
    constexpr uint64_t double_bytes = sizeof(std::pair<Digest, uint32_t>) + sizeof(Place) + 40;
    std::shared_lock lock(mutex_);
    return blocks_.size() * (entries_per_block * sizeof(Entry) + sizeof(void *)) + slots_.size() * sizeof(uint32_t) +
           doubles_.size() * double_bytes + sizeof(*this);
}

} // namespace woodfrog::packs
