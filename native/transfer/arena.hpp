// Host memory of the daemon that GPU memory is drained into: one memfd, mapped once, populated by several threads and
// registered with the driver, so that copies run at the speed of the bus. Its descriptor may live in the keeper: a new
// daemon adopts it with the contents. What lies where in it is the caller's business; it must never hand one user's
// bytes to another: clear() is how it is wiped between them.
#pragma once
#include "context.hpp"
#include "in_use.hpp"
#include "progress.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace woodfrog::transfer {

class Arena {
  public:
    // Largest piece registered by one call. Registering is ~30 GB/s on an H200, so a piece is some 30 ms; copies are
    // split at multiples of it, because one copy may not span two registrations.
    static constexpr uint64_t piece_bytes = 1ull << 30;
    // What one thread populates or clears in one go; cancellation is looked at between two of them.
    static constexpr uint64_t block_bytes = 64ull << 20;

    // size_bytes: a multiple of the page size. numa_node < 0: wherever the kernel likes; else that node is preferred
    // (not forced: a slower arena is better than a daemon killed for want of memory on one node). threads 0: as many as
    // there are processors, from 4 to 16. fd >= 0 adopts that memfd (duplicated; the caller's stays open) and its
    // contents; it must have exactly this size.
    Arena(uint64_t size_bytes, int numa_node, unsigned threads, int fd);
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
    ~Arena();

    // Makes the memory of [offset, offset+size) present, widened to blocks. Contents stay. If register_pieces was
    // called, every piece that is complete now is registered as it completes.
    void populate(uint64_t offset, uint64_t size, Progress &progress);

    // Overwrites [offset, offset+size) with zeros, past the caches. Memory that was never touched stays untouched.
    void clear(uint64_t offset, uint64_t size, Progress &progress);

    // Registers the pieces that are populated with GPU `ordinal`'s context, for all contexts of the process; later
    // populate() goes on with it.
    void register_pieces(int ordinal);
    // TransferError(-EBUSY) while a transfer uses the arena.
    void unregister_pieces();

    // Unregisters, unmaps and closes. TransferError(-EBUSY) while a transfer uses it; a second call does nothing.
    void close();

    Use use() { return Use(in_use_); }
    // Throws TransferError(-EINVAL, operation) unless [offset, offset+size) lies within.
    void check_range(const char *operation, uint64_t offset, uint64_t size) const;

    uint8_t *data() const { return data_; }
    uint64_t size_bytes() const { return size_bytes_; }
    int fd() const { return fd_; } // the arena's own, -1 once closed
    int numa_node() const { return numa_node_; }
    bool huge_pages() const { return huge_pages_; }
    uint64_t populated_bytes() const; // as the kernel counts it
    uint64_t registered_bytes() const;

  private:
    enum class PieceState : uint8_t { unregistered, being_registered, registered };

    void open_memfd(int fd);
    void map();
    void find_populated_blocks();
    void populate_block(uint64_t block);
    bool claim_complete_piece(uint64_t piece);
    void register_complete_piece(uint64_t piece);
    uint64_t piece_size(uint64_t piece) const;
    void unregister_all();
    void close_quietly() noexcept;

    uint64_t size_bytes_;
    int numa_node_;
    unsigned threads_;
    int fd_ = -1;
    uint8_t *data_ = nullptr;
    bool huge_pages_ = false;
    InUse in_use_{"arena"};

    mutable std::mutex mutex_;    // of what follows
    std::vector<bool> populated_; // by block
    std::vector<PieceState> pieces_;
    std::shared_ptr<Context> register_with_; // null: not registering
};

} // namespace woodfrog::transfer
