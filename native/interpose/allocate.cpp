// Allocation and freeing of device memory; see allocate.hpp and README.md for the rules.
//
// Whenever anything is out of the ordinary (no context, no support, no memory, a failing call) the driver itself is
// asked, so that its answer is the application's. What it then allocates, its own checkpoint saves.
#include "allocate.hpp"

#include "capture.hpp"
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "pool.hpp"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

// What one small allocation comes from: the unit in which the driver, too, takes memory from the device.
constexpr size_t kSlabBytes = size_t{2} << 20;

// Buffer ids are unique in the process; the driver counts its own from 1.
constexpr uint64_t kFirstBufferId = uint64_t{1} << 48;

uint64_t next_buffer_id() {
    static constinit std::atomic<uint64_t> last{kFirstBufferId};
    return last.fetch_add(1, std::memory_order_relaxed);
}

// With the lock held.
void enter_allocation(CUdeviceptr address, size_t size_bytes, size_t taken_bytes, Block *block) {
    memory().allocations.emplace_hint(memory().allocations.end(), address,
                                      Allocation{address, size_bytes, taken_bytes, block, next_buffer_id()});
}

// With the lock held: an allocation from a block that others share and that has room. `wanted` is what it takes there.
bool take_shared(std::set<std::pair<size_t, Block *>> &by_room, const Context *owner, size_t size_bytes, size_t wanted,
                 CUdeviceptr *address) {
    for (auto room = by_room.lower_bound({wanted, nullptr}); room != by_room.end(); ++room) {
        Block *block = room->second;
        if (block->owner != owner || block->physical.on_host) // what is new is device memory
            continue;
        size_t offset = 0;
        by_room.erase(room);
        block->slab->take(wanted, &offset);
        if (const size_t left = block->slab->largest_free_bytes(); left > 0)
            by_room.emplace(left, block);
        *address = block->address + offset;
        enter_allocation(*address, size_bytes, wanted, block);
        return true;
    }
    return false;
}

// With the lock held: a free block of that size.
std::unique_ptr<Block> take_spare_block(const Context *owner, size_t size_bytes) {
    Memory &all = memory();
    for (auto block = all.spare.rbegin(); block != all.spare.rend(); ++block) {
        if ((*block)->owner == owner && (*block)->size_bytes == size_bytes) {
            std::unique_ptr<Block> taken = std::move(*block);
            all.spare.erase(std::next(block).base());
            taken->physical.id = next_physical_id(); // another allocation: what it held is nobody's any more
            return taken;
        }
    }
    return nullptr;
}

CUresult new_block(Context *owner, size_t size_bytes, std::unique_ptr<Block> *block) {
    std::vector<CUdevice> readers;
    {
        std::lock_guard lock(memory().mutex);
        *block = take_spare_block(owner, size_bytes);
        if (*block != nullptr)
            return CUDA_SUCCESS;
        readers = reader_devices(*owner);
    }
    RelaxedScope relaxed;
    CUresult result = create_block(owner, size_bytes, readers, block);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && give_back_spare(owner->device))
        result = create_block(owner, size_bytes, readers, block);
    return result;
}

