// The primary context of a GPU, retained while anything of ours uses it, and made current for as long as a scope lasts.
// A context is never left current on a thread: the daemon's threads serve several GPUs.
#pragma once
#include "driver.hpp"

#include <memory>
#include <mutex>

namespace woodfrog::transfer {

class Kernels;

class Context {
  public:
    // The context of GPU `ordinal`; one for all that ask for it at the same time.
    static std::shared_ptr<Context> of(int ordinal);

    explicit Context(int ordinal); // use of()
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;
    ~Context();

    int ordinal() const { return ordinal_; }
    CUdevice device() const { return device_; }
    CUcontext handle() const { return context_; }

    // Made at the first call; nothing is loaded into the context before a kernel is needed.
    const Kernels &kernels() const;

  private:
    int ordinal_;
    CUdevice device_ = 0;
    CUcontext context_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::unique_ptr<Kernels> kernels_;
};

// Makes the context current on this thread; what was current before comes back at the end of the scope.
class Current {
  public:
    explicit Current(const Context &context) { WF_CUDA(cuCtxPushCurrent, context.handle()); }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    ~Current() {
        CUcontext popped;
        driver().cuCtxPopCurrent(&popped);
    }
};

} // namespace woodfrog::transfer
