// See streams.hpp.
#include "streams.hpp"

#include <algorithm>

namespace woodfrog::transfer {

Streams::Streams(const Context &context, Direction direction) : context_(context), direction_(direction) {
    Current current(context_);
    // Non-blocking: nothing of ours may wait for, or be waited for by, the default stream.
    WF_CUDA(cuStreamCreate, &streams_[0], unsigned{CU_STREAM_NON_BLOCKING});
    const CUresult second = WF_TRY_CUDA(cuStreamCreate, &streams_[1], unsigned{CU_STREAM_NON_BLOCKING});
    if (second != CUDA_SUCCESS) {
        WF_TRY_CUDA(cuStreamDestroy, streams_[0]);
        check(second, "cuStreamCreate");
    }
}

Streams::~Streams() {
    const Driver &cuda = driver(); // loaded long ago: this object exists
    for (CUstream stream : streams_)
        cuda.cuStreamSynchronize(stream); // on failure the context is dead, and with it every copy
    for (const Batch &batch : batches_)
        cuda.cuEventDestroy(batch.event);
    for (CUevent event : free_events_)
        cuda.cuEventDestroy(event);
    for (CUstream stream : streams_)
        cuda.cuStreamDestroy(stream);
}

void Streams::submit(const Arena &arena, uint64_t arena_offset, CUdeviceptr device, uint64_t size) {
    Current current(context_);
    CUstream stream = streams_[next_stream_];
    while (size > 0) { // one copy may not span two registrations of host memory
        const uint64_t here = std::min(size, Arena::piece_bytes - arena_offset % Arena::piece_bytes);
        void *host = arena.data() + arena_offset;
        if (direction_ == Direction::to_arena)
            WF_CUDA(cuMemcpyDtoHAsync, host, device, size_t{here}, stream);
        else
            WF_CUDA(cuMemcpyHtoDAsync, device, static_cast<const void *>(host), size_t{here}, stream);
        arena_offset += here;
        device += here;
        size -= here;
    }
}

void Streams::wait_for(CUevent event) {
    Current current(context_);
    WF_CUDA(cuStreamWaitEvent, streams_[next_stream_], event, 0u);
}

void Streams::end_batch(uint64_t tag) {
    Current current(context_);
    CUevent event;
    if (free_events_.empty()) {
        WF_CUDA(cuEventCreate, &event, unsigned{CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC});
    } else {
        event = free_events_.back();
        free_events_.pop_back();
    }
    batches_.push_back({event, tag}); // before it is recorded, so that it is destroyed if that fails
    WF_CUDA(cuEventRecord, event, streams_[next_stream_]);
    next_stream_ ^= 1;
}

uint64_t Streams::finish_oldest() {
    const Batch batch = batches_.front();
    WF_CUDA(cuEventSynchronize, batch.event);
    batches_.pop_front();
    free_events_.push_back(batch.event);
    return batch.tag;
}

} // namespace woodfrog::transfer
