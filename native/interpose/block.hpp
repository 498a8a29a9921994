// A block: a piece of physical memory mapped at an address range of its own. Large allocations are a block each (or, if
// that is wanted, share one too: pool.hpp), small ones share one (slab.hpp).
//
// Blocks are made and destroyed without holding a lock, since the driver takes its time over it. A small number of free
// blocks is kept for the next allocation of the same size; they count as free memory and are given back before any
// allocation is refused.
#pragma once

#include "contexts.hpp"
#include "physical.hpp"

#include <memory>

namespace woodfrog::interpose {

struct Slab;

struct Block {
    Physical physical;
    CUdeviceptr address = 0; // reserved for as long as the block lives
    size_t size_bytes = 0;   // = physical.size_bytes
    Context *owner = nullptr;
    bool mapped = false;
    std::unique_ptr<Slab> slab; // set when allocations share the block
    bool pool = false;          // large ones (pool.hpp), else small ones
    ~Block();
};

// Makes a mapped block of `size_bytes` (a multiple of the granularity) that the owner's device, and those it has been
// opened to, can read and write. On failure nothing is left behind. `readers` are devices besides the owner's.
CUresult create_block(Context *owner, size_t size_bytes, const std::vector<CUdevice> &readers,
                      std::unique_ptr<Block> *block);
// Unmaps and releases. On failure the block is leaked on purpose: its state in the driver is unknown.
CUresult destroy_block(std::unique_ptr<Block> block);

// Maps the block's physical memory at its address, with access for its devices.
CUresult map_block(Block *block, const std::vector<CUdevice> &readers);
CUresult unmap_block(Block *block);
CUresult set_block_access(const Block &block, const std::vector<CUdevice> &readers);

} // namespace woodfrog::interpose
