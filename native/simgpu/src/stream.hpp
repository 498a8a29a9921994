// Streams: ordered queues of work, each with a worker thread of its own that starts with the first work. A thread that
// waits for work which nobody has begun does it itself, which spares two switches of threads.
//
// A Ticket names a piece of submitted work; work may depend on tickets of other streams, always on ones submitted
// before it, so that no cycle can arise. Nothing here may wait while a lock of the process is held.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "gate.hpp"

namespace simgpu {

struct Context;
class Stream;
class Work;
struct Capture;
struct GraphNode;

struct Ticket {
    std::shared_ptr<Stream> stream; // null: nothing to wait for
    std::uint64_t number = 0;

    bool done() const;
    // False at the deadline.
    bool wait(Deadline deadline = {}) const;
};

class Stream : public std::enable_shared_from_this<Stream> {
  public:
    enum class Kind { kLegacyDefault, kPerThreadDefault, kCreated };

    Stream(std::shared_ptr<Context> context, Kind kind, unsigned flags, int priority);

    // Appends work. The context's submit lock must be held (see submit.hpp).
    Ticket enqueue(std::shared_ptr<Work> work, std::vector<Ticket> dependencies);
    // The last work submitted.
    Ticket last();
    bool idle();
    // The worker thread ends once all work is done; nothing may be submitted any more.
    void retire();

    std::shared_ptr<Context> context() const { return context_.lock(); }
    Kind kind() const { return kind_; }
    unsigned flags() const { return flags_; }
    int priority() const { return priority_; }
    std::uint64_t id() const { return id_; }
    bool blocking() const { return kind_ != Kind::kLegacyDefault && (flags_ & CU_STREAM_NON_BLOCKING) == 0; }
    CUstream handle();

    // Owned by capture.cpp, under its lock: the capture that this stream takes part in, and the nodes that the next
    // captured one depends on.
    std::shared_ptr<Capture> capture;
    std::vector<GraphNode *> frontier;

  private:
    friend struct Ticket;
    struct Item {
        std::shared_ptr<Work> work;
        std::vector<Ticket> dependencies;
    };
    void start_worker();
    void work_loop();
    // Does the next work; `lock` is given up meanwhile. Only when there is some and nobody is at it.
    bool can_run() const { return !queue_.empty() && !running_; }
    void run_next(std::unique_lock<std::mutex> &lock);

    const std::weak_ptr<Context> context_;
    const Kind kind_;
    const unsigned flags_;
    const int priority_;
    const std::uint64_t id_;
    std::mutex mutex_;
    std::condition_variable submitted_cv_;
    std::condition_variable completed_cv_;
    std::deque<Item> queue_;
    std::uint64_t submitted_ = 0;
    std::atomic<std::uint64_t> completed_{0};
    bool running_ = false;
    bool has_worker_ = false;
    bool retired_ = false;
};

} // namespace simgpu
