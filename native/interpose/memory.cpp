// The table of what this process owns; see memory.hpp.
#include "memory.hpp"

#include <atomic>
#include <iterator>

namespace woodfrog::interpose {
namespace {
constinit std::atomic<bool> g_driver_only{false};
} // namespace

Memory &memory() {
    static Memory *const instance = new Memory;
    return *instance;
}

bool driver_only() {
    return g_driver_only.load(std::memory_order_relaxed);
}
void set_driver_only(bool value) {
    g_driver_only.store(value, std::memory_order_relaxed);
}

Allocation *Memory::find(CUdeviceptr address) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin())
        return nullptr;
    Allocation &candidate = std::prev(after)->second;
    return address - candidate.address < candidate.size_bytes ? &candidate : nullptr;
}

bool Memory::covers(CUdeviceptr address) const {
    const auto after = blocks.upper_bound(address);
    if (after != blocks.begin()) {
        const Block &block = *std::prev(after)->second;
        if (address - block.address < block.size_bytes)
            return true;
    }
    for (const auto &block : spare)
        if (address - block->address < block->size_bytes)
            return true;
    return false;
}

size_t Memory::spare_bytes(CUdevice device) const {
    size_t total = 0;
    for (const auto &block : spare)
        if (block->physical.device == device)
            total += block->size_bytes;
    return total;
}

size_t Memory::hosted_bytes(CUdevice device) const {
    size_t total = 0;
    for (const auto &[address, block] : blocks)
        if (block->physical.on_host && block->physical.device == device)
            total += block->size_bytes;
    return total;
}

std::vector<std::unique_ptr<Block>> Memory::take_spare(const Context *owner, CUdevice device) {
    std::vector<std::unique_ptr<Block>> taken;
    for (auto block = spare.begin(); block != spare.end();) {
        if ((owner == nullptr || (*block)->owner == owner) && (device < 0 || (*block)->physical.device == device)) {
            taken.push_back(std::move(*block));
            block = spare.erase(block);
        } else {
            ++block;
        }
    }
    return taken;
}

bool give_back_spare(CUdevice device) {
    std::vector<std::unique_ptr<Block>> taken;
    {
        std::lock_guard lock(memory().mutex);
        taken = memory().take_spare(nullptr, device);
    }
    for (auto &block : taken)
        destroy_block(std::move(block));
    return !taken.empty();
}

} // namespace woodfrog::interpose
