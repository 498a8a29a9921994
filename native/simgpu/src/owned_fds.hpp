// The file descriptors that the driver itself holds, in a table that a forked child can walk without taking a lock:
// a child has no CUDA and must not keep its parent's device memory alive.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace simgpu {

class OwnedFds {
  public:
    static OwnedFds &instance();

    void add(int fd);
    void remove_and_close(int fd);
    // Only for the child of a fork. Async-signal-safe.
    void close_all();

  private:
    // 65536 descriptors; /proc/sys/fs/nr_open bounds a process far above, but no simulated program gets there.
    static constexpr int kCapacity = 1 << 16;
    std::array<std::atomic<std::uint64_t>, kCapacity / 64> bits_{};
};

} // namespace simgpu
