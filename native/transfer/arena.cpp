// The arena's memory: memfd, mapping, population, clearing, registration. See arena.hpp.
#include "arena.hpp"

#include "parallel.hpp"
#include "zero.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <fstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // linux/mman.h since 5.14
#endif

namespace woodfrog::transfer {
namespace {

constexpr int mpol_preferred = 1; // linux/mempolicy.h: MPOL_PREFERRED
constexpr int most_numa_nodes = 1024;

uint64_t page_bytes() {
    static const auto size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return size;
}

uint64_t divide_up(uint64_t value, uint64_t by) {
    return value / by + (value % by != 0);
}

// Whether this kernel gives huge pages to a memfd that asks for them with madvise.
bool kernel_gives_huge_pages() {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    std::string word;
    while (file >> word)
        if (word.front() == '[')
            return word != "[never]" && word != "[deny]";
    return false;
}

void prefer_node(void *address, uint64_t size, int node) {
    unsigned long mask[most_numa_nodes / (8 * sizeof(unsigned long))] = {};
    constexpr unsigned bits = 8 * sizeof(unsigned long);
    if (node >= most_numa_nodes)
        throw_invalid("Arena", "there is no NUMA node " + std::to_string(node));
    mask[static_cast<unsigned>(node) / bits] |= 1ul << (static_cast<unsigned>(node) % bits);
    if (syscall(SYS_mbind, address, size, mpol_preferred, mask, most_numa_nodes + 1ul, 0u) == 0)
        return;
    if (errno == ENOSYS && node == 0)
        return; // a kernel without NUMA has node 0 only
    throw_errno(errno, "mbind", "NUMA node " + std::to_string(node));
}

// Where madvise cannot populate: touches each page without changing it (another process may be writing there).
void touch_pages(uint8_t *from, uint64_t size) {
    for (uint64_t offset = 0; offset < size; offset += page_bytes())
        std::atomic_ref<uint8_t>(from[offset]).fetch_or(0, std::memory_order_relaxed);
}

} // namespace

Arena::Arena(uint64_t size_bytes, int numa_node, unsigned threads, int fd)
    : size_bytes_(size_bytes), numa_node_(numa_node), threads_(thread_count(threads)) {
    if (size_bytes == 0 || size_bytes % page_bytes() != 0 || size_bytes > static_cast<uint64_t>(INT64_MAX))
        throw_invalid("Arena",
                      "the size " + std::to_string(size_bytes) + " is not a positive multiple of the page size");
    try {
        open_memfd(fd);
        map();
        populated_.resize(divide_up(size_bytes, block_bytes));
        pieces_.resize(divide_up(size_bytes, piece_bytes), PieceState::unregistered);
        if (fd >= 0)
            find_populated_blocks();
    } catch (...) {
        close_quietly();
        throw;
    }
}

Arena::~Arena() {
    close_quietly();
}

void Arena::open_memfd(int fd) {
    if (fd < 0) {
        fd_ = memfd_create("woodfrog-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd_ < 0)
            throw_errno(errno, "memfd_create", "");
        if (ftruncate(fd_, static_cast<off_t>(size_bytes_)) != 0)
            throw_errno(errno, "ftruncate", std::to_string(size_bytes_) + " bytes");
    } else {
        fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (fd_ < 0)
            throw_errno(errno, "fcntl", "the arena's descriptor");
        struct stat status{};
        if (fstat(fd_, &status) != 0)
            throw_errno(errno, "fstat", "the arena's descriptor");
        if (static_cast<uint64_t>(status.st_size) != size_bytes_)
            throw_invalid("Arena", "the descriptor has " + std::to_string(status.st_size) + " bytes, not " +
                                       std::to_string(size_bytes_));
    }
    // Sealed, so that nobody who was given the descriptor can shrink it under our feet (SIGBUS).
    const int seals = fcntl(fd_, F_GET_SEALS);
    if (seals < 0)
        throw_errno(errno, "fcntl", "the arena's descriptor is not a memfd");
    if (!(seals & F_SEAL_SHRINK) && fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        throw_errno(errno, "fcntl", "the arena cannot be sealed against shrinking");
}

void Arena::map() {
    void *address = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (address == MAP_FAILED)
        throw_errno(errno, "mmap", "an arena of " + std::to_string(size_bytes_) + " bytes");
    data_ = static_cast<uint8_t *>(address);
    huge_pages_ = madvise(address, size_bytes_, MADV_HUGEPAGE) == 0 && kernel_gives_huge_pages();
    madvise(address, size_bytes_, MADV_DONTDUMP); // a core file must not hold users' data; refused only by old kernels
    madvise(address, size_bytes_, MADV_DONTFORK); // CRIU and helpers that we fork need none of it
    if (numa_node_ >= 0)
        prefer_node(address, size_bytes_, numa_node_);
}

void Arena::find_populated_blocks() {
    for (uint64_t block = 0; block < populated_.size(); block++) {
        const auto start = static_cast<off_t>(block * block_bytes);
        const uint64_t end = std::min(size_bytes_, (block + 1) * block_bytes);
        populated_[block] = lseek(fd_, start, SEEK_HOLE) >= static_cast<off_t>(end);
    }
}

void Arena::check_range(const char *operation, uint64_t offset, uint64_t size) const {
    if (offset > size_bytes_ || size > size_bytes_ - offset)
        throw_invalid(operation, "[" + std::to_string(offset) + ", +" + std::to_string(size) +
                                     ") does not lie within the arena of " + std::to_string(size_bytes_) + " bytes");
}

void Arena::populate_block(uint64_t block) {
    uint8_t *from = data_ + block * block_bytes;
    const uint64_t size = std::min(block_bytes, size_bytes_ - block * block_bytes);
    while (madvise(from, size, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN)
            continue; // the call says that it was interrupted and wants to be made again
        if (errno != EINVAL)
            throw_errno(errno, "madvise", "no memory for the arena");
        touch_pages(from, size);
        return;
    }
}

void Arena::populate(uint64_t offset, uint64_t size, Progress &progress) {
    Use here = use();
    check_range("populate", offset, size);
    if (size == 0)
        return;
    progress.begin(size);
    const uint64_t first = offset / block_bytes, last = divide_up(offset + size, block_bytes);
    std::atomic<uint64_t> next{first};
    run_parallel(threads_, [&](Failure &failure) {
        for (uint64_t block = next++; block < last && !failure.happened(); block = next++) {
            progress.check();
            populate_block(block);
            {
                std::lock_guard lock(mutex_);
                populated_[block] = true;
            }
            register_complete_piece(block * block_bytes / piece_bytes);
            const uint64_t start = std::max(offset, block * block_bytes);
            progress.add(std::min(offset + size, (block + 1) * block_bytes) - start);
        }
    });
}

void Arena::clear(uint64_t offset, uint64_t size, Progress &progress) {
    Use here = use();
    check_range("clear", offset, size);
    progress.begin(size);
    std::atomic<uint64_t> next{0};
    run_parallel(threads_, [&](Failure &failure) {
        for (uint64_t start = next.fetch_add(block_bytes); start < size && !failure.happened();
             start = next.fetch_add(block_bytes)) {
            progress.check();
            const auto end = static_cast<off_t>(offset + std::min(size, start + block_bytes));
            auto at = static_cast<off_t>(offset + start);
            while (at < end) { // holes are zero already, and stay holes
                const off_t data = lseek(fd_, at, SEEK_DATA);
                if (data < 0 && errno != ENXIO)
                    throw_errno(errno, "lseek", "the arena");
                if (data < 0 || data >= end)
                    break;
                const off_t hole = std::min(end, lseek(fd_, data, SEEK_HOLE));
                write_zeros(data_ + data, static_cast<size_t>(hole - data));
                at = hole;
            }
            progress.add(std::min(block_bytes, size - start));
        }
    });
}

uint64_t Arena::piece_size(uint64_t piece) const {
    return std::min(piece_bytes, size_bytes_ - piece * piece_bytes);
}

// True: the piece is populated and not registered yet, and the calling thread shall do it.
bool Arena::claim_complete_piece(uint64_t piece) {
    std::lock_guard lock(mutex_);
    if (!register_with_ || pieces_[piece] != PieceState::unregistered)
        return false;
    constexpr uint64_t blocks = piece_bytes / block_bytes;
    const uint64_t last = std::min<uint64_t>(populated_.size(), (piece + 1) * blocks);
    for (uint64_t block = piece * blocks; block < last; block++)
        if (!populated_[block])
            return false;
    pieces_[piece] = PieceState::being_registered;
    return true;
}

// Without the mutex while the driver works, so that other threads go on populating.
void Arena::register_complete_piece(uint64_t piece) {
    if (!claim_complete_piece(piece))
        return;
    CUresult result;
    {
        Current current(*register_with_); // set for good while anybody uses the arena
        result = WF_TRY_CUDA(cuMemHostRegister, static_cast<void *>(data_ + piece * piece_bytes),
                             size_t{piece_size(piece)}, unsigned{CU_MEMHOSTREGISTER_PORTABLE});
    }
    std::lock_guard lock(mutex_);
    pieces_[piece] = result == CUDA_SUCCESS ? PieceState::registered : PieceState::unregistered;
    check(result, "cuMemHostRegister");
}

void Arena::register_pieces(int ordinal) {
    Use here = use();
    {
        std::lock_guard lock(mutex_);
        if (!register_with_)
            register_with_ = Context::of(ordinal);
    }
    for (uint64_t piece = 0; piece < pieces_.size(); piece++)
        register_complete_piece(piece);
}

void Arena::unregister_all() {
    if (!register_with_)
        return;
    Current current(*register_with_);
    for (uint64_t piece = 0; piece < pieces_.size(); piece++) {
        if (pieces_[piece] != PieceState::registered)
            continue;
        WF_CUDA(cuMemHostUnregister, static_cast<void *>(data_ + piece * piece_bytes));
        pieces_[piece] = PieceState::unregistered;
    }
    register_with_.reset();
}

void Arena::unregister_pieces() {
    ExclusiveUse alone(in_use_); // a copy under way must not lose its pinned memory
    std::lock_guard lock(mutex_);
    unregister_all();
}

uint64_t Arena::populated_bytes() const {
    struct stat status{};
    if (fd_ < 0 || fstat(fd_, &status) != 0)
        return 0;
    return std::min(size_bytes_, static_cast<uint64_t>(status.st_blocks) * 512); // stat(2): blocks of 512 bytes
}

uint64_t Arena::registered_bytes() const {
    std::lock_guard lock(mutex_);
    uint64_t sum = 0;
    for (uint64_t piece = 0; piece < pieces_.size(); piece++)
        if (pieces_[piece] == PieceState::registered)
            sum += piece_size(piece);
    return sum;
}

void Arena::close() {
    if (!in_use_.close())
        return;
    std::lock_guard lock(mutex_);
    unregister_all();
    close_quietly();
}

void Arena::close_quietly() noexcept {
    try {
        unregister_all();
    } catch (const TransferError &) {
        // The driver goes away with the process; the memory below is given back in any case.
    }
    if (data_)
        munmap(data_, size_bytes_);
    if (fd_ >= 0)
        ::close(fd_);
    data_ = nullptr;
    fd_ = -1;
}

} // namespace woodfrog::transfer
