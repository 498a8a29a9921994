// How far an operation is, readable from another thread while it runs, and the way to stop it. One Progress may serve
// several operations at once (several GPUs side by side): their bytes add up.
#pragma once
#include "error.hpp"

#include <atomic>
#include <cstdint>

namespace woodfrog::transfer {

class Progress {
  public:
    // With a total of 0 every operation adds its own bytes to the total when it starts.
    explicit Progress(uint64_t bytes_total = 0) : total_is_given_(bytes_total > 0), total_(bytes_total) {}

    void begin(uint64_t bytes) {
        if (!total_is_given_)
            total_ += bytes;
    }
    void add(uint64_t bytes) { done_ += bytes; }
    void cancel() { cancelled_ = true; }

    // Throws CancelledError if cancel() was called. Operations ask between any two chunks.
    void check() const {
        if (cancelled_)
            throw CancelledError();
    }

    uint64_t bytes_done() const { return done_; }
    uint64_t bytes_total() const { return total_; }
    bool cancelled() const { return cancelled_; }

  private:
    const bool total_is_given_;
    std::atomic<uint64_t> total_;
    std::atomic<uint64_t> done_{0};
    std::atomic<bool> cancelled_{false};
};

} // namespace woodfrog::transfer