// A new block of `block_bytes` to share, and an allocation from it.
CUresult allocate_in_new_block(Context *owner, size_t block_bytes, bool pool, size_t size_bytes, size_t wanted,
                               CUdeviceptr *address) {
    std::unique_ptr<Block> block;
    if (const CUresult result = new_block(owner, block_bytes, &block); result != CUDA_SUCCESS)
        return result;
    block->slab = std::make_unique<Slab>(block->size_bytes);
    block->pool = pool;
    std::lock_guard lock(memory().mutex);
    Block *added = block.get();
    auto &by_room = memory().by_room(*added);
    by_room.emplace(added->size_bytes, added);
    memory().blocks.emplace(added->address, std::move(block));
    return take_shared(by_room, owner, size_bytes, wanted, address) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult allocate_small(Context *owner, size_t size_bytes, CUdeviceptr *address) {
    const size_t wanted = round_up(size_bytes, kSmallAlignment);
    {
        std::lock_guard lock(memory().mutex);
        if (take_shared(memory().slabs_by_room, owner, size_bytes, wanted, address))
            return CUDA_SUCCESS;
    }
    const size_t slab_bytes = round_up(kSlabBytes, owner->facts->granularity_bytes);
    return allocate_in_new_block(owner, slab_bytes, false, size_bytes, wanted, address);
}

// In a block that large allocations share. Not ok: there is to be none for this one, or no memory for it.
bool allocate_pooled(Context *owner, size_t size_bytes, size_t wanted, CUdeviceptr *address) {
    size_t pool_bytes = pool_block_bytes(0, owner->facts->granularity_bytes);
    if (pool_bytes == 0)
        return false;
    {
        std::lock_guard lock(memory().mutex);
        size_t owned_bytes = 0;
        for (const auto &[at, block] : memory().blocks)
            owned_bytes += block->physical.device == owner->device ? block->size_bytes : 0;
        pool_bytes = pool_block_bytes(owned_bytes, owner->facts->granularity_bytes);
        if (!pool_takes(wanted, pool_bytes))
            return false;
        if (take_shared(memory().pools_by_room, owner, size_bytes, wanted, address))
            return true;
    }
    return allocate_in_new_block(owner, pool_bytes, true, size_bytes, wanted, address) == CUDA_SUCCESS;
}

CUresult allocate_large(Context *owner, size_t size_bytes, CUdeviceptr *address) {
    std::unique_ptr<Block> block;
    const size_t block_bytes = round_up(size_bytes, owner->facts->granularity_bytes);
    if (allocate_pooled(owner, size_bytes, block_bytes, address))
        return CUDA_SUCCESS;
    if (const CUresult result = new_block(owner, block_bytes, &block); result != CUDA_SUCCESS)
        return result;
    std::lock_guard lock(memory().mutex);
    *address = block->address;
    enter_allocation(block->address, size_bytes, block_bytes, block.get());
    memory().blocks.emplace(block->address, std::move(block));
    return CUDA_SUCCESS;
}

// Returns the memory of an allocation that is in no table any more. The work that used it is over.
CUresult give_back(const Allocation &allocation) {
    Memory &all = memory();
    std::vector<std::unique_ptr<Block>> surplus;
    {
        std::lock_guard lock(all.mutex);
        Block *block = allocation.block;
        if (block->slab != nullptr) {
            auto &by_room = all.by_room(*block);
            if (const size_t room = block->slab->largest_free_bytes(); room > 0)
                by_room.erase({room, block});
            block->slab->give(allocation.address - block->address, allocation.taken_bytes);
            if (!block->slab->empty()) {
                by_room.emplace(block->slab->largest_free_bytes(), block);
                return CUDA_SUCCESS;
            }
            block->slab.reset();
            block->pool = false;
        }
        auto entry = all.blocks.find(block->address);
        std::unique_ptr<Block> freed = std::move(entry->second);
        all.blocks.erase(entry);
        const CUdevice device = freed->physical.device;
        // What another process may have mapped is not given out again, nor what is on host memory; and while there is
        // any of that, it needs the room.
        if (freed->size_bytes > kLargestSpareBytes || freed->physical.by_ipc || physicals_on_host() != 0) {
            surplus.push_back(std::move(freed));
        } else {
            all.spare.push_back(std::move(freed));
            size_t spare_bytes = all.spare_bytes(device);
            for (auto oldest = all.spare.begin(); spare_bytes > kSpareBytes && oldest != all.spare.end();) {
                if ((*oldest)->physical.device != device) {
                    ++oldest;
                    continue;
                }
                spare_bytes -= (*oldest)->size_bytes;
                surplus.push_back(std::move(*oldest));
                oldest = all.spare.erase(oldest);
            }
        }
    }
    CUresult result = CUDA_SUCCESS;
    for (auto &block : surplus)
        if (const CUresult one = destroy_block(std::move(block)); one != CUDA_SUCCESS)
            result = one;
    return result;
}

// All work that may use memory of the context: its own, and that of contexts which were given access.
CUresult wait_for_users(Context *owner) {
    std::vector<CUcontext> users;
    {
        std::lock_guard lock(memory().mutex);
        for (const Context *reader : owner->readers)
            users.push_back(reader->handle);
    }
    CUresult result = synchronize_context(owner->handle);
    for (const CUcontext user : users)
        if (result == CUDA_SUCCESS)
            result = synchronize_context(user);
    return result;
}

bool is_capture_error(CUresult result) {
    return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_CAPTURED_EVENT;
}

} // namespace

