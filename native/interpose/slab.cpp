// Bookkeeping of a slab; see slab.hpp.
#include "slab.hpp"

#include <iterator>

namespace woodfrog::interpose {

Slab::Slab(size_t size) : size_bytes(size) {
    add_free(0, size);
}

void Slab::add_free(size_t offset, size_t size) {
    free_by_offset_.emplace(offset, size);
    free_by_size_.emplace(size, offset);
}

void Slab::remove_free(std::map<size_t, size_t>::iterator piece) {
    const auto [first, last] = free_by_size_.equal_range(piece->second);
    for (auto entry = first; entry != last; ++entry) {
        if (entry->second == piece->first) {
            free_by_size_.erase(entry);
            break;
        }
    }
    free_by_offset_.erase(piece);
}

bool Slab::take(size_t size, size_t *offset) {
    const auto best = free_by_size_.lower_bound(size);
    if (best == free_by_size_.end())
        return false;
    const size_t start = best->second, available = best->first;
    remove_free(free_by_offset_.find(start));
    if (available > size)
        add_free(start + size, available - size);
    used_bytes += size;
    *offset = start;
    return true;
}

void Slab::give(size_t offset, size_t size) {
    used_bytes -= size;
    const auto after = free_by_offset_.lower_bound(offset);
    if (after != free_by_offset_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            offset = before->first;
            size += before->second;
            remove_free(before);
        }
    }
    if (after != free_by_offset_.end() && offset + size == after->first) {
        size += after->second;
        remove_free(after);
    }
    add_free(offset, size);
}

size_t Slab::largest_free_bytes() const {
    return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

} // namespace woodfrog::interpose
