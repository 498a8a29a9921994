// See context.hpp.
#include "context.hpp"

#include "hash_buffers.hpp"
#include "kernels.hpp"

#include <map>

namespace woodfrog::transfer {

std::shared_ptr<Context> Context::of(int ordinal) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Context>> living;
    std::lock_guard lock(mutex);
    std::shared_ptr<Context> context = living[ordinal].lock();
    if (!context) {
        context = std::make_shared<Context>(ordinal);
        living[ordinal] = context;
    }
    return context;
}

Context::Context(int ordinal) : ordinal_(ordinal) {
    WF_CUDA(cuDeviceGet, &device_, ordinal);
    WF_CUDA(cuDevicePrimaryCtxRetain, &context_, device_);
}

const Kernels &Context::kernels() const {
    std::lock_guard lock(mutex_);
    if (!kernels_)
        kernels_ = std::make_unique<Kernels>(*this);
    return *kernels_;
}

Context::~Context() {
    kernels_.reset();
    // At the end of the process the driver may be gone already; there is nobody to tell then.
    WF_TRY_CUDA(cuDevicePrimaryCtxRelease, device_);
}

} // namespace woodfrog::transfer
