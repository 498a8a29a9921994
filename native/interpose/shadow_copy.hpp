// What copies of boxes write, for calls and for the nodes of graphs.
#pragma once

#include "shadow.hpp"

#include <algorithm>
#include <optional>

namespace woodfrog::interpose::shadow {

struct Span {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
};

// One range around a box of `width_bytes` x `height` x `depth` at (x_bytes, y, z) of pitched memory at `base`. Nothing
// when the numbers are impossible.
std::optional<Span> span_of_box(CUdeviceptr base, size_t x_bytes, size_t y, size_t z, size_t pitch, size_t rows,
                                size_t width_bytes, size_t height, size_t depth);

// What a 3-D copy writes; arrays are memory of the driver's.
template <typename Copy> std::optional<Span> span_of_copy(const Copy &copy) {
    if (copy.dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return Span{};
    const CUdeviceptr base =
        copy.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<CUdeviceptr>(copy.dstHost) : copy.dstDevice;
    return span_of_box(base, copy.dstXInBytes, copy.dstY, copy.dstZ, copy.dstPitch, copy.dstHeight, copy.WidthInBytes,
                       copy.Height, copy.Depth);
}

// What a node that fills memory writes.
inline std::optional<Span> span_of_fill(const CUDA_MEMSET_NODE_PARAMS &fill) {
    return span_of_box(fill.dst, 0, 0, 0, fill.height <= 1 ? 0 : fill.pitch, 0, fill.width * fill.elementSize,
                       fill.height, 1);
}

} // namespace woodfrog::interpose::shadow
