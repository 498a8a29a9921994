// An io_uring of one thread, by the kernel's three system calls: positioned reads and writes, several in flight. Knows
// neither files nor errors of ours: file_queue.hpp does. It must never outlive what it was asked to read into.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

struct io_uring_sqe;
struct io_uring_cqe;

namespace woodfrog::transfer {

class Uring {
  public:
    // Up to `entries` requests in flight. TransferError (-ENOSYS: the kernel has none; -EPERM: forbidden by
    // kernel.io_uring_disabled or a seccomp filter; -ENOMEM, -EMFILE …). The descriptor is closed by exec, and the ring
    // is not mapped in forked children.
    explicit Uring(unsigned entries);
    Uring(const Uring &) = delete;
    Uring &operator=(const Uring &) = delete;
    ~Uring(); // nothing may be in flight

    struct Completion {
        uint64_t tag;
        int result; // as of pread and pwrite; a negated errno
    };

    // Begins one request; `tag` comes back with its completion. No more than `entries` may be in flight. False: the
    // kernel took nothing (it has no memory for a request, say); nothing is in flight for it.
    bool submit(bool write, int fd, void *data, uint32_t size, uint64_t offset, uint64_t tag);

    // Waits for one of those in flight.
    Completion wait();

  private:
    int fd_ = -1;
    void *rings_ = nullptr; // both queues: one mapping
    size_t rings_bytes_ = 0;
    io_uring_sqe *requests_ = nullptr;
    size_t requests_bytes_ = 0;
    unsigned *submit_tail_ = nullptr, *submit_head_ = nullptr, *slots_ = nullptr;
    unsigned *complete_head_ = nullptr, *complete_tail_ = nullptr;
    io_uring_cqe *completions_ = nullptr;
    unsigned submit_mask_ = 0, complete_mask_ = 0;
};

// Why this process cannot use io_uring, asked of the kernel once; nothing if it can.
const std::optional<std::string> &uring_trouble();

} // namespace woodfrog::transfer
