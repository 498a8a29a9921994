// See file.hpp.
#include "file.hpp"

#include "error.hpp"

#include <cerrno>
#include <fcntl.h>
#include <linux/magic.h>
#include <string>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

namespace woodfrog::transfer {
namespace {

// What offset, length and address of direct I/O must be a multiple of. Some devices do with 512; a page always does.
constexpr uint64_t direct_alignment = 4096;

int reopen(int fd, int flags) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    return open(path.c_str(), flags | O_CLOEXEC | O_NOCTTY);
}

} // namespace

File::File(int fd, Use use) : fd_(fd), buffered_fd_(fd) {
    const bool writes = use == Use::write || use == Use::write_cached;
    const bool cached = use == Use::read_cached || use == Use::write_cached;
    const char *operation = writes ? "pwrite" : "pread";
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        throw_errno(errno, operation, "descriptor " + std::to_string(fd));
    const int access = flags & O_ACCMODE;
    if (access == (writes ? O_RDONLY : O_WRONLY))
        throw_errno(EBADF, operation, writes ? "the file is read-only" : "the file is open for writing only");
    if (flags & O_APPEND)
        throw_invalid(operation, "the file is open for appending, which ignores offsets");
    struct stat status{};
    if (fstat(fd, &status) != 0)
        throw_errno(errno, operation, "descriptor " + std::to_string(fd));
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
        throw_invalid(operation, "the descriptor is neither a file nor a block device");
    struct statfs filesystem{};
    in_memory_ = S_ISREG(status.st_mode) && fstatfs(fd, &filesystem) == 0 && filesystem.f_type == TMPFS_MAGIC;
    if (flags & O_DIRECT)
        buffered_fd_ = reopen(fd, access);
    else if (!cached)
        direct_fd_ = reopen(fd, access | O_DIRECT); // refused by file systems that cannot: buffered then
    if (buffered_fd_ < 0)
        throw_errno(errno, "open", "the file without O_DIRECT");
    if ((flags & O_DIRECT) && !cached)
        direct_fd_ = fd;
}

File::~File() {
    if (direct_fd_ >= 0 && direct_fd_ != fd_)
        close(direct_fd_);
    if (buffered_fd_ >= 0 && buffered_fd_ != fd_)
        close(buffered_fd_);
}

int File::direct_descriptor(const void *data, size_t size, uint64_t offset) const {
    const bool aligned = (reinterpret_cast<uintptr_t>(data) | size | offset) % direct_alignment == 0;
    return aligned ? direct_fd_ : -1;
}

void File::reserve(uint64_t offset, uint64_t size) {
    if (size == 0)
        return;
    // tmpfs has no cheaper way to reserve than to clear every page, on one thread: there a look at the room must do.
    struct statfs filesystem{};
    if (in_memory_ && fstatfs(fd_, &filesystem) == 0 &&
        (filesystem.f_blocks == 0 || static_cast<uint64_t>(filesystem.f_bavail) * filesystem.f_bsize >= size))
        return;
    while (fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(size)) != 0) {
        if (errno == EINTR)
            continue;
        if (errno == EOPNOTSUPP || errno == ENOSYS || errno == ENODEV) // ENODEV: a block device
            return;
        throw_errno(errno, "fallocate", std::to_string(size) + " bytes at offset " + std::to_string(offset));
    }
}

void File::write(const void *data, size_t size, uint64_t offset) {
    auto *at = static_cast<const uint8_t *>(data);
    bool direct_refused = false;
    while (size > 0) {
        // As much as can go past the cache does; an unaligned tail follows through it.
        const size_t whole = size / direct_alignment * direct_alignment;
        const int direct = whole > 0 && !direct_refused ? direct_descriptor(at, whole, offset) : -1;
        const ssize_t written =
            pwrite(direct >= 0 ? direct : buffered_fd_, at, direct >= 0 ? whole : size, static_cast<off_t>(offset));
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0 && errno == EINVAL && direct >= 0) {
            direct_refused = true; // this file system wants more alignment than a page
            continue;
        }
        if (written <= 0)
            throw_errno(written < 0 ? errno : EIO, "pwrite",
                        std::to_string(size) + " bytes at offset " + std::to_string(offset));
        at += written;
        offset += static_cast<uint64_t>(written);
        size -= static_cast<size_t>(written);
    }
}

void File::read(void *data, size_t size, uint64_t offset) {
    auto *at = static_cast<uint8_t *>(data);
    bool direct_refused = false;
    while (size > 0) {
        const size_t whole = size / direct_alignment * direct_alignment;
        const int direct = whole > 0 && !direct_refused ? direct_descriptor(at, whole, offset) : -1;
        const ssize_t got =
            pread(direct >= 0 ? direct : buffered_fd_, at, direct >= 0 ? whole : size, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EINVAL && direct >= 0) {
            direct_refused = true;
            continue;
        }
        if (got < 0)
            throw_errno(errno, "pread", std::to_string(size) + " bytes at offset " + std::to_string(offset));
        if (got == 0)
            throw_errno(ENODATA, "pread",
                        "the file ends at offset " + std::to_string(offset) + ", " + std::to_string(size) +
                            " bytes too early");
        at += got;
        offset += static_cast<uint64_t>(got);
        size -= static_cast<size_t>(got);
    }
}

} // namespace woodfrog::transfer
