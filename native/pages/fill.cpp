#include "fill.hpp"

#include "transfer/parallel.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/userfaultfd.h>
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

// What became of a copy: `bytes` of its beginning are there now. Otherwise its first page was there already; or it
// reaches over the end of one mapping of the process, half of it may not; or the process's mappings are changing, and
// whoever changes them waits for the event to be read.
struct Copied {
    enum { copied, there_already, reaches_over, changing } what;
    uint64_t bytes = 0;
};

Copied copy_beginning(int uffd, const char *source, const PageRange &piece) {
    uffdio_copy copy{};
    copy.dst = piece.address;
    copy.src = reinterpret_cast<uint64_t>(source);
    copy.len = piece.size;
    if (ioctl(uffd, UFFDIO_COPY, &copy) == 0)
        return {Copied::copied, piece.size};
    const int error = errno;
    if (copy.copy > 0)
        return {Copied::copied, static_cast<uint64_t>(copy.copy)};
    if (error == EEXIST)
        return {Copied::there_already};
    if (error == ENOENT && piece.size > page_bytes)
        return {Copied::reaches_over};
    if (error == EAGAIN)
        return {Copied::changing};
    throw_errno(error, "UFFDIO_COPY", "a page of a process that is being restored");
}

void wake(int uffd, uint64_t address) {
    uffdio_range range{address, page_bytes};
    if (ioctl(uffd, UFFDIO_WAKE, &range) != 0)
        throw_errno(errno, "UFFDIO_WAKE", "");
}

void fill_piece(int uffd, const FileMapping &file, PageRange piece, transfer::Progress &progress) {
    uint64_t size = piece.size; // to try
    while (piece.size > 0) {
        const Copied copied = copy_beginning(uffd, file.at(piece.offset), {piece.address, size, piece.offset});
        if (copied.what == Copied::reaches_over) {
            size = (size / page_bytes + 1) / 2 * page_bytes;
            continue;
        }
        if (copied.what == Copied::changing) {
            progress.check();
            sched_yield();
            continue;
        }
        const uint64_t passed = copied.what == Copied::copied ? copied.bytes : page_bytes;
        piece.address += passed;
        piece.offset += passed;
        piece.size -= passed;
        size = piece.size;
    }
}

// False: not now, as above.
bool zero(int uffd, uint64_t address) {
    uffdio_zeropage request{};
    request.range = {address, page_bytes};
    if (ioctl(uffd, UFFDIO_ZEROPAGE, &request) == 0)
        return true;
    if (errno == EAGAIN)
        return false;
    if (errno != EEXIST)
        throw_errno(errno, "UFFDIO_ZEROPAGE", "");
    wake(uffd, address);
    return true;
}

bool answer(int uffd, const FileMapping &file, const std::vector<PageRange> &pieces, uint64_t address) {
    const auto behind = std::upper_bound(pieces.begin(), pieces.end(), address,
                                         [](uint64_t one, const PageRange &piece) { return one < piece.address; });
    if (behind == pieces.begin() || address >= std::prev(behind)->address + std::prev(behind)->size)
        return zero(uffd, address);
    const PageRange &piece = *std::prev(behind);
    const PageRange page = {address, page_bytes, piece.offset + (address - piece.address)};
    const Copied copied = copy_beginning(uffd, file.at(page.offset), page);
    if (copied.what == Copied::there_already)
        wake(uffd, address);
    return copied.what != Copied::changing;
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
        fill_piece(uffd, file, share, progress);
        progress.add(share.size);
    });
}

void answer_page_faults(int uffd, int fd, const std::vector<PageRange> &pieces, int stop_fd) {
    const FileMapping file(fd, pieces, false);
    std::array<pollfd, 2> watched = {{{uffd, POLLIN, 0}, {stop_fd, POLLIN, 0}}};
    std::vector<uint64_t> touched; // and not answered yet
    while (true) {
        // The event that some of them wait for may come to be read, or be over; of that nothing is told.
        if (poll(watched.data(), watched.size(), touched.empty() ? -1 : 1) < 0 && errno != EINTR)
            throw_errno(errno, "poll", "a userfaultfd");
        if (watched[1].revents != 0)
            return;
        if (watched[0].revents & (POLLERR | POLLHUP))
            throw_errno(ESRCH, "poll", "a userfaultfd");
        std::array<uffd_msg, 32> messages;
        const ssize_t got = watched[0].revents ? read(uffd, messages.data(), sizeof messages) : 0;
        if (got < 0 && errno != EAGAIN && errno != EINTR)
            throw_errno(errno, "read", "a userfaultfd");
        for (ssize_t number = 0; number < got / static_cast<ssize_t>(sizeof(uffd_msg)); ++number) {
            const uffd_msg &message = messages[static_cast<size_t>(number)];
            if (message.event == UFFD_EVENT_PAGEFAULT)
                touched.push_back(message.arg.pagefault.address & ~(page_bytes - 1));
            else if (message.event == UFFD_EVENT_FORK) // nothing of the tree runs yet that could
                close(static_cast<int>(message.arg.fork.ufd));
        }
        std::erase_if(touched, [&](uint64_t address) { return answer(uffd, file, pieces, address); });
    }
}

} // namespace woodfrog::pages
