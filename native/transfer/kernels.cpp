// See kernels.hpp.
#include "kernels.hpp"

#include "context.hpp"
#include "hash_buffers.hpp"

#include <cerrno>
#include <cstring>

namespace woodfrog::transfer {
namespace {

// native/simgpu/src/device.cpp gives its devices UUIDs that begin so.
constexpr char simulated_uuid[] = "frogsimgpu";

int attribute(const Context &context, CUdevice_attribute attribute) {
    int value = 0;
    WF_CUDA(cuDeviceGetAttribute, &value, attribute, context.device());
    return value;
}

} // namespace

Kernels::Kernels(const Context &context) : context_(context) {
    CUuuid uuid{};
    WF_CUDA(cuDeviceGetUuid, &uuid, context.device());
    simulated_ = std::memcmp(uuid.bytes, simulated_uuid, sizeof(simulated_uuid) - 1) == 0;
    capability_ = 10 * attribute(context, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                  attribute(context, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
}

Kernels::~Kernels() {
    buffers_.reset();
    if (!module_)
        return;
    // At the end of the process the driver may be gone already; there is nobody to tell then.
    CUcontext popped;
    if (WF_TRY_CUDA(cuCtxPushCurrent, context_.handle()) != CUDA_SUCCESS)
        return;
    WF_TRY_CUDA(cuModuleUnload, module_);
    WF_TRY_CUDA(cuCtxPopCurrent, &popped);
}

HashWay Kernels::way() const {
    if (simulated_)
        return HashWay::cpu; // the kernels run there too, interpreted: right, and a thousand times slower
    std::lock_guard lock(mutex_);
    load();
    return module_ ? HashWay::gpu : HashWay::copy;
}

CUfunction Kernels::function(const char *name) const {
    std::lock_guard lock(mutex_);
    load();
    if (!module_)
        throw TransferError(-ENOTSUP, "woodfrog's kernels", reason_);
    CUfunction function = nullptr;
    Current current(context_);
    WF_CUDA(cuModuleGetFunction, &function, module_, name);
    return function;
}

std::unique_ptr<HashBuffers> Kernels::take_buffers() const {
    std::lock_guard lock(mutex_);
    return std::move(buffers_);
}

void Kernels::keep_buffers(std::unique_ptr<HashBuffers> buffers) const {
    std::lock_guard lock(mutex_);
    if (!buffers_)
        buffers_ = std::move(buffers);
}

// Once: what was refused will be refused again, unless only memory was missing.
void Kernels::load() const {
    if (tried_)
        return;
    tried_ = true;
    reason_ = "this build of woodfrog has no GPU kernels: it was made where there was no nvcc";
    // A cubin runs within its major version, from its minor version on. One of a newer toolkit than the driver may be
    // refused; the PTX, which the driver compiles itself, is then tried all the same.
    for (const KernelImage &image : kernel_images())
        if (!simulated_ && image.capability / 10 == capability_ / 10 && image.capability <= capability_ &&
            try_image(image))
            return;
    for (const KernelImage &image : kernel_images())
        if (image.capability == 0 && try_image(image))
            return;
}

bool Kernels::try_image(const KernelImage &image) const {
    char log[1024] = {};
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, reinterpret_cast<void *>(sizeof(log) - 1)};
    try {
        Current current(context_);
        WF_CUDA(cuModuleLoadDataEx, &module_, static_cast<const void *>(image.data), 2u, options, values);
        return true;
    } catch (const TransferError &error) { // said by whoever needs a kernel
        module_ = nullptr;
        if (error.code == CUDA_ERROR_OUT_OF_MEMORY)
            tried_ = false;
        reason_ = std::string(error.what()) + (log[0] ? "; the driver's compiler says: " : "") + log;
        return false;
    }
}

} // namespace woodfrog::transfer
