// How large shared blocks are; see pool.hpp.
#include "pool.hpp"

#include "debug.hpp"
#include "slab.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace woodfrog::interpose {
namespace {

constexpr size_t kSmallestBytes = size_t{64} << 20; // three of the 20 MiB that PyTorch asks for
constexpr size_t kLargestMib = 16384;
constexpr size_t kShare = 8; // of what is owned: at most so much more is taken than is asked for
constexpr size_t kParts = 3; // an allocation larger than this part of a block has one of its own

size_t largest_bytes() {
    static const size_t bytes = [] {
        const char *text = getenv("WOODFROG_POOL_MIB");
        if (text == nullptr || *text == '\0')
            return size_t{0};
        char *end = nullptr;
        const unsigned long long mib = strtoull(text, &end, 10);
        if (*end != '\0' || mib > kLargestMib) {
            debug("WOODFROG_POOL_MIB=%s is not a number up to %zu: large allocations share no blocks", text,
                  kLargestMib);
            return size_t{0};
        }
        return static_cast<size_t>(mib) << 20;
    }();
    return bytes;
}

} // namespace

size_t pool_block_bytes(size_t owned_bytes, size_t granularity_bytes) {
    if (largest_bytes() == 0)
        return 0;
    const size_t share = std::bit_floor(std::max<size_t>(owned_bytes / kShare, 1));
    return round_up(std::min(std::max(share, kSmallestBytes), largest_bytes()), granularity_bytes);
}

bool pool_takes(size_t size_bytes, size_t pool_bytes) {
    return size_bytes <= pool_bytes / kParts;
}

} // namespace woodfrog::interpose
