// Many small allocations in one block. Pure bookkeeping of offsets; it never calls the driver and takes no lock.
#pragma once

#include <cstddef>
#include <map>

namespace woodfrog::interpose {

// cuMemAlloc's alignment as measured on drivers 550 to 580 (the programming guide promises 256).
inline constexpr size_t kSmallAlignment = 512;

struct Slab {
    explicit Slab(size_t size_bytes);

    // Best fit. False when no free piece is large enough. `size_bytes` must be a multiple of kSmallAlignment, not 0.
    bool take(size_t size_bytes, size_t *offset);
    // Gives a piece back that `take` returned, with the same size.
    void give(size_t offset, size_t size_bytes);
    size_t largest_free_bytes() const;
    bool empty() const { return used_bytes == 0; }

    size_t size_bytes;
    size_t used_bytes = 0;

  private:
    std::map<size_t, size_t> free_by_offset_;
    std::multimap<size_t, size_t> free_by_size_;
    void add_free(size_t offset, size_t size_bytes);
    void remove_free(std::map<size_t, size_t>::iterator piece);
};

inline size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

} // namespace woodfrog::interpose
