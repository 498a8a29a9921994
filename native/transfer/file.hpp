// Positioned reads and writes of a file that the caller opened, past the page cache where file and alignment allow it.
// The descriptor stays the caller's. It must never move the file's position, shorten it, or sync it: that is the
// store's business.
#pragma once
#include <cstddef>
#include <cstdint>

namespace woodfrog::transfer {

class File {
  public:
    // …_cached: through the page cache, for files that are probably in it or will be read next, and without a
    // descriptor of our own.
    enum class Use { read, write, read_cached, write_cached };

    // Opens the same file once more with O_DIRECT (through /proc, so a deleted or unnamed file works as well) if its
    // file system can do that. TransferError(-EBADF) if `fd` is not open for `use`.
    File(int fd, Use use);
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File();

    // Takes the room for [offset, +size) before anything is written, so that a full disk shows at once and several
    // threads need not wait for each other to extend the file. File systems that cannot do that are left as they are.
    // TransferError (ENOSPC, EFBIG …).
    void reserve(uint64_t offset, uint64_t size);

    // All `size` bytes or TransferError (ENOSPC, EIO, EFBIG …). Threads may call these side by side.
    void write(const void *data, size_t size, uint64_t offset);
    // The same; a file that ends too early is an error (-ENODATA).
    void read(void *data, size_t size, uint64_t offset);

    // The descriptor for a request to be left in flight, past the page cache; -1 if the whole of it cannot go that way,
    // or if that would be no disk (in memory, nothing is gained by waiting for it).
    int queueable_descriptor(const void *data, size_t size, uint64_t offset) const {
        return in_memory_ ? -1 : direct_descriptor(data, size, offset);
    }

    // On a tmpfs.
    bool is_in_memory() const { return in_memory_; }

  private:
    int direct_descriptor(const void *data, size_t size, uint64_t offset) const;

    int fd_;             // borrowed
    int direct_fd_ = -1; // ours, with O_DIRECT
    int buffered_fd_;    // fd_, or ours without O_DIRECT if fd_ has it
    bool in_memory_ = false;
};

} // namespace woodfrog::transfer
