// Export, release and return; see handover.hpp.
#include "handover.hpp"

#include "debug.hpp"
#include "host_faults.hpp"
#include "ipc.hpp"
#include "memory.hpp"
#include "registered.hpp"
#include "spent.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace woodfrog::interpose {
namespace {

std::string naming(const char *what, const Physical &physical) {
    char text[128];
    snprintf(text, sizeof(text), "%s of handle %llu (device %d, %zu bytes) failed", what,
             static_cast<unsigned long long>(physical.id), physical.device, physical.size_bytes);
    return text;
}

std::vector<wire::Mapping> everything_mapped() {
    std::vector<wire::Mapping> mappings;
    for (const auto &[address, allocation] : memory().allocations) {
        const Block &block = *allocation.block;
        wire::Mapping mapping{};
        mapping.address = address;
        mapping.size = allocation.size_bytes;
        mapping.handle = block.physical.id;
        mapping.offset = address - block.address;
        mapping.device = static_cast<uint32_t>(block.physical.device);
        mapping.kind = static_cast<uint32_t>(block.slab != nullptr ? wire::Kind::slab : wire::Kind::allocation);
        mappings.push_back(mapping);
    }
    for (const auto &[address, known] : memory().virtual_mappings) {
        wire::Mapping mapping{};
        mapping.address = address;
        mapping.size = known.size_bytes;
        mapping.handle = known.handle->physical.id;
        mapping.offset = known.offset_bytes;
        mapping.device = static_cast<uint32_t>(known.handle->physical.device);
        mapping.kind = static_cast<uint32_t>(kind_of(*known.handle));
        mappings.push_back(mapping);
    }
    return mappings;
}

// Memory that another process may have, by an export or an import of the application, and host memory.
std::vector<wire::Shared> everything_shared() {
    std::vector<wire::Shared> all;
    const auto add = [&](const Physical &physical, bool foreign, int exporter) {
        if (physical.exports == 0 && !physical.by_ipc && !foreign && physical.host_node < 0)
            return;
        wire::Shared shared{};
        shared.handle = physical.id;
        shared.exports = physical.exports;
        shared.imported = foreign ? 1 : 0;
        shared.exporter = static_cast<uint32_t>(exporter);
        shared.kept_fd = physical.kept.fd;
        shared.host_node = physical.host_node;
        shared.by_ipc = physical.by_ipc ? 1 : 0;
        all.push_back(shared);
    };
    for (const auto &[address, block] : memory().blocks)
        add(block->physical, false, 0);
    for (const auto &[number, handle] : memory().virtual_handles)
        add(handle->physical, handle->foreign, handle->exporter);
    return all;
}

// In packets of as many as fit; at least one, unless there is nothing and that need not be said.
template <typename Entry, typename Send>
bool send_batches(const std::vector<Entry> &entries, bool even_if_empty, const Send &send) {
    for (size_t first = 0; (first == 0 && even_if_empty) || first < entries.size(); first += WF_MAX_ENTRIES) {
        const size_t count = std::min<size_t>(WF_MAX_ENTRIES, entries.size() - first);
        const auto begin = entries.begin() + static_cast<ptrdiff_t>(first);
        if (!send({begin, begin + static_cast<ptrdiff_t>(count)}, first + count == entries.size()))
            return false;
    }
    return true;
}

// What can be said before anything is sent.
Outcome check_exportable(const std::vector<Owned> &all) {
    for (const Owned &owned : all) {
        if (owned.handle != nullptr && owned.handle->pinned)
            return {wire::Status::unsupported, CUDA_SUCCESS, owned.physical->id,
                    "memory in a multicast object or a sparse array cannot be handed over"};
        if (owned.physical->kept.fd >= 0 && needs_kept(*owned.physical) && !fd_is_ours(owned.physical->kept))
            return {wire::Status::unsupported, CUDA_SUCCESS, owned.physical->id,
                    "the application has closed the descriptor of GPU memory that this library keeps"};
    }
    if (Outcome outcome = check_registered(); !outcome.ok())
        return outcome;
    // Each handle comes back with a descriptor that has to be kept, in the place of the one that may be kept now.
    const size_t kept = static_cast<size_t>(
        std::count_if(all.begin(), all.end(), [](const Owned &owned) { return owned.physical->kept.fd >= 0; }));
    if (make_room_for_fds(all.size() - kept + WF_MAX_ENTRIES) != 0) {
        char text[160];
        snprintf(text, sizeof(text), "the limit of open files (ulimit -Hn) is too low for %zu GPU memory handles",
                 all.size());
        return {wire::Status::unsupported, CUDA_SUCCESS, all.size(), text};
    }
    return {};
}

Outcome unmap_owned(const Owned &owned, bool *changed) {
    const Physical &physical = *owned.physical;
    if (owned.block != nullptr && owned.block->mapped) {
        if (const CUresult result = unmap_block(owned.block); result != CUDA_SUCCESS)
            return driver_failure(result, naming("cuMemUnmap", physical), physical.id);
        *changed = true;
    }
    for (VirtualMapping *mapping : owned.mappings) {
        if (!mapping->present)
            continue;
        if (mapping->host_reaches() && !host_waits_for(mapping->address, mapping->size_bytes))
            return {wire::Status::no_memory, CUDA_SUCCESS, physical.id, "too many mappings of host memory"};
        const CUresult result = spent::timed(
            spent::What::unmap_call, [&] { return WF_REAL(cuMemUnmap)(mapping->address, mapping->size_bytes); });
        if (result != CUDA_SUCCESS)
            return driver_failure(result, naming("cuMemUnmap", physical), physical.id);
        mapping->present = false;
        *changed = true;
    }
    return {};
}

Outcome map_owned(const Owned &owned) {
    CUresult result = CUDA_SUCCESS;
    if (owned.block != nullptr && !owned.block->mapped)
        result = map_block(owned.block, reader_devices(*owned.block->owner));
    for (VirtualMapping *mapping : owned.mappings)
        if (result == CUDA_SUCCESS && !mapping->present)
            result = map_again(mapping);
    return result == CUDA_SUCCESS ? Outcome{}
                                  : driver_failure(result, naming("mapping", *owned.physical), owned.physical->id);
}

// A descriptor for what follows `after` in a table, until there is one that lacks it: false at the table's end. The
// lock is held for one at a time, since the application goes on meanwhile.
template <typename Table, typename Of>
bool keep_next(const Table &table, typename Table::key_type *after, const Of &of, CUresult *result, uint64_t *made) {
    std::lock_guard lock(memory().mutex);
    for (auto entry = table.upper_bound(*after); entry != table.end(); ++entry) {
        *after = entry->first;
        Physical &physical = of(*entry->second);
        if (physical.kept.fd >= 0 || !physical.present)
            continue;
        *result = keep_physical_fd(&physical);
        *made += *result == CUDA_SUCCESS ? 1 : 0;
        return *result == CUDA_SUCCESS;
    }
    return false;
}

} // namespace

