// See heap.hpp.
#include "heap.hpp"

#include "error.hpp"

namespace simgpu {
namespace {

constexpr size_t kAlignment = 512;     // what cuMemAlloc returns is aligned to this on every device since Fermi
constexpr size_t kSlab = kGranularity; // small allocations share one
constexpr size_t kLargest = kSlab / 2; // above this an allocation gets a block of its own

size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

} // namespace

Heap::~Heap() {
    free_all();
}

CUdeviceptr Heap::add_block(size_t size_bytes) {
    AddressSpace &space = AddressSpace::instance();
    auto physical = Physical::create(size_bytes, device_, {});
    CUdeviceptr base = space.reserve(size_bytes, kGranularity, 0);
    try {
        Mapping mapping;
        mapping.base = base;
        mapping.size_bytes = size_bytes;
        mapping.physical = std::move(physical);
        space.map(std::move(mapping));
    } catch (const Error &) {
        space.release(base, size_bytes);
        throw;
    }
    Block &block = blocks_[base];
    block.size_bytes = size_bytes;
    block.free_pieces[0] = size_bytes;
    return base;
}

CUdeviceptr Heap::allocate(size_t size_bytes) {
    require(size_bytes <= (size_t{1} << 46), CUDA_ERROR_OUT_OF_MEMORY);
    std::lock_guard lock(mutex_);
    size_t wanted = round_up(size_bytes, kAlignment);
    if (wanted > kLargest) {
        size_t whole = round_up(wanted, kGranularity);
        CUdeviceptr base = add_block(whole);
        blocks_[base].free_pieces.clear();
        blocks_[base].used_pieces[0] = whole;
        return base;
    }
    auto take = [wanted](Block &block) -> std::optional<size_t> {
        for (auto [offset, size] : block.free_pieces) {
            if (size < wanted)
                continue;
            block.free_pieces.erase(offset);
            if (size > wanted)
                block.free_pieces[offset + wanted] = size - wanted;
            block.used_pieces[offset] = wanted;
            return offset;
        }
        return std::nullopt;
    };
    for (auto &[base, block] : blocks_) {
        if (block.free_pieces.empty())
            continue;
        if (auto offset = take(block))
            return base + *offset;
    }
    CUdeviceptr base = add_block(kSlab);
    return base + *take(blocks_[base]);
}

void Heap::drop_block(std::map<CUdeviceptr, Block>::iterator block) {
    AddressSpace::instance().unmap(block->first);
    AddressSpace::instance().release(block->first, block->second.size_bytes);
    blocks_.erase(block);
}

void Heap::free(CUdeviceptr address) {
    std::lock_guard lock(mutex_);
    auto it = blocks_.upper_bound(address);
    require(it != blocks_.begin());
    --it;
    Block &block = it->second;
    auto used = block.used_pieces.find(address - it->first);
    require(used != block.used_pieces.end());
    auto [offset, size] = *used;
    block.used_pieces.erase(used);
    if (block.used_pieces.empty()) {
        drop_block(it);
        return;
    }
    auto next = block.free_pieces.lower_bound(offset);
    if (next != block.free_pieces.end() && next->first == offset + size) {
        size += next->second;
        next = block.free_pieces.erase(next);
    }
    if (next != block.free_pieces.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += size;
            return;
        }
    }
    block.free_pieces[offset] = size;
}

void Heap::free_all() {
    std::lock_guard lock(mutex_);
    while (!blocks_.empty())
        drop_block(blocks_.begin());
}

} // namespace simgpu
