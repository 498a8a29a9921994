// Copies, fills and values written by a stream: their documentation says what they write. Addresses of host memory are
// noted too: they belong to nothing that is owned. What is not listed here counts as a write of everything.
#include "shadow_copy.hpp"

namespace woodfrog::interpose::shadow {

std::optional<Span> span_of_box(CUdeviceptr base, size_t x_bytes, size_t y, size_t z, size_t pitch, size_t rows,
                                size_t width_bytes, size_t height, size_t depth) {
    if (width_bytes == 0 || height == 0 || depth == 0)
        return Span{};
    // A pitch or height of 0 stands for the least there can be; the range then begins where any meaning of it does.
    const bool said = pitch >= x_bytes + width_bytes && (depth == 1 || rows >= y + height);
    pitch = std::max(pitch, x_bytes + width_bytes);
    rows = std::max(rows, y + height);
    size_t row = 0, last = 0, end = 0, first = 0;
    if (__builtin_mul_overflow(z + depth - 1, rows, &row) ||
        __builtin_mul_overflow(row + y + height - 1, pitch, &last) ||
        __builtin_add_overflow(last, x_bytes + width_bytes, &end))
        return std::nullopt;
    if (said && z == 0)
        first = y * pitch + x_bytes;
    return Span{base + first, end - first};
}

namespace {

void wrote(const std::optional<Span> &span) {
    if (!span)
        return wrote_everything("a copy of impossible size");
    shadow::wrote(span->address, span->size_bytes);
}

template <typename Copy> void wrote_2d(const Copy *copy) {
    if (copy == nullptr || copy->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return;
    const CUdeviceptr base =
        copy->dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<CUdeviceptr>(copy->dstHost) : copy->dstDevice;
    wrote(span_of_box(base, copy->dstXInBytes, copy->dstY, 0, copy->dstPitch, 0, copy->WidthInBytes, copy->Height, 1));
}

template <typename Copy> void wrote_3d(const Copy *copy) {
    if (copy != nullptr)
        wrote(span_of_copy(*copy));
}

void wrote(CUdeviceptr address, size_t size_bytes) {
    shadow::wrote(address, size_bytes);
}

constexpr auto kLinear = [](CUdeviceptr to, const auto &, size_t bytes, auto...) { wrote(to, bytes); };
constexpr auto kToHost = [](void *to, CUdeviceptr, size_t bytes, auto...) {
    wrote(reinterpret_cast<CUdeviceptr>(to), bytes);
};
constexpr auto kPeer = [](CUdeviceptr to, CUcontext, CUdeviceptr, CUcontext, size_t bytes, auto...) {
    wrote(to, bytes);
};
constexpr auto k2D = [](const CUDA_MEMCPY2D *copy, auto...) { wrote_2d(copy); };
constexpr auto k3D = [](const CUDA_MEMCPY3D *copy, auto...) { wrote_3d(copy); };
constexpr auto k3DPeer = [](const CUDA_MEMCPY3D_PEER *copy, auto...) { wrote_3d(copy); };
constexpr auto kFromArray = [](CUdeviceptr to, CUarray, size_t, size_t bytes, auto...) { wrote(to, bytes); };
constexpr auto kHostFromArray = [](void *to, CUarray, size_t, size_t bytes, auto...) {
    wrote(reinterpret_cast<CUdeviceptr>(to), bytes);
};
// Arrays are memory of the driver's.
constexpr auto kToArray = [](auto...) {};

template <size_t unit>
constexpr auto kFill = [](CUdeviceptr to, auto, size_t count, auto...) { wrote(to, count * unit); };
template <size_t unit>
constexpr auto kFill2D = [](CUdeviceptr to, size_t pitch, auto, size_t width, size_t height, auto...) {
    wrote(span_of_box(to, 0, 0, 0, pitch, 0, width * unit, height, 1));
};
template <size_t bytes> constexpr auto kValue = [](CUstream, CUdeviceptr to, auto...) { wrote(to, bytes); };
#if CUDA_VERSION >= 12080
constexpr auto kBatch = [](CUdeviceptr *to, CUdeviceptr *, size_t *sizes, size_t count, auto...) {
    for (size_t i = 0; to != nullptr && sizes != nullptr && i < count; ++i)
        wrote(to[i], sizes[i]);
};
#endif

} // namespace

#define WF_THREAD(record, name) WF_BEFORE(name, record), WF_BEFORE(name##_ptds, record)
#define WF_STREAM(record, name) WF_BEFORE(name, record), WF_BEFORE(name##_ptsz, record)

Overrides copy_overrides() {
    return {
        WF_THREAD(kLinear, cuMemcpy),
        WF_STREAM(kLinear, cuMemcpyAsync),
        WF_THREAD(kLinear, cuMemcpyHtoD_v2),
        WF_STREAM(kLinear, cuMemcpyHtoDAsync_v2),
        WF_THREAD(kLinear, cuMemcpyDtoD_v2),
        WF_STREAM(kLinear, cuMemcpyDtoDAsync_v2),
        WF_THREAD(kToHost, cuMemcpyDtoH_v2),
        WF_STREAM(kToHost, cuMemcpyDtoHAsync_v2),
        WF_THREAD(kPeer, cuMemcpyPeer),
        WF_STREAM(kPeer, cuMemcpyPeerAsync),
        WF_THREAD(k2D, cuMemcpy2D_v2),
        WF_THREAD(k2D, cuMemcpy2DUnaligned_v2),
        WF_STREAM(k2D, cuMemcpy2DAsync_v2),
        WF_THREAD(k3D, cuMemcpy3D_v2),
        WF_STREAM(k3D, cuMemcpy3DAsync_v2),
        WF_THREAD(k3DPeer, cuMemcpy3DPeer),
        WF_STREAM(k3DPeer, cuMemcpy3DPeerAsync),
        WF_THREAD(kFromArray, cuMemcpyAtoD_v2),
        WF_THREAD(kHostFromArray, cuMemcpyAtoH_v2),
        WF_STREAM(kHostFromArray, cuMemcpyAtoHAsync_v2),
        WF_THREAD(kToArray, cuMemcpyDtoA_v2),
        WF_THREAD(kToArray, cuMemcpyHtoA_v2),
        WF_STREAM(kToArray, cuMemcpyHtoAAsync_v2),
        WF_THREAD(kToArray, cuMemcpyAtoA_v2),
        WF_THREAD(kFill<1>, cuMemsetD8_v2),
        WF_THREAD(kFill<2>, cuMemsetD16_v2),
        WF_THREAD(kFill<4>, cuMemsetD32_v2),
        WF_STREAM(kFill<1>, cuMemsetD8Async),
        WF_STREAM(kFill<2>, cuMemsetD16Async),
        WF_STREAM(kFill<4>, cuMemsetD32Async),
        WF_THREAD(kFill2D<1>, cuMemsetD2D8_v2),
        WF_THREAD(kFill2D<2>, cuMemsetD2D16_v2),
        WF_THREAD(kFill2D<4>, cuMemsetD2D32_v2),
        WF_STREAM(kFill2D<1>, cuMemsetD2D8Async),
        WF_STREAM(kFill2D<2>, cuMemsetD2D16Async),
        WF_STREAM(kFill2D<4>, cuMemsetD2D32Async),
        WF_STREAM(kValue<4>, cuStreamWriteValue32_v2),
        WF_STREAM(kValue<8>, cuStreamWriteValue64_v2),
#if CUDA_VERSION >= 12080
        WF_STREAM(kBatch, cuMemcpyBatchAsync),
#endif
#if CUDA_VERSION >= 13000
        WF_STREAM(kBatch, cuMemcpyBatchAsync_v2),
#endif
    };
}

} // namespace woodfrog::interpose::shadow
