// What copies, fills and values written by a stream write, as their documentation says it, and the table of functions
// that follows from it; for shadow execution and for copy-on-write. A function that is not listed here may write
// anything. Addresses of host memory are told too: they belong to nothing that is owned.
#pragma once

#include "shadow_copy.hpp"

namespace woodfrog::interpose {

// `Sink` has range(address, bytes) and impossible().
template <typename Sink> struct CopyWrites {
    static void span(const std::optional<shadow::Span> &span) {
        if (!span)
            return Sink::impossible();
        Sink::range(span->address, span->size_bytes);
    }
    static void host(void *to, size_t bytes) { Sink::range(reinterpret_cast<CUdeviceptr>(to), bytes); }

    static constexpr auto kLinear = [](CUdeviceptr to, const auto &, size_t bytes, auto...) { Sink::range(to, bytes); };
    static constexpr auto kToHost = [](void *to, CUdeviceptr, size_t bytes, auto...) { host(to, bytes); };
    static constexpr auto kPeer = [](CUdeviceptr to, CUcontext, CUdeviceptr, CUcontext, size_t bytes, auto...) {
        Sink::range(to, bytes);
    };
    static constexpr auto k2D = [](const CUDA_MEMCPY2D *copy, auto...) {
        if (copy == nullptr || copy->dstMemoryType == CU_MEMORYTYPE_ARRAY)
            return;
        const CUdeviceptr base =
            copy->dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<CUdeviceptr>(copy->dstHost) : copy->dstDevice;
        span(shadow::span_of_box(base, copy->dstXInBytes, copy->dstY, 0, copy->dstPitch, 0, copy->WidthInBytes,
                                 copy->Height, 1));
    };
    static constexpr auto k3D = [](const auto *copy, auto...) {
        if (copy != nullptr)
            span(shadow::span_of_copy(*copy));
    };
    static constexpr auto kFromArray = [](CUdeviceptr to, CUarray, size_t, size_t bytes, auto...) {
        Sink::range(to, bytes);
    };
    static constexpr auto kHostFromArray = [](void *to, CUarray, size_t, size_t bytes, auto...) { host(to, bytes); };
    // Arrays are memory of the driver's.
    static constexpr auto kToArray = [](auto...) {};
    template <size_t unit>
    static constexpr auto kFill = [](CUdeviceptr to, auto, size_t count, auto...) { Sink::range(to, count * unit); };
    template <size_t unit>
    static constexpr auto kFill2D = [](CUdeviceptr to, size_t pitch, auto, size_t width, size_t height, auto...) {
        span(shadow::span_of_box(to, 0, 0, 0, pitch, 0, width * unit, height, 1));
    };
    template <size_t bytes>
    static constexpr auto kValue = [](CUstream, CUdeviceptr to, auto...) { Sink::range(to, bytes); };
    static constexpr auto kBatch = [](CUdeviceptr *to, CUdeviceptr *, size_t *sizes, size_t count, auto...) {
        for (size_t i = 0; to != nullptr && sizes != nullptr && i < count; ++i)
            Sink::range(to[i], sizes[i]);
    };
};

// `Wrap` makes the function for the table out of what is to be called before the driver's.
template <typename Sink, template <auto, Symbol, typename> class Wrap> shadow::Overrides copy_table() {
    using Writes = CopyWrites<Sink>;
#define WF_THREAD(record, name) WF_WRAPPED(Wrap, name, record), WF_WRAPPED(Wrap, name##_ptds, record)
#define WF_STREAM(record, name) WF_WRAPPED(Wrap, name, record), WF_WRAPPED(Wrap, name##_ptsz, record)
    return {
        WF_THREAD(Writes::kLinear, cuMemcpy),
        WF_STREAM(Writes::kLinear, cuMemcpyAsync),
        WF_THREAD(Writes::kLinear, cuMemcpyHtoD_v2),
        WF_STREAM(Writes::kLinear, cuMemcpyHtoDAsync_v2),
        WF_THREAD(Writes::kLinear, cuMemcpyDtoD_v2),
        WF_STREAM(Writes::kLinear, cuMemcpyDtoDAsync_v2),
        WF_THREAD(Writes::kToHost, cuMemcpyDtoH_v2),
        WF_STREAM(Writes::kToHost, cuMemcpyDtoHAsync_v2),
        WF_THREAD(Writes::kPeer, cuMemcpyPeer),
        WF_STREAM(Writes::kPeer, cuMemcpyPeerAsync),
        WF_THREAD(Writes::k2D, cuMemcpy2D_v2),
        WF_THREAD(Writes::k2D, cuMemcpy2DUnaligned_v2),
        WF_STREAM(Writes::k2D, cuMemcpy2DAsync_v2),
        WF_THREAD(Writes::k3D, cuMemcpy3D_v2),
        WF_STREAM(Writes::k3D, cuMemcpy3DAsync_v2),
        WF_THREAD(Writes::k3D, cuMemcpy3DPeer),
        WF_STREAM(Writes::k3D, cuMemcpy3DPeerAsync),
        WF_THREAD(Writes::kFromArray, cuMemcpyAtoD_v2),
        WF_THREAD(Writes::kHostFromArray, cuMemcpyAtoH_v2),
        WF_STREAM(Writes::kHostFromArray, cuMemcpyAtoHAsync_v2),
        WF_THREAD(Writes::kToArray, cuMemcpyDtoA_v2),
        WF_THREAD(Writes::kToArray, cuMemcpyHtoA_v2),
        WF_STREAM(Writes::kToArray, cuMemcpyHtoAAsync_v2),
        WF_THREAD(Writes::kToArray, cuMemcpyAtoA_v2),
        WF_THREAD(Writes::template kFill<1>, cuMemsetD8_v2),
        WF_THREAD(Writes::template kFill<2>, cuMemsetD16_v2),
        WF_THREAD(Writes::template kFill<4>, cuMemsetD32_v2),
        WF_STREAM(Writes::template kFill<1>, cuMemsetD8Async),
        WF_STREAM(Writes::template kFill<2>, cuMemsetD16Async),
        WF_STREAM(Writes::template kFill<4>, cuMemsetD32Async),
        WF_THREAD(Writes::template kFill2D<1>, cuMemsetD2D8_v2),
        WF_THREAD(Writes::template kFill2D<2>, cuMemsetD2D16_v2),
        WF_THREAD(Writes::template kFill2D<4>, cuMemsetD2D32_v2),
        WF_STREAM(Writes::template kFill2D<1>, cuMemsetD2D8Async),
        WF_STREAM(Writes::template kFill2D<2>, cuMemsetD2D16Async),
        WF_STREAM(Writes::template kFill2D<4>, cuMemsetD2D32Async),
        WF_STREAM(Writes::template kValue<4>, cuStreamWriteValue32_v2),
        WF_STREAM(Writes::template kValue<8>, cuStreamWriteValue64_v2),
#if CUDA_VERSION >= 12080
        WF_STREAM(Writes::kBatch, cuMemcpyBatchAsync),
#endif
#if CUDA_VERSION >= 13000
        WF_STREAM(Writes::kBatch, cuMemcpyBatchAsync_v2),
#endif
    };
#undef WF_THREAD
#undef WF_STREAM
}

} // namespace woodfrog::interpose
