// Physical memory of a device: one memfd each.
//
// A Physical is what cuMemCreate makes, and what lies under every cuMemAlloc. Its descriptor is a real file
// descriptor: whoever holds a copy keeps the bytes alive. At a checkpoint the bytes move into ordinary anonymous
// memory of the process and the descriptor is closed; at a restore they move into a new memfd. Fresh memory is zero.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <cuda.h>

namespace simgpu {

// The granularity of every real NVIDIA device that has virtual memory management.
inline constexpr size_t kGranularity = size_t{2} << 20;
inline constexpr int kHostMemory = -1;

class Physical {
  public:
    // On device `device` (the number this process knows it by) or kHostMemory. Throws CUDA_ERROR_OUT_OF_MEMORY.
    static std::shared_ptr<Physical> create(size_t size_bytes, int device, const CUmemAllocationProp &properties);
    // Takes a copy of `fd`. Throws CUDA_ERROR_INVALID_VALUE when it is no memory of a simulated GPU.
    static std::shared_ptr<Physical> import(int fd);
    ~Physical();
    Physical(const Physical &) = delete;
    Physical &operator=(const Physical &) = delete;

    int fd() const { return fd_; }
    // A copy of the descriptor that belongs to the caller. Throws CUDA_ERROR_OPERATING_SYSTEM.
    int duplicate_fd() const;
    size_t size_bytes() const { return size_bytes_; }
    int device() const { return device_; }
    bool imported() const { return imported_; }
    bool shareable_host_memory() const { return device_ == kHostMemory && properties_.requestedHandleTypes != 0; }
    const CUmemAllocationProp &properties() const { return properties_; }

    // Copies the bytes to host memory: `room`, which is clear and outlives them, or memory of its own. Throws
    // CUDA_ERROR_OUT_OF_MEMORY when the host has none.
    void save(void *room = nullptr);
    // Makes a new memfd of the saved bytes, on whatever `device()` now stands for. Throws CUDA_ERROR_OUT_OF_MEMORY
    // and stays without.
    void load();
    // Makes a new memfd, clear, on whatever `device()` now stands for. Throws CUDA_ERROR_OUT_OF_MEMORY.
    void renew() { open_memfd(); }
    // Closes the memfd; every mapping of it must be gone. The saved bytes stay.
    void unload();
    // Gives the saved bytes back to the host.
    void drop_saved();

    static std::vector<std::shared_ptr<Physical>> all();

  private:
    Physical() = default;
    void open_memfd();

    int fd_ = -1;
    size_t size_bytes_ = 0;
    int device_ = 0;
    bool imported_ = false;
    CUmemAllocationProp properties_{};
    void *saved_ = nullptr;
    bool owns_saved_ = false;
    // The parts of the saved bytes that were ever written, (offset, size): the rest is zero and stays unbacked.
    std::vector<std::pair<size_t, size_t>> written_;
};

} // namespace simgpu