Outcome export_ahead() {
    size_t lacking = 0;
    {
        std::lock_guard lock(memory().mutex);
        for (const auto &[address, one] : memory().blocks)
            lacking += one->physical.kept.fd < 0 ? 1 : 0;
        for (const auto &[number, one] : memory().virtual_handles)
            lacking += one->physical.kept.fd < 0 ? 1 : 0;
    }
    Outcome done;
    if (make_room_for_fds(lacking + WF_MAX_ENTRIES) != 0)
        return done; // the export will say so
    CUresult result = CUDA_SUCCESS;
    CUdeviceptr block = 0;
    while (
        keep_next(memory().blocks, &block, [](Block &one) -> Physical & { return one.physical; }, &result, &done.value))
        ;
    CUmemGenericAllocationHandle number = 0;
    while (result == CUDA_SUCCESS &&
           keep_next(
               memory().virtual_handles, &number, [](VirtualHandle &one) -> Physical & { return one.physical; },
               &result, &done.value))
        ;
    if (result != CUDA_SUCCESS)
        debug("descriptors made ahead: %d after %llu", result, static_cast<unsigned long long>(done.value));
    return done;
}

Outcome export_memory(const SendHandles &send_handles, const SendMappings &send_mappings,
                      const SendShared &send_shared) {
    give_back_spare(-1);
    const Inventory inventory;
    const std::vector<Owned> &all = inventory.all();
    std::lock_guard lock(memory().mutex);
    if (Outcome outcome = check_exportable(all); !outcome.ok())
        return outcome;
    const Outcome gone{wire::Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    std::vector<wire::Handle> batch;
    FdList fds;
    for (size_t i = 0; i < all.size();) {
        const Physical &physical = *all[i].physical;
        int fd = -1;
        const CUresult result = physical_fd(physical, &fd);
        if (result != CUDA_SUCCESS) {
            if (batch.empty()) // not a lack of descriptors that sending what there is would cure
                return driver_failure(result, naming("exporting", physical), physical.id);
        } else {
            wire::Handle entry{};
            entry.handle = physical.id;
            entry.size = physical.size_bytes;
            entry.device = static_cast<uint32_t>(physical.device);
            entry.kind = static_cast<uint32_t>(all[i].kind());
            batch.push_back(entry);
            fds.add(fd);
            ++i;
        }
        if (i < all.size() && (result != CUDA_SUCCESS || batch.size() == WF_MAX_ENTRIES)) {
            if (!send_handles(batch, fds, false))
                return gone;
            batch.clear();
            fds.clear();
        }
    }
    if (!send_handles(batch, fds, true))
        return gone;
    if (!send_batches(everything_mapped(), true, send_mappings) ||
        !send_batches(everything_shared(), false, send_shared))
        return gone;
    Outcome done;
    done.value = all.size();
    return done;
}

Outcome release_memory(bool *changed) {
    *changed = false;
    if (Outcome outcome = spent::timed(spent::What::registering, [&] { return unregister_shared(changed); });
        !outcome.ok())
        return outcome;
    const Inventory inventory;
    DeviceScope current;
    std::lock_guard lock(memory().mutex);
    for (const Owned &owned : inventory.all()) {
        current.enter(owned.physical->device);
        if (Outcome outcome = unmap_owned(owned, changed); !outcome.ok())
            return outcome;
        *changed = true;
        if (const CUresult result = release_physical(owned.physical); result != CUDA_SUCCESS)
            return driver_failure(result, naming("cuMemRelease", *owned.physical), owned.physical->id);
    }
    Outcome done;
    done.value = inventory.all().size();
    return done;
}

Outcome Return::take(const wire::Handle &handle, int fd, bool same) {
    const Owned *owned = inventory_.find(handle.handle);
    if (owned == nullptr || owned->physical->size_bytes != handle.size ||
        owned->physical->device != static_cast<CUdevice>(handle.device)) {
        finish_fd(fd, false);
        return {wire::Status::bad_message, CUDA_SUCCESS, handle.handle,
                "a handle was returned that this process does not know"};
    }
    std::lock_guard lock(memory().mutex);
    current_.enter(owned->physical->device);
    if (owned->physical->present) {
        finish_fd(fd, false); // a repeated return; what is missing of its mappings is mapped below
    } else if (const CUresult result = import_physical(owned->physical, fd, same); result != CUDA_SUCCESS) {
        return driver_failure(result, naming("importing", *owned->physical), handle.handle);
    }
    return map_owned(*owned);
}

size_t missing_handles(const Inventory &inventory) {
    std::lock_guard lock(memory().mutex);
    size_t missing = 0;
    for (const Owned &owned : inventory.all()) {
        bool complete = owned.physical->present && (owned.block == nullptr || owned.block->mapped);
        for (const VirtualMapping *mapping : owned.mappings)
            complete = complete && mapping->present;
        missing += complete ? 0 : 1;
    }
    return missing;
}

Outcome Return::finish() {
    if (const size_t missing = missing_handles(inventory_); missing != 0) {
        char text[96];
        snprintf(text, sizeof(text), "%zu handles were not returned", missing);
        return {wire::Status::bad_message, CUDA_SUCCESS, missing, text};
    }
    if (Outcome outcome = spent::timed(spent::What::registering, register_again); !outcome.ok())
        return outcome;
    host_goes_on();
    ipc_memory_is_back();
    return {};
}

} // namespace woodfrog::interpose
