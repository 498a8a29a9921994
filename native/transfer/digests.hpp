// The digests of the chunks of one operation: 32 bytes of BLAKE3 each, in the order of the chunks.
#pragma once
#include "blake3.hpp"
#include "error.hpp"

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace woodfrog::transfer {

// Collects digests; threads set different ones side by side.
class DigestList {
  public:
    explicit DigestList(size_t count) : bytes_(count * sizeof(blake3::Digest), '\0') {}
    void set(size_t index, const void *data, size_t size) {
        const blake3::Digest digest = blake3::hash(data, size);
        std::memcpy(bytes_.data() + index * sizeof(digest), digest.data(), sizeof(digest));
    }
    void set_many(size_t index, const void *digests, size_t count) {
        std::memcpy(bytes_.data() + index * sizeof(blake3::Digest), digests, count * sizeof(blake3::Digest));
    }
    std::string take() { return std::move(bytes_); }

  private:
    std::string bytes_;
};

// Digests to compare with; none: nothing is compared. The bytes are the caller's and must outlive this.
class ExpectedDigests {
  public:
    ExpectedDigests(const char *operation, std::optional<std::string_view> digests, size_t count) : digests_(digests) {
        if (digests && digests->size() != count * sizeof(blake3::Digest))
            throw_invalid(operation, "there are " + std::to_string(digests->size()) + " bytes of digests for " +
                                         std::to_string(count) + " chunks of 32 bytes each");
    }
    // Throws IntegrityError.
    void verify(size_t index, const void *data, size_t size) const {
        if (!digests_)
            return;
        const blake3::Digest digest = blake3::hash(data, size);
        if (std::memcmp(digests_->data() + index * sizeof(digest), digest.data(), sizeof(digest)) != 0)
            throw IntegrityError(index);
    }

  private:
    std::optional<std::string_view> digests_;
};

} // namespace woodfrog::transfer
