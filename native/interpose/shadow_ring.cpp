// Places in the ring; see shadow_ring.hpp. A record is a header of 16 bytes, then its bytes, rounded up to 16; where
// the end of the buffer is too near, a header alone says that the next record is at the beginning.
#include "shadow_ring.hpp"

#include <cstring>

namespace woodfrog::interpose::shadow {
namespace {

constexpr size_t kHeader = 16;
constexpr uint64_t kSkip = ~uint64_t{0};

size_t whole_bytes(size_t size_bytes) {
    return kHeader + (size_bytes + 15) / 16 * 16;
}

} // namespace

unsigned char *Ring::reserve(size_t size_bytes) {
    if (size_bytes > kLargestRecord)
        return nullptr;
    uint64_t head = head_.load(std::memory_order_relaxed);
    const size_t wanted = whole_bytes(size_bytes), left = kBytes - head % kBytes;
    const size_t skipped = left < wanted ? left : 0;
    if (head + skipped + wanted - tail_.load(std::memory_order_acquire) > kBytes)
        return nullptr;
    if (skipped != 0) {
        memcpy(bytes_ + head % kBytes, &kSkip, sizeof(kSkip));
        head += skipped;
    }
    const uint64_t length = size_bytes;
    unsigned char *place = bytes_ + head % kBytes;
    memcpy(place, &length, sizeof(length));
    next_ = head + wanted;
    return place + kHeader;
}

bool Ring::next(uint64_t end, const unsigned char **record, size_t *size_bytes) {
    uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (tail >= end)
        return false;
    uint64_t length = 0;
    memcpy(&length, bytes_ + tail % kBytes, sizeof(length));
    if (length == kSkip) {
        tail += kBytes - tail % kBytes;
        memcpy(&length, bytes_, sizeof(length));
    }
    *record = bytes_ + tail % kBytes + kHeader;
    *size_bytes = static_cast<size_t>(length);
    after_ = tail + whole_bytes(*size_bytes);
    return true;
}

void Ring::pop() {
    tail_.store(after_, std::memory_order_release);
}

void Ring::discard() {
    tail_.store(head_.load(std::memory_order_acquire), std::memory_order_release);
}

} // namespace woodfrog::interpose::shadow
