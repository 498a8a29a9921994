// See uring.hpp. One thread submits and waits, so of each queue one side is the kernel's and the other ours: acquire
// and release on the index that the kernel writes, or reads, is all the order there is to keep.
#include "uring.hpp"

#include "error.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::transfer {
namespace {

unsigned load(unsigned *index) {
    return std::atomic_ref(*index).load(std::memory_order_acquire);
}

void store(unsigned *index, unsigned value) {
    std::atomic_ref(*index).store(value, std::memory_order_release);
}

template <typename T> T *at(void *base, uint32_t offset) {
    return reinterpret_cast<T *>(static_cast<uint8_t *>(base) + offset);
}

// MAP_FAILED becomes null.
void *map(int fd, size_t size, uint64_t offset) {
    void *memory =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (memory == MAP_FAILED)
        return nullptr;
    madvise(memory, size, MADV_DONTFORK);
    return memory;
}

std::string reason_of(const TransferError &error) {
    if (error.code == -ENOSYS)
        return "this kernel has no io_uring, or a seccomp filter hides it";
    if (error.code == -EPERM || error.code == -EACCES)
        return "io_uring is forbidden here (kernel.io_uring_disabled, or a seccomp filter as of Docker)";
    return error.what();
}

} // namespace

Uring::Uring(unsigned entries) {
    io_uring_params parameters{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &parameters)); // closes on exec by itself
    if (fd_ < 0)
        throw_errno(errno, "io_uring_setup", std::to_string(entries) + " entries");
    const auto &submit = parameters.sq_off;
    const auto &complete = parameters.cq_off;
    int error = 0;
    if (!(parameters.features & IORING_FEAT_SINGLE_MMAP)) {
        error = ENOSYS; // before 5.4; reads and writes came with 5.6
    } else {
        rings_bytes_ = std::max<size_t>(submit.array + parameters.sq_entries * sizeof(unsigned),
                                        complete.cqes + parameters.cq_entries * sizeof(io_uring_cqe));
        requests_bytes_ = parameters.sq_entries * sizeof(io_uring_sqe);
        rings_ = map(fd_, rings_bytes_, IORING_OFF_SQ_RING);
        error = errno;
        if (rings_) {
            requests_ = static_cast<io_uring_sqe *>(map(fd_, requests_bytes_, IORING_OFF_SQES));
            error = errno;
        }
    }
    if (!rings_ || !requests_) {
        if (rings_)
            munmap(rings_, rings_bytes_);
        close(fd_);
        throw_errno(error, "mmap", "an io_uring's queues");
    }
    submit_head_ = at<unsigned>(rings_, submit.head);
    submit_tail_ = at<unsigned>(rings_, submit.tail);
    submit_mask_ = *at<unsigned>(rings_, submit.ring_mask);
    slots_ = at<unsigned>(rings_, submit.array);
    complete_head_ = at<unsigned>(rings_, complete.head);
    complete_tail_ = at<unsigned>(rings_, complete.tail);
    complete_mask_ = *at<unsigned>(rings_, complete.ring_mask);
    completions_ = at<io_uring_cqe>(rings_, complete.cqes);
}

Uring::~Uring() {
    munmap(requests_, requests_bytes_);
    munmap(rings_, rings_bytes_);
    close(fd_);
}

bool Uring::submit(bool write, int fd, void *data, uint32_t size, uint64_t offset, uint64_t tag) {
    const unsigned tail = *submit_tail_; // only this thread moves it
    const unsigned slot = tail & submit_mask_;
    io_uring_sqe &request = requests_[slot];
    std::memset(&request, 0, sizeof(request));
    request.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    request.fd = fd;
    request.off = offset;
    request.addr = reinterpret_cast<uint64_t>(data);
    request.len = size;
    request.user_data = tag;
    slots_[slot] = slot;
    store(submit_tail_, tail + 1);
    for (;;) {
        const long taken = syscall(SYS_io_uring_enter, fd_, 1, 0, 0, nullptr, 0);
        if (load(submit_head_) == tail + 1) // whatever was returned: its completion tells what became of it
            return true;
        if (taken < 0 && errno == EINTR)
            continue;
        store(submit_tail_, tail); // the kernel looks at it in io_uring_enter only
        return false;
    }
}

Uring::Completion Uring::wait() {
    for (;;) {
        const unsigned head = *complete_head_;
        if (head != load(complete_tail_)) {
            const io_uring_cqe &done = completions_[head & complete_mask_];
            const Completion completion{done.user_data, done.res};
            store(complete_head_, head + 1);
            return completion;
        }
        if (syscall(SYS_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0 || errno == EINTR ||
            errno == EAGAIN || errno == EBUSY)
            continue;
        // The kernel may still read from or write to memory that would be used for something else.
        std::fprintf(stderr, "woodfrog: io_uring_enter: %s while requests are in flight\n", std::strerror(errno));
        std::abort();
    }
}

const std::optional<std::string> &uring_trouble() {
    static const std::optional<std::string> trouble = []() -> std::optional<std::string> {
        try {
            Uring probe(1);
            return std::nullopt;
        } catch (const TransferError &error) {
            return reason_of(error);
        }
    }();
    return trouble;
}

} // namespace woodfrog::transfer
