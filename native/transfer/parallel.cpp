// The short-lived threads of parallel.hpp.
#include "parallel.hpp"

#include "error.hpp"

#include <algorithm>
#include <sched.h>
#include <system_error>
#include <thread>
#include <vector>

namespace woodfrog::transfer {
namespace {

constexpr unsigned fewest_threads = 4;
constexpr unsigned most_threads = 16;

} // namespace

unsigned thread_count(unsigned asked) {
    if (asked > 0)
        return std::min(asked, 256u);
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) // more processors than the set has room for
        return most_threads;
    return std::clamp<unsigned>(static_cast<unsigned>(CPU_COUNT(&set)), fewest_threads, most_threads);
}

void Failure::capture() {
    std::exception_ptr current = std::current_exception();
    std::lock_guard lock(mutex_);
    happened_ = true;
    if (!first_) {
        first_ = current;
        return;
    }
    try {
        std::rethrow_exception(first_);
    } catch (const IntegrityError &before) {
        try {
            std::rethrow_exception(current);
        } catch (const IntegrityError &now) {
            if (now.chunk < before.chunk)
                first_ = current;
        } catch (...) { // the first one counts
        }
    } catch (...) { // the first one counts
    }
}

void for_each_index(unsigned threads, size_t count, const std::function<void(size_t)> &work) {
    std::atomic<size_t> next{0};
    const auto useful = static_cast<unsigned>(std::min<size_t>(thread_count(threads), count));
    run_parallel(std::max(useful, 1u), [&](Failure &failure) {
        while (!failure.happened()) {
            const size_t i = next++;
            if (i >= count)
                return;
            work(i);
        }
    });
}

void run_parallel(unsigned threads, const std::function<void(Failure &)> &work) {
    Failure failure;
    auto guarded = [&] {
        try {
            work(failure);
        } catch (...) {
            failure.capture();
        }
    };
    {
        std::vector<std::jthread> others; // joined where the scope ends, whatever happens
        others.reserve(threads);
        try {
            while (others.size() + 1 < threads)
                others.emplace_back(guarded);
        } catch (const std::system_error &) {
            // No more threads: those that run, and this one, do all the work.
        }
        guarded();
    }
    failure.rethrow();
}

} // namespace woodfrog::transfer
