// Threads that each have something of their own (buffers, contexts of a codec) and take numbers from a common counter.
#pragma once
#include "transfer/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace woodfrog::packs {

// Each of up to `threads` (0: see thread_count) threads calls make() once, and then what it returned for every number
// below `count` that it takes; numbers are taken in order. After a failure no further one is taken; the failure that
// comes out is as of run_parallel. Work that leaves something in flight has a finish(), which is called when no number
// is left, or when another thread has failed: what was taken is finished, so that the lowest damaged chunk is told.
template <typename Make> void for_each_with(unsigned threads, size_t count, const Make &make) {
    std::atomic<size_t> next{0};
    const size_t useful = std::min<size_t>(transfer::thread_count(threads), std::max<size_t>(count, 1));
    transfer::run_parallel(static_cast<unsigned>(useful), [&](transfer::Failure &failure) {
        auto work = make();
        while (!failure.happened()) {
            const size_t number = next++;
            if (number >= count)
                break;
            work(number);
        }
        if constexpr (requires { work.finish(); })
            work.finish();
    });
}

// Objects for threads that somebody else started: taken for a moment, and given back. As many are made as are in use
// at once.
template <typename T> class Pool {
  public:
    template <typename Make, typename Use> void with(const Make &make, const Use &use) {
        std::unique_ptr<T> object;
        {
            std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                object = std::move(free_.back());
                free_.pop_back();
            }
        }
        if (!object)
            object = make();
        use(*object);
        std::lock_guard lock(mutex_);
        free_.push_back(std::move(object));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<T>> free_;
};

} // namespace woodfrog::packs
