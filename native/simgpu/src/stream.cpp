// See stream.hpp.
#include "stream.hpp"

#include <pthread.h>
#include <signal.h>
#include <thread>

#include "context.hpp"
#include "process.hpp"
#include "work.hpp"

namespace simgpu {
namespace {

std::atomic<std::uint64_t> next_stream_id{1};

} // namespace

bool Ticket::done() const {
    return !stream || stream->completed_.load() >= number;
}

bool Ticket::wait(Deadline deadline) const {
    if (done())
        return true;
    std::unique_lock lock(stream->mutex_);
    auto reached = [this] { return stream->completed_.load() >= number; };
    if (deadline)
        return stream->completed_cv_.wait_until(lock, *deadline, reached);
    while (!reached()) {
        if (stream->can_run()) {
            stream->run_next(lock);
        } else {
            stream->completed_cv_.wait(lock);
        }
    }
    return true;
}

Stream::Stream(std::shared_ptr<Context> context, Kind kind, unsigned flags, int priority)
    : context_(context), kind_(kind), flags_(flags), priority_(priority), id_(next_stream_id.fetch_add(1)) {}

CUstream Stream::handle() {
    if (kind_ == Kind::kLegacyDefault)
        return CU_STREAM_LEGACY;
    if (kind_ == Kind::kPerThreadDefault)
        return CU_STREAM_PER_THREAD;
    return reinterpret_cast<CUstream>(this);
}

Ticket Stream::enqueue(std::shared_ptr<Work> work, std::vector<Ticket> dependencies) {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), std::move(dependencies)});
    if (!has_worker_)
        start_worker();
    submitted_cv_.notify_one();
    return {shared_from_this(), ++submitted_};
}

Ticket Stream::last() {
    std::lock_guard lock(mutex_);
    if (completed_.load() == submitted_)
        return {};
    return {shared_from_this(), submitted_};
}

bool Stream::idle() {
    std::lock_guard lock(mutex_);
    return completed_.load() == submitted_;
}

void Stream::retire() {
    std::lock_guard lock(mutex_);
    retired_ = true;
    submitted_cv_.notify_one();
}

void Stream::start_worker() {
    // The application's signal handlers must not run on our thread.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    std::thread([self = shared_from_this()] {
        pthread_setname_np(pthread_self(), "simgpu-stream");
        mark_internal_thread();
        self->work_loop();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    has_worker_ = true;
}

void Stream::run_next(std::unique_lock<std::mutex> &lock) {
    Item item = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    for (const Ticket &dependency : item.dependencies)
        dependency.wait();
    if (auto context = context_.lock())
        run_guarded(*item.work, *context);
    // Released before the work counts as done: its end may be what somebody waits for to free memory.
    item = {};
    lock.lock();
    running_ = false;
    completed_.fetch_add(1);
    completed_cv_.notify_all();
    if (!queue_.empty() || retired_)
        submitted_cv_.notify_one();
}

void Stream::work_loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        submitted_cv_.wait(lock, [this] { return can_run() || (queue_.empty() && retired_); });
        if (queue_.empty())
            return;
        run_next(lock);
    }
}

} // namespace simgpu
