// See copy.hpp.
#include "copy.hpp"

#include "address_space.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "error.hpp"
#include "submit.hpp"
#include "work.hpp"

namespace simgpu {
namespace {

// Pageable sources up to this size are copied aside at the call, as the real driver does through its staging buffer;
// larger ones make the call wait.
constexpr size_t kStagedBytes = 64 << 10;

bool pinned(std::uint64_t address) {
    auto allocation = AddressSpace::instance().allocation_at(address);
    return allocation &&
           (allocation->kind == AllocationKind::kHostPinned || allocation->kind == AllocationKind::kHostRegistered ||
            allocation->kind == AllocationKind::kManaged);
}

bool on_device(std::uint64_t address) {
    auto mapping = AddressSpace::instance().mapping_at(address);
    return mapping && mapping->physical;
}

// Bytes from the first to the last one touched.
size_t extent(size_t width, size_t pitch, size_t height, size_t slice, size_t depth) {
    return (depth - 1) * slice + (height - 1) * pitch + width;
}

void check_side(std::uint64_t base, size_t size_bytes, bool device, bool write) {
    require(base != 0);
    if (!device)
        return;
    auto context = current_context();
    int number = context ? context->device : 0;
    auto spans = AddressSpace::instance().spans();
    if (accessible(*spans, base, size_bytes, number, write))
        return;
    // Peers: memory of another device that gave its own device access.
    auto mapping = AddressSpace::instance().mapping_at(base);
    require(mapping && mapping->physical && mapping->physical->device() >= 0);
    require(accessible(*spans, base, size_bytes, mapping->physical->device(), write));
}

} // namespace

CUDA_MEMCPY3D flat_copy(CUmemorytype to_type, std::uint64_t to, CUmemorytype from_type, std::uint64_t from,
                        size_t size_bytes) {
    CUDA_MEMCPY3D d{};
    d.srcMemoryType = from_type;
    d.dstMemoryType = to_type;
    d.srcHost = reinterpret_cast<const void *>(from);
    d.srcDevice = from;
    d.dstHost = reinterpret_cast<void *>(to);
    d.dstDevice = to;
    d.WidthInBytes = size_bytes;
    d.Height = 1;
    d.Depth = 1;
    return d;
}

void check_copy(CUDA_MEMCPY3D &d) {
    require(d.srcMemoryType != CU_MEMORYTYPE_ARRAY && d.dstMemoryType != CU_MEMORYTYPE_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
    if (d.WidthInBytes == 0 || d.Height == 0 || d.Depth == 0)
        return;
    if (d.srcPitch == 0)
        d.srcPitch = d.srcXInBytes + d.WidthInBytes;
    if (d.dstPitch == 0)
        d.dstPitch = d.dstXInBytes + d.WidthInBytes;
    if (d.srcHeight == 0)
        d.srcHeight = d.srcY + d.Height;
    if (d.dstHeight == 0)
        d.dstHeight = d.dstY + d.Height;
    require(d.srcXInBytes + d.WidthInBytes <= d.srcPitch && d.dstXInBytes + d.WidthInBytes <= d.dstPitch);
    auto resolve = [](CUmemorytype &type, std::uint64_t host, std::uint64_t device) {
        std::uint64_t address = type == CU_MEMORYTYPE_HOST ? host : device;
        if (type == CU_MEMORYTYPE_UNIFIED)
            type = on_device(address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return address;
    };
    std::uint64_t from = resolve(d.srcMemoryType, reinterpret_cast<std::uint64_t>(d.srcHost), d.srcDevice);
    std::uint64_t to = resolve(d.dstMemoryType, reinterpret_cast<std::uint64_t>(d.dstHost), d.dstDevice);
    d.srcHost = reinterpret_cast<const void *>(from);
    d.srcDevice = from;
    d.dstHost = reinterpret_cast<void *>(to);
    d.dstDevice = to;
    from += d.srcXInBytes + d.srcY * d.srcPitch + d.srcZ * d.srcPitch * d.srcHeight;
    to += d.dstXInBytes + d.dstY * d.dstPitch + d.dstZ * d.dstPitch * d.dstHeight;
    size_t from_bytes = extent(d.WidthInBytes, d.srcPitch, d.Height, d.srcPitch * d.srcHeight, d.Depth);
    size_t to_bytes = extent(d.WidthInBytes, d.dstPitch, d.Height, d.dstPitch * d.dstHeight, d.Depth);
    check_side(from, from_bytes, d.srcMemoryType == CU_MEMORYTYPE_DEVICE, false);
    check_side(to, to_bytes, d.dstMemoryType == CU_MEMORYTYPE_DEVICE, true);
}

void submit_copy(CUDA_MEMCPY3D d, CUstream handle, Waiting waiting) {
    auto stream = resolve_stream(handle);
    if (waiting == Waiting::kWaits)
        forbid_during_capture();
    check_copy(d);
    if (d.WidthInBytes == 0 || d.Height == 0 || d.Depth == 0)
        return;
    bool captured = capture_status(*stream) != CU_STREAM_CAPTURE_STATUS_NONE;
    bool pageable_source = d.srcMemoryType == CU_MEMORYTYPE_HOST && !pinned(d.srcDevice);
    bool pageable_destination = d.dstMemoryType == CU_MEMORYTYPE_HOST && !pinned(d.dstDevice);
    if (waiting == Waiting::kReturns && !captured && pageable_source && !pageable_destination && d.Height == 1 &&
        d.Depth == 1 && d.WidthInBytes <= kStagedBytes) {
        const auto *source = static_cast<const char *>(d.srcHost) + d.srcXInBytes;
        submit(*stream, std::make_shared<StagedCopyWork>(d.dstDevice + d.dstXInBytes, source, d.WidthInBytes));
        return;
    }
    auto work = std::make_shared<CopyWork>(d);
    bool wait = waiting == Waiting::kWaits || (!captured && (pageable_source || pageable_destination));
    if (wait) {
        submit_and_wait(*stream, std::move(work));
    } else {
        submit(*stream, std::move(work));
    }
}

void check_memset(CUDA_MEMSET_NODE_PARAMS &p) {
    require(p.elementSize == 1 || p.elementSize == 2 || p.elementSize == 4);
    require(p.dst % p.elementSize == 0);
    if (p.width == 0 || p.height == 0)
        return;
    size_t row = p.width * p.elementSize;
    require(row / p.elementSize == p.width);
    if (p.height == 1 || p.pitch == 0)
        p.pitch = std::max(p.pitch, row);
    require(p.pitch >= row);
    check_side(p.dst, extent(row, p.pitch, p.height, 0, 1), true, true);
}

void submit_memset(CUDA_MEMSET_NODE_PARAMS p, CUstream handle, Waiting waiting) {
    auto stream = resolve_stream(handle);
    if (waiting == Waiting::kWaits)
        forbid_during_capture();
    check_memset(p);
    if (p.width == 0 || p.height == 0)
        return;
    auto work = std::make_shared<MemsetWork>(p);
    if (waiting == Waiting::kWaits) {
        submit_and_wait(*stream, std::move(work));
    } else {
        submit(*stream, std::move(work));
    }
}

} // namespace simgpu