Answer allocate(size_t size_bytes, CUdeviceptr *address, CUresult *result) {
    if (address == nullptr || size_bytes == 0 || driver_only())
        return Answer::driver;
    Context *context = current_context();
    if (context == nullptr || context->green || !context->facts->owned || size_bytes > context->facts->total_bytes)
        return Answer::driver;
    if (capture_active()) {
        *result = capture_refusal();
        if (*result != CUDA_SUCCESS)
            return Answer::refused;
    }
    CUdeviceptr allocated = 0;
    *result = size_bytes < kSlabBytes ? allocate_small(context, size_bytes, &allocated)
                                      : allocate_large(context, size_bytes, &allocated);
    if (*result != CUDA_SUCCESS) {
        if (*result != CUDA_ERROR_OUT_OF_MEMORY)
            debug("an allocation of %zu bytes is left to the driver (%d)", size_bytes, *result);
        return Answer::driver;
    }
    *address = allocated;
    return Answer::ours;
}

CUresult free_allocation(CUdeviceptr address, bool *ours) {
    *ours = false;
    if (address == 0 || driver_only())
        return CUDA_SUCCESS;
    Memory &all = memory();
    Allocation allocation;
    {
        std::lock_guard lock(all.mutex);
        const auto found = all.allocations.find(address);
        *ours = found != all.allocations.end() || all.covers(address);
        if (!*ours)
            return CUDA_SUCCESS;
        CUcontext current = nullptr;
        if (const CUresult result = WF_REAL(cuCtxGetCurrent)(&current); result != CUDA_SUCCESS || current == nullptr)
            return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_CONTEXT;
        if (found == all.allocations.end())
            return CUDA_ERROR_INVALID_VALUE; // inside an allocation, or freed before
        // Out of the table at once: of two threads that free it, one is told that it is no allocation.
        allocation = found->second;
        all.allocations.erase(found);
    }
    if (capture_active()) {
        const CUresult refused = capture_refusal();
        std::lock_guard lock(all.mutex);
        if (refused != CUDA_SUCCESS) {
            all.allocations.emplace(allocation.address, allocation);
            return refused;
        }
        if (capture_active()) {
            memory().put_off.push_back(allocation);
            return CUDA_SUCCESS;
        }
    }
    CUresult result = wait_for_users(allocation.block->owner);
    if (result == CUDA_SUCCESS)
        return give_back(allocation);
    std::lock_guard lock(all.mutex);
    if (is_capture_error(result) && capture_active()) { // one began after we looked
        memory().put_off.push_back(allocation);
        return CUDA_SUCCESS;
    }
    all.allocations.emplace(allocation.address, allocation);
    return result;
}

void free_what_was_put_off() {
    std::vector<Allocation> freed;
    {
        std::lock_guard lock(memory().mutex);
        freed.swap(memory().put_off);
    }
    for (const Allocation &allocation : freed) {
        CUresult result = wait_for_users(allocation.block->owner);
        if (result != CUDA_SUCCESS && is_capture_error(result) && capture_active()) {
            std::lock_guard lock(memory().mutex);
            memory().put_off.push_back(allocation);
            continue;
        }
        if (result == CUDA_SUCCESS)
            result = give_back(allocation);
        if (result != CUDA_SUCCESS)
            debug("memory freed during a capture could not be given back: %d", result);
    }
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuMemAlloc_v2, CUdeviceptr *dptr, size_t bytesize) {
    GateScope scope(Symbol::cuMemAlloc_v2);
    CUresult result = CUDA_SUCCESS;
    if (scope.nested())
        return WF_REAL(cuMemAlloc_v2)(dptr, bytesize);
    switch (allocate(bytesize, dptr, &result)) {
    case Answer::ours:
    case Answer::refused:
        return result;
    case Answer::driver:
        break;
    }
    result = driver_memory_call([&] { return WF_REAL(cuMemAlloc_v2)(dptr, bytesize); });
    if (result == CUDA_SUCCESS)
        driver_memory_allocated(*dptr, bytesize);
    return result;
}

