// Threads that live no longer than one call: started, joined and gone before it returns, so that the daemon may fork
// whenever no transfer runs. It must never detach a thread or keep one for later.
#pragma once
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>

namespace woodfrog::transfer {

// `asked` if positive, else the processors this process may run on, but at least 4 (several reads or writes in flight
// keep a disk busy) and at most 16 (a drain is bound by the bus or the disk well before that).
unsigned thread_count(unsigned asked);

// The failure that several threads report in the end: the first one, but of IntegrityErrors that with the lowest chunk.
// The threads look at `happened` between two steps and stop.
class Failure {
  public:
    // To be called in a catch block.
    void capture();
    bool happened() const { return happened_; }
    void rethrow() {
        if (first_)
            std::rethrow_exception(first_);
    }

  private:
    std::mutex mutex_;
    std::exception_ptr first_;
    std::atomic<bool> happened_{false};
};

// Runs `work(i)` once for every i below `count`, taken in order, in up to `threads` threads (0: see thread_count).
// After a failure no further i is taken, but those taken before are finished: so the IntegrityError that comes out is
// that of the lowest chunk.
void for_each_index(unsigned threads, size_t count, const std::function<void(size_t)> &work);

// Runs `work(failure)` in `threads` threads, the calling one among them, and joins them. Each must draw its share from
// something shared, for there may be fewer of them if the system has no thread left to give. Rethrows the first
// exception.
void run_parallel(unsigned threads, const std::function<void(Failure &)> &work);

} // namespace woodfrog::transfer
