// What this process owns: the one table of contexts, blocks, small allocations and virtual handles, and its lock.
//
// Application threads change it from inside the gate; the agent reads and changes it with the gate closed. The lock is
// held for bookkeeping only, never across a call that can wait for the GPU.
#pragma once

#include "block.hpp"
#include "changes.hpp"
#include "contexts.hpp"
#include "slab.hpp"
#include "virtual_memory.hpp"

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace woodfrog::interpose {

// One allocation as the application sees it.
struct Allocation {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;  // as asked for
    size_t taken_bytes = 0; // of a slab; the block's size otherwise
    Block *block = nullptr;
    uint64_t buffer_id = 0;
};

struct Memory {
    std::mutex mutex;
    std::unordered_map<CUcontext, std::unique_ptr<Context>> contexts;
    std::vector<std::unique_ptr<Context>> gone_contexts;
    CountedMap<CUdeviceptr, std::unique_ptr<Block>> blocks; // in use; by address
    std::map<CUdeviceptr, Allocation> allocations;          // by address
    std::set<std::pair<size_t, Block *>> slabs_by_room;     // (largest free piece, slab block): blocks with room
    std::set<std::pair<size_t, Block *>> pools_by_room;     // likewise of blocks that large allocations share
    std::vector<Allocation> put_off;         // freed during a capture: in no table, their memory still in `blocks`
    std::list<std::unique_ptr<Block>> spare; // free blocks kept for reuse, oldest first
    std::map<CUmemGenericAllocationHandle, std::unique_ptr<VirtualHandle>> virtual_handles; // by our number
    CountedMap<CUdeviceptr, VirtualMapping> virtual_mappings;                               // by address

    // Where a block that allocations share is listed while it has room.
    std::set<std::pair<size_t, Block *>> &by_room(const Block &block) {
        return block.pool ? pools_by_room : slabs_by_room;
    }
    // The allocation that contains `address`, or null.
    Allocation *find(CUdeviceptr address);
    // Whether the address lies in memory that this library manages, allocated or not.
    bool covers(CUdeviceptr address) const;
    size_t spare_bytes(CUdevice device) const;
    // Of the blocks of that device: what lies on host memory as yet.
    size_t hosted_bytes(CUdevice device) const;
    // Takes all spare blocks out (of one context, of one device (>= 0), or all), to be destroyed without the lock.
    std::vector<std::unique_ptr<Block>> take_spare(const Context *owner, CUdevice device);
};

// Never destroyed: other threads may still allocate while exit() runs destructors.
Memory &memory();

// Destroys spare blocks. With device < 0, on every device. Returns whether there were any.
bool give_back_spare(CUdevice device);

// True in a forked child and before the first cuInit succeeds: every call goes to the driver unchanged.
bool driver_only();
void set_driver_only(bool value);

} // namespace woodfrog::interpose
