// The digests of chunks of zeros, by size: a chunk of zeros is recognised by its digest alone. From any thread.
#pragma once
#include "records.hpp"

#include <mutex>
#include <unordered_map>
#include <vector>

namespace woodfrog::packs {

class ZeroDigests {
  public:
    // size: at most largest_raw_bytes.
    Digest of(uint32_t size) {
        std::lock_guard lock(mutex_);
        const auto known = digests_.find(size);
        if (known != digests_.end())
            return known->second;
        if (zeros_.size() < size)
            zeros_.resize(size);
        const Digest digest = blake3::hash(zeros_.data(), size);
        if (digests_.size() >= most_kept)
            digests_.clear();
        digests_.emplace(size, digest);
        return digest;
    }

  private:
    static constexpr size_t most_kept = 1 << 16; // sizes of short chunks are whatever file sizes are

    std::mutex mutex_;
    std::unordered_map<uint32_t, Digest> digests_;
    std::vector<uint8_t> zeros_;
};

} // namespace woodfrog::packs
