// The primary context of a GPU, retained while anything of ours uses it, and made current for as long as a scope lasts.
// A context is never left current on a thread: the daemon's threads serve several GPUs.
#pragma once
#include "driver.hpp"

#include <memory>

namespace woodfrog::transfer {

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

  private:
    int ordinal_;
    CUdevice device_ = 0;
    CUcontext context_ = nullptr;
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
