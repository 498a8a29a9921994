// Device memory of cuMemAlloc: large requests get physical memory of their own, small ones a piece of a 2 MiB slab,
// aligned to 512 bytes as on a real device. Freed memory goes back to the device as soon as its slab is empty.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include <cuda.h>

#include "address_space.hpp"

namespace simgpu {

class Heap {
  public:
    explicit Heap(int device) : device_(device) {}
    ~Heap();

    // Throws CUDA_ERROR_OUT_OF_MEMORY. The piece is not entered into the table of allocations.
    CUdeviceptr allocate(size_t size_bytes);
    // `base` must come from allocate() of the same heap.
    void free(CUdeviceptr base);
    void free_all();

  private:
    struct Block {
        std::map<size_t, size_t> free_pieces; // offset → size
        std::map<size_t, size_t> used_pieces;
        size_t size_bytes = 0;
    };
    CUdeviceptr add_block(size_t size_bytes);
    void drop_block(std::map<CUdeviceptr, Block>::iterator block);

    const int device_;
    std::mutex mutex_;
    std::map<CUdeviceptr, Block> blocks_;
};

} // namespace simgpu
