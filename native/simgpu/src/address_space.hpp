// What lies where in the address space that the host and the simulated devices share.
//
// Three tables: reservations (addresses only), mappings (physical memory at an address) and allocations (what
// cuMemAlloc and its like gave to the application). A device address is the host address of the same number; it must
// never be dereferenced before the mappings say that the whole range may be.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda.h>

#include "physical.hpp"

namespace simgpu {

struct Context;

enum class AllocationKind { kDevice, kPool, kManaged, kGlobal, kHostPinned, kHostRegistered, kMapped };

struct Allocation {
    CUdeviceptr base = 0;
    size_t size_bytes = 0;
    AllocationKind kind = AllocationKind::kDevice;
    std::weak_ptr<Context> context;
    int device = 0;
    unsigned flags = 0; // of cuMemHostAlloc, cuMemHostRegister
    unsigned long long buffer_id = 0;
    CUmemoryPool pool = nullptr;
    bool shared = false; // registered host memory in a mapping that other processes may have
};

struct Mapping {
    CUdeviceptr base = 0;
    size_t size_bytes = 0;
    std::shared_ptr<Physical> physical;           // null for host memory that belongs to the application
    bool application_mapped = false;              // by cuMemMap
    std::map<int, CUmemAccess_flags> access;      // by device; for memory of cuMemMap only
    std::map<int, CUmemAccess_flags> host_access; // by NUMA node; likewise
};

// A piece of memory that devices may touch; bit d of a mask stands for device d.
struct Span {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t readable_by = 0;
    std::uint64_t writable_by = 0;
};
using Spans = std::vector<Span>; // by address, adjacent ones of equal rights joined

class AddressSpace {
  public:
    static AddressSpace &instance();

    // Address ranges without memory, PROT_NONE. Throws CUDA_ERROR_OUT_OF_MEMORY.
    CUdeviceptr reserve(size_t size_bytes, size_t alignment_bytes, CUdeviceptr wanted);
    void release(CUdeviceptr base, size_t size_bytes);
    // True when one reservation made by cuMemAddressReserve holds the whole range.
    bool reserved(CUdeviceptr base, size_t size_bytes) const;
    void add_reservation(CUdeviceptr base, size_t size_bytes);
    bool remove_reservation(CUdeviceptr base, size_t size_bytes);

    // Puts `mapping` into the tables and, with physical memory, into the address space.
    void map(Mapping mapping);
    // Throws CUDA_ERROR_INVALID_VALUE unless [base, base + size) is made up of whole mappings of cuMemMap.
    void unmap_application(CUdeviceptr base, size_t size_bytes);
    void unmap(CUdeviceptr base);
    void set_access(CUdeviceptr base, size_t size_bytes, const CUmemAccessDesc &description);
    std::optional<Mapping> mapping_at(CUdeviceptr address) const;
    bool mapped_in(CUdeviceptr base, size_t size_bytes) const; // any byte of it

    void add_allocation(Allocation allocation);
    std::optional<Allocation> remove_allocation(CUdeviceptr base);
    std::optional<Allocation> allocation_at(CUdeviceptr address) const; // containing the address
    std::vector<Allocation> allocations_of(const Context *context) const;
    bool any_managed() const;
    bool any_shared_registration() const; // registered host memory in a mapping shared with other processes
    size_t pool_bytes(int device) const;
    // Changes whenever a mapping does.
    std::uint64_t generation() const { return generation_.load(); }
    std::shared_ptr<const Spans> spans() const;

    // Checkpoint: puts PROT_NONE in the place of all physical memory, and back.
    void detach_all();
    void attach_all();

  private:
    void place(const Mapping &mapping) const;
    void withdraw(const Mapping &mapping) const;
    void changed() { generation_.fetch_add(1); }

    mutable std::mutex mutex_;
    std::map<CUdeviceptr, size_t> reservations_;
    std::map<CUdeviceptr, Mapping> mappings_;
    std::map<CUdeviceptr, Allocation> allocations_;
    std::atomic<std::uint64_t> generation_{1};
    mutable std::shared_ptr<const Spans> spans_;
    mutable std::uint64_t spans_generation_ = 0;
    unsigned long long next_buffer_id_ = 1;
};

// True when device `device` may read (or write) the whole range.
bool accessible(const Spans &spans, std::uint64_t address, size_t size_bytes, int device, bool write);
// The span that holds `address`, or null.
const Span *span_at(const Spans &spans, std::uint64_t address);

} // namespace simgpu
