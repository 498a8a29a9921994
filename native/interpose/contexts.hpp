// The CUDA contexts of the process, as far as memory and waiting are concerned.
//
// Contexts become known when they are created, retained, or first seen current at an allocation. A Context lives as
// long as the process; one that the driver has destroyed moves to memory().gone_contexts. Fields are guarded by
// memory().mutex.
#pragma once

#include "devices.hpp"
#include "driver.hpp"

#include <vector>

namespace woodfrog::interpose {

struct Context {
    CUcontext handle = nullptr;
    CUdevice device = 0;
    const DeviceFacts *facts = nullptr;
    bool primary = false;
    bool green = false;             // a part of a device's SMs; its memory is the primary context's: not ours to own
    uint32_t retains = 0;           // of a primary context, by cuDevicePrimaryCtxRetain
    std::vector<Context *> readers; // contexts that enabled peer access to this one's memory
    std::vector<CUstream> free_streams; // created with CU_STREAM_NON_BLOCKING: the legacy stream does not wait for them
    std::vector<CUstream> blocking_streams; // the other ones
};

// The calling thread's current context, or null when there is none (or the driver cannot say).
Context *current_context();
// Every context that the driver still has. Takes memory().mutex.
std::vector<Context *> live_contexts();

// Makes a context current on this thread for as long as it lives, when it is not current already.
class CurrentScope {
  public:
    explicit CurrentScope(CUcontext context);
    ~CurrentScope();
    CurrentScope(const CurrentScope &) = delete;
    CurrentScope &operator=(const CurrentScope &) = delete;
    CUresult result() const { return result_; }

  private:
    CUresult result_ = CUDA_SUCCESS;
    bool pushed_ = false;
};

// Waits for all work of the context. CUDA_ERROR_STREAM_CAPTURE_* when a capture is active in it.
CUresult synchronize_context(CUcontext context);

// Devices, other than its own, whose contexts may access its memory. With memory().mutex held.
std::vector<CUdevice> reader_devices(const Context &context);

} // namespace woodfrog::interpose
