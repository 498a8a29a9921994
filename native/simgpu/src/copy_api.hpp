// What the entry points of copies and memsets share: from the arguments of each to the general form.
#pragma once

#include <cuda.h>

#include "api.hpp"
#include "copy.hpp"

namespace simgpu {

inline constexpr CUmemorytype kHost = CU_MEMORYTYPE_HOST;
inline constexpr CUmemorytype kDevice = CU_MEMORYTYPE_DEVICE;
inline constexpr CUmemorytype kUnified = CU_MEMORYTYPE_UNIFIED;

inline std::uint64_t number(const void *pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

CUresult api_copy(const CUDA_MEMCPY3D &description, CUstream stream, Waiting waiting);
CUresult api_copy_2d(const CUDA_MEMCPY2D *description, CUstream stream, Waiting waiting);
CUresult api_copy_3d(const CUDA_MEMCPY3D *description, CUstream stream, Waiting waiting);
CUresult api_copy_peer(const CUDA_MEMCPY3D_PEER *description, CUstream stream, Waiting waiting);
CUresult api_memset(CUdeviceptr to, size_t pitch, unsigned element, unsigned value, size_t width, size_t height,
                    CUstream stream, Waiting waiting);

} // namespace simgpu
