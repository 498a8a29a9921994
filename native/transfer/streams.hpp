// Copies between the arena and one GPU, in order of submission on two streams of our own, a batch at a time, with a
// bounded number of batches in flight. Belongs to one thread, for the length of one operation. It must never return
// memory to anybody while a copy into or out of it is under way: its destructor waits.
#pragma once
#include "arena.hpp"
#include "context.hpp"

#include <cstdint>
#include <deque>
#include <vector>

namespace woodfrog::transfer {

enum class Direction { to_arena, to_device };

class Streams {
  public:
    // Batches in flight: enough that the bus never waits for this thread to be woken, few enough that cancelling is
    // prompt (8 batches of 64 MiB are 10 ms at 55 GB/s).
    static constexpr size_t most_batches = 8;

    // `context` must outlive this. It is current only inside the calls, so a thread may have Streams of several GPUs.
    Streams(const Context &context, Direction direction);
    Streams(const Streams &) = delete;
    Streams &operator=(const Streams &) = delete;
    ~Streams(); // waits for everything submitted

    // Submits a copy to the batch that is being filled. [arena_offset, +size) has been checked.
    void submit(const Arena &arena, uint64_t arena_offset, CUdeviceptr device, uint64_t size);

    // What is submitted to this batch from now on waits for `event`, which has been recorded.
    void wait_for(CUevent event);

    // Ends the batch; `tag` comes back from finish_oldest().
    void end_batch(uint64_t tag);

    size_t batches() const { return batches_.size(); }

    // Waits for the oldest batch and returns its tag.
    uint64_t finish_oldest();

  private:
    struct Batch {
        CUevent event;
        uint64_t tag;
    };

    const Context &context_;
    Direction direction_;
    CUstream streams_[2] = {};
    unsigned next_stream_ = 0;
    std::deque<Batch> batches_;
    std::vector<CUevent> free_events_;
};

} // namespace woodfrog::transfer
