// What is handed over; see owned.hpp.
#include "owned.hpp"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

// Memory of a peer may be mapped where there is no context on its own device: any other serves.
CUcontext any_context_on(CUdevice device) {
    CUcontext other = nullptr;
    for (const auto &[handle, context] : memory().contexts) {
        if (context->device == device && !context->green)
            return handle;
        if (!context->green)
            other = handle;
    }
    return other;
}

} // namespace

wire::Kind kind_of(const VirtualHandle &handle) {
    return handle.physical.host_node >= 0 ? wire::Kind::host_handle : wire::Kind::virtual_handle;
}

wire::Kind Owned::kind() const {
    if (handle != nullptr)
        return kind_of(*handle);
    return block->slab != nullptr ? wire::Kind::slab : wire::Kind::allocation;
}

Inventory::Inventory() {
    std::lock_guard lock(memory().mutex);
    std::unordered_map<const VirtualHandle *, std::vector<VirtualMapping *>> of_handle;
    for (auto &[address, mapping] : memory().virtual_mappings)
        of_handle[mapping.handle].push_back(&mapping);
    mappings_.reserve(memory().virtual_mappings.size()); // spans into it stay valid
    all_.reserve(memory().blocks.size() + memory().virtual_handles.size());
    for (const auto &[address, block] : memory().blocks)
        all_.push_back({&block->physical, block.get(), nullptr, {}});
    for (const auto &[number, handle] : memory().virtual_handles) {
        const size_t first = mappings_.size();
        if (const auto found = of_handle.find(handle.get()); found != of_handle.end())
            mappings_.insert(mappings_.end(), found->second.begin(), found->second.end());
        all_.push_back({&handle->physical, nullptr, handle.get(), std::span(mappings_).subspan(first)});
    }
    std::stable_sort(all_.begin(), all_.end(), [](const Owned &one, const Owned &other) {
        return one.physical->device < other.physical->device;
    });
    by_id_.reserve(all_.size());
    for (size_t i = 0; i < all_.size(); ++i)
        by_id_.emplace(all_[i].physical->id, i);
}

const Owned *Inventory::find(uint64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : &all_[found->second];
}

void DeviceScope::enter(CUdevice device) {
    if (device == device_)
        return;
    scope_.reset(); // before the next one: they end in the order of a stack
    device_ = device;
    if (const CUcontext context = any_context_on(device); context != nullptr)
        scope_.emplace(context);
}

} // namespace woodfrog::interpose
