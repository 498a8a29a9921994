#include "fill.hpp"

#include "transfer/parallel.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <optional>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ // Linux 5.14; glibc 2.35
#define MADV_POPULATE_READ 22
#endif

namespace woodfrog::pages {

namespace {

using transfer::throw_errno;

constexpr uint64_t share_bytes = 1 << 20; // of a thread at a time

const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));

// Copies the beginning of a piece, and returns the bytes that are there now: 0 if its first page was there already.
// Nothing for a piece that reaches over the end of one mapping of the process: half of it may not.
std::optional<uint64_t> copy_beginning(int uffd, const char *source, const PageRange &piece) {
    while (true) {
        uffdio_copy copy{};
        copy.dst = piece.address;
        copy.src = reinterpret_cast<uint64_t>(source);
        copy.len = piece.size;
        if (ioctl(uffd, UFFDIO_COPY, &copy) == 0)
            return piece.size;
        const int error = errno;
        if (copy.copy > 0)
            return static_cast<uint64_t>(copy.copy);
        if (error == EEXIST)
            return 0;
        if (error == ENOENT && piece.size > page_bytes)
            return std::nullopt;
        if (error != EAGAIN) // its mappings are changing, and whoever changes them waits for the event to be read
            throw_errno(error, "UFFDIO_COPY", "a page of a process that is being restored");
        sched_yield();
    }
}

void wake(int uffd, uint64_t address) {
    uffdio_range range{address, page_bytes};
    if (ioctl(uffd, UFFDIO_WAKE, &range) != 0)
        throw_errno(errno, "UFFDIO_WAKE", "");
}

void fill_piece(int uffd, const FileMapping &file, PageRange piece) {
    while (piece.size > 0) {
        PageRange part = piece;
        std::optional<uint64_t> done;
        while (!(done = copy_beginning(uffd, file.at(part.offset), part)))
            part.size = (part.size / page_bytes + 1) / 2 * page_bytes;
        const uint64_t passed = *done > 0 ? *done : page_bytes;
        piece.address += passed;
        piece.offset += passed;
        piece.size -= passed;
    }
}

void zero(int uffd, uint64_t address) {
    uffdio_zeropage request{};
    request.range = {address, page_bytes};
    while (ioctl(uffd, UFFDIO_ZEROPAGE, &request) != 0) {
        if (errno == EEXIST)
            return wake(uffd, address);
        if (errno != EAGAIN)
            throw_errno(errno, "UFFDIO_ZEROPAGE", "");
        sched_yield();
    }
}

void answer(int uffd, const FileMapping &file, const std::vector<PageRange> &pieces, uint64_t address) {
    address &= ~(page_bytes - 1);
    const auto behind = std::upper_bound(pieces.begin(), pieces.end(), address,
                                         [](uint64_t one, const PageRange &piece) { return one < piece.address; });
    if (behind == pieces.begin() || address >= std::prev(behind)->address + std::prev(behind)->size)
        return zero(uffd, address);
    const PageRange &piece = *std::prev(behind);
    const PageRange page = {address, page_bytes, piece.offset + (address - piece.address)};
    if (copy_beginning(uffd, file.at(page.offset), page) == 0)
        wake(uffd, address);
}

} // namespace

std::string userfaultfd_trouble() {
    const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC));
    if (fd < 0)
        return strerror(errno);
    // What CRIU asks for (criu/uffd.c).
    uffdio_api api{};
    api.api = UFFD_API;
    api.features =
        UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMOVE;
    std::string trouble;
    if (ioctl(fd, UFFDIO_API, &api) != 0)
        trouble = strerror(errno);
    close(fd);
    return trouble;
}

void fill_pages(int uffd, int fd, const std::vector<PageRange> &pieces, unsigned threads,
                transfer::Progress &progress) {
    const FileMapping file(fd, pieces, false);
    progress.begin(total_bytes(pieces));
    const std::vector<PageRange> shares = cut(pieces, share_bytes);
    transfer::for_each_index(threads, shares.size(), [&](size_t number) {
        progress.check();
        const PageRange &share = shares[number];
        // Without it the kernel lets go of the process's memory for each page of the file that is not mapped here yet.
        // An older kernel does not know it, and copies all the same. Here it is said why a page cannot be had; the copy
        // below would say EFAULT whatever it is.
        if (madvise(file.at(share.offset), share.size, MADV_POPULATE_READ) != 0 && errno != EINVAL)
            throw_errno(errno == EFAULT ? EIO : errno, "madvise", "a file of pages");
        fill_piece(uffd, file, share);
        progress.add(share.size);
    });
}

void answer_page_faults(int uffd, int fd, const std::vector<PageRange> &pieces, int stop_fd) {
    const FileMapping file(fd, pieces, false);
    std::array<pollfd, 2> watched = {{{uffd, POLLIN, 0}, {stop_fd, POLLIN, 0}}};
    while (true) {
        if (poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR)
            throw_errno(errno, "poll", "a userfaultfd");
        if (watched[1].revents != 0)
            return;
        if (watched[0].revents & (POLLERR | POLLHUP))
            throw_errno(ESRCH, "poll", "a userfaultfd");
        std::array<uffd_msg, 32> messages;
        const ssize_t got = read(uffd, messages.data(), sizeof messages);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (got < 0)
            throw_errno(errno, "read", "a userfaultfd");
        for (size_t number = 0; number < static_cast<size_t>(got) / sizeof(uffd_msg); ++number) {
            const uffd_msg &message = messages[number];
            if (message.event == UFFD_EVENT_PAGEFAULT)
                answer(uffd, file, pieces, message.arg.pagefault.address);
            else if (message.event == UFFD_EVENT_FORK) // nothing of the tree runs yet that could
                close(static_cast<int>(message.arg.fork.ufd));
        }
    }
}

} // namespace woodfrog::pages
