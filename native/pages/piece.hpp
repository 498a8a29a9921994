// Which pages of a process are where in a file of pages, and such a file as memory.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace woodfrog::pages {

// Of one process; whole pages.
struct PageRange {
    uint64_t address;
    uint64_t size;
    uint64_t offset; // in the file
};

// From packed little-endian u64 triples in the order of PageRange. They must ascend by address and be disjoint; else
// TransferError(-EINVAL).
std::vector<PageRange> unpack_pieces(const char *operation, std::string_view packed);

// The pieces cut so that none is larger than `size` bytes.
std::vector<PageRange> cut(const std::vector<PageRange> &pieces, uint64_t size);

uint64_t total_bytes(const std::vector<PageRange> &pieces);

// The whole of a file in memory, shared with everybody else who maps it. The descriptor stays the caller's.
class FileMapping {
  public:
    // `pieces` must lie within the file: TransferError(-EINVAL). `writable`: the descriptor must be.
    FileMapping(int fd, const std::vector<PageRange> &pieces, bool writable);
    FileMapping(const FileMapping &) = delete;
    FileMapping &operator=(const FileMapping &) = delete;
    ~FileMapping();

    char *at(uint64_t offset) const { return begin_ + offset; }

  private:
    char *begin_ = nullptr;
    uint64_t size_ = 0;
};

} // namespace woodfrog::pages
