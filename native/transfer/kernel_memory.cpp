// See kernel_memory.hpp.
#include "kernel_memory.hpp"

#include <utility>

namespace woodfrog::transfer {

KernelMemory::KernelMemory(const Context &context, uint64_t size_bytes, Place place) : context_(&context) {
    Current current(context);
    if (place == Place::device) {
        WF_CUDA(cuMemAlloc, &address_, size_t{size_bytes});
        return;
    }
    WF_CUDA(cuMemHostAlloc, &host_, size_t{size_bytes}, unsigned{CU_MEMHOSTALLOC_DEVICEMAP});
    const CUresult mapped = WF_TRY_CUDA(cuMemHostGetDevicePointer, &address_, host_, 0u);
    if (mapped != CUDA_SUCCESS) {
        WF_TRY_CUDA(cuMemFreeHost, host_);
        check(mapped, "cuMemHostGetDevicePointer");
    }
}

KernelMemory KernelMemory::on_device_or_host(const Context &context, uint64_t size_bytes) {
    try {
        return KernelMemory(context, size_bytes, Place::device);
    } catch (const TransferError &error) {
        if (error.code != CUDA_ERROR_OUT_OF_MEMORY)
            throw;
        return KernelMemory(context, size_bytes, Place::host);
    }
}

KernelMemory::KernelMemory(KernelMemory &&other) noexcept
    : context_(std::exchange(other.context_, nullptr)), address_(other.address_), host_(other.host_) {}

KernelMemory::~KernelMemory() {
    if (!context_)
        return;
    const Driver &cuda = driver(); // loaded long ago: this object exists
    CUcontext popped;
    if (cuda.cuCtxPushCurrent(context_->handle()) != CUDA_SUCCESS)
        return; // at the end of the process: the driver is gone, and the memory with it
    if (host_)
        cuda.cuMemFreeHost(host_);
    else
        cuda.cuMemFree(address_);
    cuda.cuCtxPopCurrent(&popped);
}

KernelStream::KernelStream(const Context &context) : context_(context) {
    Current current(context_);
    WF_CUDA(cuStreamCreate, &stream_, unsigned{CU_STREAM_NON_BLOCKING});
    const CUresult created =
        WF_TRY_CUDA(cuEventCreate, &event_, unsigned{CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC});
    if (created != CUDA_SUCCESS) {
        WF_TRY_CUDA(cuStreamDestroy, stream_);
        check(created, "cuEventCreate");
    }
}

KernelStream::~KernelStream() {
    const Driver &cuda = driver();     // loaded long ago: this object exists
    cuda.cuStreamSynchronize(stream_); // on failure the context is dead, and with it everything submitted
    cuda.cuEventDestroy(event_);
    cuda.cuStreamDestroy(stream_);
}

void KernelStream::record() {
    Current current(context_);
    WF_CUDA(cuEventRecord, event_, stream_);
}

void KernelStream::synchronize() {
    Current current(context_);
    WF_CUDA(cuStreamSynchronize, stream_);
}

void KernelStream::launch(CUfunction function, unsigned blocks, unsigned block_rows, unsigned threads,
                          void **arguments) {
    Current current(context_);
    WF_CUDA(cuLaunchKernel, function, blocks, block_rows, 1u, threads, 1u, 1u, 0u, stream_, arguments,
            static_cast<void **>(nullptr));
}

} // namespace woodfrog::transfer
