// Physical GPU memory as the daemon holds it: made here, or imported from a descriptor that a target exported, and
// mapped so that it can be copied. A Memory owns its handle and its mapping; the physical memory itself lives on while
// anybody else (a target, a descriptor in the keeper) refers to it.
#pragma once
#include "context.hpp"
#include "in_use.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace woodfrog::transfer {

// A range of addresses that several Memories made in one call share, so that neighbours are copied as one.
class Reservation {
  public:
    Reservation(std::shared_ptr<Context> context, uint64_t size_bytes);
    Reservation(const Reservation &) = delete;
    Reservation &operator=(const Reservation &) = delete;
    ~Reservation();
    CUdeviceptr address() const { return address_; }
    const Context &context() const { return *context_; }

  private:
    std::shared_ptr<Context> context_;
    uint64_t size_bytes_;
    CUdeviceptr address_ = 0;
};

class Memory {
  public:
    // Both give one Memory per element, mapped one after the other. They fail as a whole: nothing is left behind.
    // Descriptors stay the caller's. `host_nodes`: for each, the NUMA node of host memory (mapped for this device), or
    // -1 for memory of the device; none: all of the device. A size must be that of the allocation (a multiple of the
    // granularity).
    static std::vector<std::shared_ptr<Memory>> import(const std::shared_ptr<Context> &context,
                                                       const std::vector<int> &fds, const std::vector<uint64_t> &sizes);
    static std::vector<std::shared_ptr<Memory>> create(const std::shared_ptr<Context> &context,
                                                       const std::vector<uint64_t> &sizes,
                                                       const std::vector<int> &host_nodes = {});

    // Memory that somebody else has mapped into this process (the driver, for custom storage) and unmaps once nothing
    // here uses it any more. It is not this object's: `release` only ends its use.
    static std::shared_ptr<Memory> view(const std::shared_ptr<Context> &context, CUdeviceptr address,
                                        uint64_t size_bytes);

    Memory(std::shared_ptr<Context> context, CUdeviceptr address, uint64_t size_bytes);
    Memory(std::shared_ptr<Reservation> reservation, uint64_t offset, uint64_t size_bytes,
           CUmemGenericAllocationHandle handle, bool created);
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory();

    // A new POSIX descriptor of the physical memory, the caller's to close. Only for memory made by create(): the
    // driver refuses it for imported memory, whose own descriptor serves as well.
    int export_fd();

    // Unmaps and gives up the handle. TransferError(-EBUSY) while a transfer uses it; a second call does nothing.
    void release();

    Use use() { return Use(in_use_); }
    CUdeviceptr address() const { return address_; }
    uint64_t size_bytes() const { return size_bytes_; }
    const std::shared_ptr<Context> &context() const { return context_; }

  private:
    CUresult unmap_and_release() noexcept;

    std::shared_ptr<Context> context_;
    std::shared_ptr<Reservation> reservation_;
    CUdeviceptr address_;
    uint64_t size_bytes_;
    CUmemGenericAllocationHandle handle_ = 0;
    bool created_ = false;
    bool mapped_ = false;
    InUse in_use_{"memory"};
};

// The driver's granularity of physical allocations, in bytes.
uint64_t granularity_bytes(const Context &context);

} // namespace woodfrog::transfer
