// The bounded queue between the application's threads and the one that evaluates: records of bytes, oldest first.
//
// Writers take a lock for as long as a copy lasts; the reader takes none. Nothing waits for room: what does not fit is
// refused, and whoever was refused must count it as a write of everything.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace woodfrog::interpose::shadow {

class Ring {
  public:
    // Room for a thousand launches of a kilobyte each.
    static constexpr size_t kBytes = size_t{1} << 20;
    // The reader is woken when so much is waiting: seldom, and long before there is no room.
    static constexpr size_t kWakeBytes = kBytes / 8;
    static constexpr size_t kLargestRecord = size_t{64} << 10;

    // Calls fill(unsigned char *) for `size_bytes` of new record. False when there is no room.
    template <typename Fill> bool push(size_t size_bytes, Fill fill) {
        std::lock_guard lock(mutex_);
        unsigned char *place = reserve(size_bytes);
        if (place == nullptr)
            return false;
        fill(place);
        head_.store(next_, std::memory_order_release);
        return true;
    }
    size_t waiting_bytes() const {
        return static_cast<size_t>(head_.load(std::memory_order_acquire) - tail_.load(std::memory_order_acquire));
    }

    // For the one reader: everything up to end() may be read, record by record, until pop.
    uint64_t end() const { return head_.load(std::memory_order_acquire); }
    bool next(uint64_t end, const unsigned char **record, size_t *size_bytes);
    void pop();
    void discard();

  private:
    unsigned char *reserve(size_t size_bytes);

    std::mutex mutex_;
    std::atomic<uint64_t> head_{0}, tail_{0};
    uint64_t next_ = 0;  // the head once the record under way is whole
    uint64_t after_ = 0; // the tail once the record being read is popped
    alignas(16) unsigned char bytes_[kBytes];
};

} // namespace woodfrog::interpose::shadow
