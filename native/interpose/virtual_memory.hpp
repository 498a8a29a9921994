// The application's own virtual memory: handles it made with cuMemCreate and what it mapped of them.
//
// The application holds our number for a handle, not the driver's, because the memory behind it is another handle after
// each return. A handle's physical memory lives, as the driver's own does, until the application has released it and
// nothing is mapped from it.
#pragma once

#include "physical.hpp"

#include <memory>
#include <vector>

namespace woodfrog::interpose {

struct VirtualHandle {
    CUmemGenericAllocationHandle number = 0; // what the application holds
    Physical physical;
    CUmemAllocationProp properties{}; // as the application asked for
    uint32_t references = 1;          // of the application: create, import, retain
    uint32_t mappings = 0;
    bool foreign = false; // imported by the application, from another process or its own
    int exporter = 0;     // of a foreign one: the process that exported it, 0 when that is not known
    bool pinned = false;  // in an array or a multicast object: cannot be taken away
};

struct VirtualAccess {
    CUdeviceptr address;
    size_t size_bytes;
    CUmemAccessDesc access;
};

struct VirtualMapping {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
    size_t offset_bytes = 0;
    unsigned long long flags = 0;
    VirtualHandle *handle = nullptr;
    std::vector<VirtualAccess> access; // within the mapping, in the order they were set
    bool present = true;
    bool host_reaches() const; // the processor may read or write it
};

// The driver's handle for a number of ours, the number itself when it is none (a handle that we do not own). With
// memory().mutex held.
CUmemGenericAllocationHandle real_handle(CUmemGenericAllocationHandle number);
// Null when `number` is not one of ours that the application still holds. With memory().mutex held.
VirtualHandle *find_virtual_handle(CUmemGenericAllocationHandle number);
bool is_virtual_number(CUmemGenericAllocationHandle number);
CUmemGenericAllocationHandle new_virtual_number();

// Whether memory with these properties is of a kind that is handed over.
bool can_own_virtual(const CUmemAllocationProp &properties, unsigned long long flags);
// Where it lies, told to its `device` and `host_node`.
void place_physical(const CUmemAllocationProp &properties, Physical *physical);
// Puts it into the table; the number that the application gets for it.
CUmemGenericAllocationHandle add_virtual_handle(std::unique_ptr<VirtualHandle> handle);

// Maps the physical memory of a mapping again, with the access that it had.
CUresult map_again(VirtualMapping *mapping);

} // namespace woodfrog::interpose
