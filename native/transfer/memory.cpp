// Import, creation, mapping and release of physical GPU memory; see memory.hpp.
#include "memory.hpp"

#include <cerrno>
#include <limits>

namespace woodfrog::transfer {
namespace {

// `host_node`: the NUMA node of host memory that the device reaches, or -1 for the device's own.
CUmemAllocationProp properties(const Context &context, int host_node = -1) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = context.device();
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (host_node >= 0) {
        properties.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
        properties.location.id = host_node;
        return properties;
    }
    // As the interposer asks for it: what a restored target gets must do all that its own memory did.
    int direct_rdma = 0;
    if (WF_TRY_CUDA(cuDeviceGetAttribute, &direct_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                    context.device()) == CUDA_SUCCESS)
        properties.allocFlags.gpuDirectRDMACapable = direct_rdma ? 1 : 0;
    return properties;
}

uint64_t total(const char *operation, const std::vector<uint64_t> &sizes, uint64_t granularity) {
    uint64_t sum = 0;
    for (uint64_t size : sizes) {
        if (size == 0 || size % granularity != 0)
            throw_invalid(operation, "the size " + std::to_string(size) + " is not a positive multiple of " +
                                         std::to_string(granularity) + " bytes");
        if (sum > std::numeric_limits<uint64_t>::max() / 2 - size)
            throw_invalid(operation, "the sizes add up to more than an address space");
        sum += size;
    }
    return sum;
}

// Maps `handle` at its place; takes the handle over even if it throws.
std::shared_ptr<Memory> adopt(const std::shared_ptr<Reservation> &reservation, uint64_t offset, uint64_t size,
                              CUmemGenericAllocationHandle handle, bool created) {
    try {
        return std::make_shared<Memory>(reservation, offset, size, handle, created);
    } catch (...) {
        WF_TRY_CUDA(cuMemRelease, handle);
        throw;
    }
}

// One call for the whole range: a call for each piece costs 60 microseconds a piece on an H200.
void allow_access(const Reservation &reservation, uint64_t size_bytes) {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = reservation.context().device();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    WF_CUDA(cuMemSetAccess, reservation.address(), size_bytes, &access, size_t{1});
}

} // namespace

uint64_t granularity_bytes(const Context &context) {
    const CUmemAllocationProp wanted = properties(context);
    size_t granularity = 0;
    WF_CUDA(cuMemGetAllocationGranularity, &granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    return granularity;
}

Reservation::Reservation(std::shared_ptr<Context> context, uint64_t size_bytes)
    : context_(std::move(context)), size_bytes_(size_bytes) {
    Current current(*context_);
    WF_CUDA(cuMemAddressReserve, &address_, size_bytes, size_t{0}, CUdeviceptr{0}, 0ull);
}

Reservation::~Reservation() {
    WF_TRY_CUDA(cuMemAddressFree, address_, size_bytes_);
}

std::vector<std::shared_ptr<Memory>> Memory::import(const std::shared_ptr<Context> &context,
                                                    const std::vector<int> &fds, const std::vector<uint64_t> &sizes) {
    if (fds.size() != sizes.size())
        throw_invalid("import_memory", "there are " + std::to_string(fds.size()) + " descriptors for " +
                                           std::to_string(sizes.size()) + " sizes");
    const uint64_t size_bytes = total("import_memory", sizes, granularity_bytes(*context));
    std::vector<std::shared_ptr<Memory>> result;
    if (sizes.empty())
        return result;
    auto reservation = std::make_shared<Reservation>(context, size_bytes);
    Current current(*context);
    uint64_t offset = 0;
    for (size_t i = 0; i < fds.size(); i++) {
        CUmemGenericAllocationHandle handle;
        WF_CUDA(cuMemImportFromShareableHandle, &handle, reinterpret_cast<void *>(static_cast<intptr_t>(fds[i])),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        result.push_back(adopt(reservation, offset, sizes[i], handle, false));
        offset += sizes[i];
    }
    allow_access(*reservation, size_bytes);
    return result;
}

std::vector<std::shared_ptr<Memory>> Memory::create(const std::shared_ptr<Context> &context,
                                                    const std::vector<uint64_t> &sizes,
                                                    const std::vector<int> &host_nodes) {
    if (!host_nodes.empty() && host_nodes.size() != sizes.size())
        throw_invalid("create_memory", "there are " + std::to_string(host_nodes.size()) + " host nodes for " +
                                           std::to_string(sizes.size()) + " sizes");
    const uint64_t size_bytes = total("create_memory", sizes, granularity_bytes(*context));
    std::vector<std::shared_ptr<Memory>> result;
    if (sizes.empty())
        return result;
    const CUmemAllocationProp own = properties(*context);
    auto reservation = std::make_shared<Reservation>(context, size_bytes);
    Current current(*context);
    uint64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        const int host_node = host_nodes.empty() ? -1 : host_nodes[i];
        const CUmemAllocationProp wanted = host_node < 0 ? own : properties(*context, host_node);
        CUmemGenericAllocationHandle handle;
        WF_CUDA(cuMemCreate, &handle, size_t{sizes[i]}, &wanted, 0ull);
        result.push_back(adopt(reservation, offset, sizes[i], handle, true));
        offset += sizes[i];
    }
    allow_access(*reservation, size_bytes);
    return result;
}

std::shared_ptr<Memory> Memory::view(const std::shared_ptr<Context> &context, CUdeviceptr address,
                                     uint64_t size_bytes) {
    if (address == 0 || size_bytes == 0)
        throw_invalid("view_memory", "there is no memory at address " + std::to_string(address) + " of " +
                                         std::to_string(size_bytes) + " bytes");
    return std::make_shared<Memory>(context, address, size_bytes);
}

Memory::Memory(std::shared_ptr<Context> context, CUdeviceptr address, uint64_t size_bytes)
    : context_(std::move(context)), address_(address), size_bytes_(size_bytes) {}

Memory::Memory(std::shared_ptr<Reservation> reservation, uint64_t offset, uint64_t size_bytes,
               CUmemGenericAllocationHandle handle, bool created)
    : context_(Context::of(reservation->context().ordinal())), reservation_(std::move(reservation)),
      address_(reservation_->address() + offset), size_bytes_(size_bytes), handle_(handle), created_(created) {
    WF_CUDA(cuMemMap, address_, size_t{size_bytes}, size_t{0}, handle, 0ull); // the offset must be 0
    mapped_ = true;
}

Memory::~Memory() {
    if (mapped_)
        unmap_and_release(); // an error here has nobody to go to; release() is the way to see it
}

CUresult Memory::unmap_and_release() noexcept {
    mapped_ = false;
    CUcontext popped;
    const Driver &cuda = driver(); // loaded long ago: this object exists
    const bool pushed = cuda.cuCtxPushCurrent(context_->handle()) == CUDA_SUCCESS;
    const CUresult unmapped = cuda.cuMemUnmap(address_, size_bytes_);
    const CUresult released = cuda.cuMemRelease(handle_);
    if (pushed)
        cuda.cuCtxPopCurrent(&popped);
    reservation_.reset();
    return unmapped != CUDA_SUCCESS ? unmapped : released;
}

void Memory::release() {
    if (in_use_.close() && mapped_) // a view is not ours to unmap
        check(unmap_and_release(), "cuMemRelease");
}

int Memory::export_fd() {
    Use here = use();
    if (!created_)
        throw_invalid("export_fd", "imported memory cannot be exported again; pass its own descriptor on");
    int fd = -1;
    Current current(*context_);
    WF_CUDA(cuMemExportToShareableHandle, &fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
    return fd;
}

} // namespace woodfrog::transfer
