// See populate.hpp.
#include "populate.hpp"

#include <algorithm>
#include <cerrno>
#include <sys/mman.h>
#include <sys/uio.h>

#include "report.hpp"

namespace woodfrog::enter {
namespace {

// Of one call, a huge page: what the process maps and unmaps meanwhile waits for the calls that are under way. The
// kernel makes at most 4 MiB present before it copies (PVM_MAX_USER_PAGES in mm/process_vm_access.c); the rest of a
// larger request is not come to.
constexpr std::size_t call_bytes = std::size_t{2} << 20;
// Of one turn of a thread: small enough that the threads stay close to the front, where the process is.
constexpr std::size_t turn_bytes = std::size_t{32} << 20;

// Memory that nobody can read.
void *nothing() {
    static void *const memory =
        mmap(nullptr, call_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory;
}

} // namespace

Populator::Populator(pid_t pid, std::uintptr_t address, std::size_t size, unsigned threads, std::function<void()> done)
    : pid_(pid), address_(address), size_(size), begun_s_(now_s()), done_(std::move(done)) {
    if (nothing() == MAP_FAILED)
        next_.store(size_); // there is nothing to ask with
    running_.store(threads);
    for (unsigned i = 0; i < threads; i++)
        threads_.emplace_back([this] { work(); });
}

Populator::~Populator() {
    stop();
    for (std::thread &thread : threads_)
        thread.join();
}

void Populator::work() {
    while (!stopping_.load(std::memory_order_relaxed)) {
        const std::size_t turn = next_.fetch_add(turn_bytes);
        if (turn >= size_)
            break;
        const std::size_t turn_end = std::min(turn + turn_bytes, size_);
        for (std::size_t at = turn; at < turn_end && !stopping_.load(std::memory_order_relaxed);) {
            // Up to a border of what one call can do, so that no huge page is asked for twice.
            const std::uintptr_t begin = address_ + at;
            const std::size_t here = std::min(call_bytes - begin % call_bytes, turn_end - at);
            const iovec local{nothing(), here};
            const iovec remote{reinterpret_cast<void *>(begin), here};
            if (process_vm_writev(pid_, &local, 1, &remote, 1, 0) < 0 && errno != EFAULT)
                stop(); // the process is gone, or does not admit us any more
            at += here;
        }
    }
    if (running_.fetch_sub(1) == 1) {
        ended_s_.store(now_s());
        done_();
    }
}

} // namespace woodfrog::enter
