// Making, mapping and destroying blocks, and the address ranges that are kept for the next one; see block.hpp.
#include "block.hpp"

#include "debug.hpp"
#include "slab.hpp"
#include "spent.hpp"

#include <algorithm>
#include <mutex>

namespace woodfrog::interpose {
namespace {

// An address range costs nothing but address space; reserving one costs a call. What is kept is bounded so that a
// program that varies its sizes does not pile them up.
constexpr size_t kKeptReservations = 64;

struct Reservation {
    CUdeviceptr address;
    size_t size_bytes;
};

struct Reservations {
    std::mutex mutex;
    std::vector<Reservation> kept; // oldest first
};

Reservations &reservations() {
    static Reservations *const instance = new Reservations;
    return *instance;
}

CUresult reserve(size_t size_bytes, CUdeviceptr *address) {
    {
        std::lock_guard lock(reservations().mutex);
        auto &kept = reservations().kept;
        const auto fits = std::find_if(kept.rbegin(), kept.rend(),
                                       [&](const Reservation &one) { return one.size_bytes == size_bytes; });
        if (fits != kept.rend()) {
            *address = fits->address;
            kept.erase(std::next(fits).base());
            return CUDA_SUCCESS;
        }
    }
    return WF_REAL(cuMemAddressReserve)(address, size_bytes, 0, 0, 0);
}

void unreserve(CUdeviceptr address, size_t size_bytes) {
    Reservation oldest{};
    {
        std::lock_guard lock(reservations().mutex);
        auto &kept = reservations().kept;
        kept.push_back({address, size_bytes});
        if (kept.size() <= kKeptReservations)
            return;
        oldest = kept.front();
        kept.erase(kept.begin());
    }
    if (const CUresult result = WF_REAL(cuMemAddressFree)(oldest.address, oldest.size_bytes); result != CUDA_SUCCESS)
        debug("cuMemAddressFree of a kept range failed: %d", result);
}

} // namespace

Block::~Block() = default;

CUresult set_block_access(const Block &block, const std::vector<CUdevice> &readers) {
    std::vector<CUmemAccessDesc> access;
    access.reserve(readers.size() + 1);
    access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, block.physical.device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    for (const CUdevice device : readers)
        access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    const spent::Scope scope(spent::What::access_call);
    return WF_REAL(cuMemSetAccess)(block.address, block.size_bytes, access.data(), access.size());
}

CUresult map_block(Block *block, const std::vector<CUdevice> &readers) {
    CUresult result = spent::timed(spent::What::map_call, [&] {
        return WF_REAL(cuMemMap)(block->address, block->size_bytes, 0, block->physical.handle, 0);
    });
    if (result != CUDA_SUCCESS)
        return result;
    block->mapped = true;
    result = set_block_access(*block, readers); // only after the mapping: access belongs to it
    if (result != CUDA_SUCCESS)
        unmap_block(block);
    return result;
}

CUresult unmap_block(Block *block) {
    const spent::Scope scope(spent::What::unmap_call);
    const CUresult result = WF_REAL(cuMemUnmap)(block->address, block->size_bytes);
    if (result == CUDA_SUCCESS)
        block->mapped = false;
    return result;
}

CUresult create_block(Context *owner, size_t size_bytes, const std::vector<CUdevice> &readers,
                      std::unique_ptr<Block> *created) {
    auto block = std::make_unique<Block>();
    CUresult result = create_physical(owner->device, size_bytes, &block->physical);
    if (result != CUDA_SUCCESS)
        return result;
    block->owner = owner;
    block->size_bytes = size_bytes;
    result = reserve(size_bytes, &block->address);
    if (result == CUDA_SUCCESS) {
        result = map_block(block.get(), readers);
        if (result == CUDA_SUCCESS) {
            *created = std::move(block);
            return CUDA_SUCCESS;
        }
        if (block->mapped) {
            debug("a block could be neither used nor unmapped: it is lost");
            static_cast<void>(block.release());
            return result;
        }
        unreserve(block->address, size_bytes);
    }
    if (const CUresult undone = release_physical(&block->physical); undone != CUDA_SUCCESS)
        debug("cuMemRelease of memory that could not be mapped failed: %d", undone);
    return result;
}

CUresult destroy_block(std::unique_ptr<Block> block) {
    CUresult result = block->mapped ? unmap_block(block.get()) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = release_physical(&block->physical);
    if (result != CUDA_SUCCESS) {
        debug("a block of %zu bytes could not be given back (%d): it is lost", block->size_bytes, result);
        static_cast<void>(block.release());
        return result;
    }
    unreserve(block->address, block->size_bytes);
    return CUDA_SUCCESS;
}

} // namespace woodfrog::interpose
