// Zeroing of GPU memory where it is, on a stream of our own. Belongs to one thread, for the length of one operation. It
// must never leave a fill under way: its destructor waits.
#pragma once
#include "transfer/context.hpp"

namespace woodfrog::packs {

class Fills {
  public:
    // `context` must outlive this.
    explicit Fills(const transfer::Context &context) : context_(context) {
        transfer::Current current(context_);
        // Non-blocking: nothing of ours may wait for, or be waited for by, the default stream.
        WF_CUDA(cuStreamCreate, &stream_, unsigned{CU_STREAM_NON_BLOCKING});
    }
    Fills(const Fills &) = delete;
    Fills &operator=(const Fills &) = delete;
    ~Fills() {
        const transfer::Driver &cuda = transfer::driver(); // loaded long ago: this object exists
        cuda.cuStreamSynchronize(stream_);                 // on failure the context is dead, and with it every fill
        cuda.cuStreamDestroy(stream_);
    }

    void zero(CUdeviceptr to, uint64_t size) {
        transfer::Current current(context_);
        WF_CUDA(cuMemsetD8Async, to, static_cast<unsigned char>(0), size_t{size}, stream_);
    }

    // Returns when everything has been set.
    void finish() { WF_CUDA(cuStreamSynchronize, stream_); }

  private:
    const transfer::Context &context_;
    CUstream stream_ = nullptr;
};

} // namespace woodfrog::packs
