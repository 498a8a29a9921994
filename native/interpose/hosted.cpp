// Host memory that stands for device memory, told and replaced; see hosted.hpp.
#include "hosted.hpp"

#include "debug.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstring>

namespace woodfrog::interpose {
namespace {

wire::Handle entry_of(const Block &block) {
    wire::Handle entry{};
    entry.handle = block.physical.id;
    entry.size = block.physical.size_bytes;
    entry.device = static_cast<uint32_t>(block.physical.device);
    entry.kind = static_cast<uint32_t>(block.slab != nullptr ? wire::Kind::slab : wire::Kind::allocation);
    return entry;
}

bool is_here(const Physical &physical) {
    return physical.on_host && physical.present;
}

// What another process has would be another memory afterwards.
bool can_move(const Physical &physical) {
    return is_here(physical) && !physical.by_ipc && physical.exports == 0;
}

Block *block_of(const wire::Handle &handle) { // with the lock held
    for (const auto &[address, block] : memory().blocks)
        if (block->physical.id == handle.handle)
            return block->physical.size_bytes == handle.size ? block.get() : nullptr;
    return nullptr;
}

Outcome failure(CUresult result, const char *what, const Block &block) {
    return driver_failure(result, std::string(what) + " memory that is promoted", block.physical.id);
}

// With the lock held. The descriptor is taken over.
Outcome replace(Block *block, int fd) {
    Physical next;
    next.id = block->physical.id;
    next.size_bytes = block->physical.size_bytes;
    next.device = block->physical.device;
    const CurrentScope current(block->owner->handle);
    if (const CUresult result = import_physical(&next, fd); result != CUDA_SUCCESS)
        return failure(result, "importing", *block);
    const auto give_up_next = [&] {
        if (const CUresult result = release_physical(&next); result != CUDA_SUCCESS)
            debug("cuMemRelease of memory that was not needed failed: %d", result);
    };
    if (next.on_host) {
        give_up_next();
        return {wire::Status::bad_message, CUDA_SUCCESS, next.id, "host memory was sent in the place of host memory"};
    }
    if (const CUresult result = unmap_block(block); result != CUDA_SUCCESS) {
        give_up_next();
        return failure(result, "unmapping the host's side of", *block);
    }
    const std::vector<CUdevice> readers = reader_devices(*block->owner);
    std::swap(block->physical, next);
    if (const CUresult result = map_block(block, readers); result != CUDA_SUCCESS) {
        std::swap(block->physical, next);
        if (block->mapped || map_block(block, readers) != CUDA_SUCCESS) {
            block->mapped = false;
            debug("host memory could not be mapped again: its block is missing");
        }
        give_up_next();
        return failure(result, "mapping", *block);
    }
    if (const CUresult result = release_physical(&next); result != CUDA_SUCCESS)
        debug("cuMemRelease of host memory that was replaced failed: %d", result);
    return {};
}

} // namespace

Outcome send_hosted(const SendHandles &send) {
    if (physicals_on_host() != 0)
        give_back_spare(-1); // they are to have the room; in a frozen process there are none
    std::lock_guard lock(memory().mutex);
    std::vector<wire::Handle> batch;
    FdList fds;
    uint64_t count = 0;
    const Outcome gone{wire::Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    for (const auto &[address, block] : memory().blocks) {
        int fd = -1;
        if (!is_here(block->physical))
            continue;
        if (const CUresult result = physical_fd(block->physical, &fd); result != CUDA_SUCCESS)
            return driver_failure(result, "a descriptor of host memory cannot be passed on", block->physical.id);
        batch.push_back(entry_of(*block));
        fds.add(fd);
        ++count;
        if (batch.size() == WF_MAX_ENTRIES) {
            if (!send(batch, fds, false))
                return gone;
            batch.clear();
            fds.clear();
        }
    }
    if (!send(batch, fds, true))
        return gone;
    return {wire::Status::ok, CUDA_SUCCESS, count, ""};
}

Outcome replace_handles(Packet &packet, std::vector<wire::Handle> *replaced) {
    const size_t count = packet.header.count;
    if (packet.payload.size() != count * sizeof(wire::Handle) || packet.fds.size() != count)
        return {wire::Status::bad_message, CUDA_SUCCESS, 0, "replace_batch has the wrong length"};
    std::lock_guard lock(memory().mutex);
    for (size_t i = 0; i < count; ++i) {
        wire::Handle handle{};
        memcpy(&handle, packet.payload.data() + i * sizeof(handle), sizeof(handle));
        Block *block = block_of(handle);
        if (block == nullptr || !can_move(block->physical))
            continue; // its descriptor is closed with the packet
        if (Outcome outcome = replace(block, packet.fds.take(i)); !outcome.ok())
            return outcome;
        replaced->push_back(handle);
    }
    return {};
}

} // namespace woodfrog::interpose
