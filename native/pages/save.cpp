#include "save.hpp"

#include "transfer/parallel.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <memory>
#include <sys/uio.h>
#include <unistd.h>

namespace woodfrog::pages {

namespace {

using transfer::throw_errno;

constexpr uint64_t share_bytes = 4 << 20; // of a thread at a time: whole large pages of the file's
constexpr size_t bounce_bytes = 256 << 10;

// What process_vm_readv(2) refuses: memory that the process itself may not read (PROT_NONE with contents), which
// /proc/pid/mem shows all the same; and a page that the file has no room for, which only a write says.
void save_slowly(int memory_fd, int fd, PageRange piece) {
    const auto buffer = std::make_unique<char[]>(bounce_bytes);
    while (piece.size > 0) {
        const size_t wanted = std::min<uint64_t>(piece.size, bounce_bytes);
        const ssize_t got = pread(memory_fd, buffer.get(), wanted, static_cast<off_t>(piece.address));
        if (got <= 0)
            throw_errno(got == 0 ? ESRCH : errno, "pread", "memory of a process");
        for (ssize_t done = 0; done < got;) {
            const ssize_t written = pwrite(fd, buffer.get() + done, static_cast<size_t>(got - done),
                                           static_cast<off_t>(piece.offset) + done);
            if (written <= 0)
                throw_errno(written == 0 ? ENOSPC : errno, "pwrite", "a file of pages");
            done += written;
        }
        piece.address += static_cast<uint64_t>(got);
        piece.offset += static_cast<uint64_t>(got);
        piece.size -= static_cast<uint64_t>(got);
    }
}

} // namespace

void save_pages(int pid, int fd, const std::vector<PageRange> &pieces, unsigned threads, transfer::Progress &progress) {
    const FileMapping file(fd, pieces, true);
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    const int memory_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (memory_fd < 0)
        throw_errno(errno == ENOENT ? ESRCH : errno, "open", path);
    const std::unique_ptr<const int, void (*)(const int *)> closed(&memory_fd, [](const int *one) { close(*one); });
    progress.begin(total_bytes(pieces));
    const std::vector<PageRange> shares = cut(pieces, share_bytes);
    transfer::for_each_index(threads, shares.size(), [&](size_t number) {
        progress.check();
        PageRange piece = shares[number];
        const iovec here = {file.at(piece.offset), piece.size};
        const iovec there = {reinterpret_cast<void *>(piece.address), piece.size};
        const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got < 0 && errno != EFAULT)
            throw_errno(errno, "process_vm_readv", path);
        const uint64_t done = got < 0 ? 0 : static_cast<uint64_t>(got);
        save_slowly(memory_fd, fd, {piece.address + done, piece.size - done, piece.offset + done});
        progress.add(piece.size);
    });
}

} // namespace woodfrog::pages