WF_HOOK(cuMemAllocPitch_v2, CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
        unsigned int ElementSizeBytes) {
    GateScope scope(Symbol::cuMemAllocPitch_v2);
    const auto ask_driver = [&](size_t height) {
        return WF_REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, height, ElementSizeBytes);
    };
    const Context *context = driver_only() || scope.nested() ? nullptr : current_context();
    if (context == nullptr || !context->facts->owned || Height == 0 || capture_active()) {
        const CUresult result = driver_memory_call([&] { return ask_driver(Height); });
        if (result == CUDA_SUCCESS)
            driver_memory_allocated(*dptr, *pPitch * Height);
        return result;
    }
    // The driver chooses the pitch and checks the arguments; one row of it shows both.
    CUresult result = driver_memory_call([&] { return ask_driver(1); });
    if (result != CUDA_SUCCESS)
        return result;
    if (const CUresult freed = WF_REAL(cuMemFree_v2)(*dptr); freed != CUDA_SUCCESS)
        return freed;
    size_t size_bytes = 0;
    if (!__builtin_mul_overflow(*pPitch, Height, &size_bytes) && allocate(size_bytes, dptr, &result) == Answer::ours)
        return CUDA_SUCCESS;
    result = driver_memory_call([&] { return ask_driver(Height); });
    if (result == CUDA_SUCCESS)
        driver_memory_allocated(*dptr, size_bytes);
    return result;
}

WF_HOOK(cuMemFree_v2, CUdeviceptr dptr) {
    GateScope scope(Symbol::cuMemFree_v2);
    bool ours = false;
    CUresult result = free_allocation(dptr, &ours);
    if (ours)
        return result;
    result = WF_REAL(cuMemFree_v2)(dptr);
    if (result == CUDA_SUCCESS)
        driver_memory_freed(dptr);
    return result;
}

namespace {
// Memory from cuMemAlloc may also be freed in stream order. Ours is freed when the stream has come to that point.
CUresult free_in_stream(CUdeviceptr address, CUstream stream, CUresult (*real)(CUdeviceptr, CUstream),
                        CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *), CUresult (*wait)(CUstream)) {
    bool ours = false;
    if (!driver_only()) {
        std::lock_guard lock(memory().mutex);
        ours = memory().covers(address);
    }
    if (!ours)
        return real(address, stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = is_capturing(stream, &status);
    if (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_INVALID_VALUE; // a graph can free only what a graph or a pool allocated
    if (result == CUDA_SUCCESS)
        result = wait(stream);
    return result == CUDA_SUCCESS ? free_allocation(address, &ours) : result;
}
} // namespace

WF_HOOK(cuMemFreeAsync, CUdeviceptr dptr, CUstream hStream) {
    GateScope scope(Symbol::cuMemFreeAsync);
    return free_in_stream(dptr, hStream, WF_REAL(cuMemFreeAsync), WF_REAL(cuStreamIsCapturing),
                          WF_REAL(cuStreamSynchronize));
}

WF_HOOK(cuMemFreeAsync_ptsz, CUdeviceptr dptr, CUstream hStream) {
    GateScope scope(Symbol::cuMemFreeAsync_ptsz);
    return free_in_stream(dptr, hStream, WF_REAL(cuMemFreeAsync_ptsz), WF_REAL(cuStreamIsCapturing_ptsz),
                          WF_REAL(cuStreamSynchronize_ptsz));
}
