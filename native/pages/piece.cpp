#include "piece.hpp"

#include "transfer/error.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace woodfrog::pages {

using transfer::throw_errno;
using transfer::throw_invalid;

std::vector<PageRange> unpack_pieces(const char *operation, std::string_view packed) {
    if (packed.size() % sizeof(PageRange) != 0)
        throw_invalid(operation, "pieces are three numbers of 8 bytes each");
    std::vector<PageRange> pieces(packed.size() / sizeof(PageRange));
    if (!pieces.empty())
        memcpy(pieces.data(), packed.data(), packed.size());
    const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    uint64_t behind = 0;
    for (const PageRange &piece : pieces) {
        if ((piece.address | piece.size | piece.offset) % page_bytes != 0 || piece.size == 0)
            throw_invalid(operation, "a piece is not made of whole pages");
        if (piece.address < behind || piece.address + piece.size < piece.address ||
            piece.offset + piece.size < piece.offset)
            throw_invalid(operation, "pieces do not ascend, or overlap");
        behind = piece.address + piece.size;
    }
    return pieces;
}

std::vector<PageRange> cut(const std::vector<PageRange> &pieces, uint64_t size) {
    std::vector<PageRange> smaller;
    for (const PageRange &piece : pieces)
        for (uint64_t done = 0; done < piece.size; done += size)
            smaller.push_back({piece.address + done, std::min(size, piece.size - done), piece.offset + done});
    return smaller;
}

uint64_t total_bytes(const std::vector<PageRange> &pieces) {
    uint64_t total = 0;
    for (const PageRange &piece : pieces)
        total += piece.size;
    return total;
}

FileMapping::FileMapping(int fd, const std::vector<PageRange> &pieces, bool writable) {
    uint64_t end = 0;
    for (const PageRange &piece : pieces)
        end = std::max(end, piece.offset + piece.size);
    struct stat status;
    if (fstat(fd, &status) != 0)
        throw_errno(errno, "fstat", "");
    if (end > static_cast<uint64_t>(status.st_size))
        throw_invalid("map_pages", "a piece lies behind the end of the file");
    if (end == 0)
        return;
    void *begin = mmap(nullptr, end, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (begin == MAP_FAILED)
        throw_errno(errno, "mmap", "a file of pages");
    begin_ = static_cast<char *>(begin);
    size_ = end;
}

FileMapping::~FileMapping() {
    if (begin_)
        munmap(begin_, size_);
}

} // namespace woodfrog::pages
