// Memory that kernels of one context work with: on the GPU, or pinned on the host and mapped there. Gives it back in
// its destructor, which must not be reached while the GPU still uses it, nor after the context has ended.
#pragma once
#include "context.hpp"

#include <cstdint>

namespace woodfrog::transfer {

class KernelMemory {
  public:
    enum class Place { device, host };

    // TransferError if there is no such memory.
    KernelMemory(const Context &context, uint64_t size_bytes, Place place);
    // On the device; if that is full, on the host, where kernels reach it across the bus.
    static KernelMemory on_device_or_host(const Context &context, uint64_t size_bytes);
    KernelMemory(KernelMemory &&other) noexcept;
    KernelMemory &operator=(KernelMemory &&) = delete;
    ~KernelMemory();

    CUdeviceptr address() const { return address_; }
    Place place() const { return host_ ? Place::host : Place::device; }
    uint8_t *data() const { return static_cast<uint8_t *>(host_); } // null on the device

  private:
    const Context *context_; // null: moved away
    CUdeviceptr address_ = 0;
    void *host_ = nullptr;
};

// A non-blocking stream and an event of it. The destructor waits for all that was submitted.
class KernelStream {
  public:
    explicit KernelStream(const Context &context);
    KernelStream(const KernelStream &) = delete;
    KernelStream &operator=(const KernelStream &) = delete;
    ~KernelStream();

    CUstream stream() const { return stream_; }
    CUevent event() const { return event_; }
    void record();                                       // what was submitted until now is what the event stands for
    void wait() { WF_CUDA(cuEventSynchronize, event_); } // for the event
    void synchronize();                                  // for everything; TransferError if it failed

    // `arguments`: the address of each of the kernel's. The context need not be current.
    void launch(CUfunction function, unsigned blocks, unsigned block_rows, unsigned threads, void **arguments);

  private:
    const Context &context_;
    CUstream stream_ = nullptr;
    CUevent event_ = nullptr;
};

} // namespace woodfrog::transfer
