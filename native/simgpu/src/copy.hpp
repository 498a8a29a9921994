// Checking and submitting of copies and memsets. All entry points, of one to three dimensions, synchronous or not, come
// down to these.
#pragma once

#include <cuda.h>

#include "stream.hpp"

namespace simgpu {

enum class Waiting { kWaits, kReturns };

// One-dimensional copy; each side is CU_MEMORYTYPE_HOST, _DEVICE or _UNIFIED.
CUDA_MEMCPY3D flat_copy(CUmemorytype to_type, std::uint64_t to, CUmemorytype from_type, std::uint64_t from,
                        size_t size_bytes);
// Throws CUDA_ERROR_INVALID_VALUE for memory that is not there, CUDA_ERROR_NOT_SUPPORTED for arrays.
void submit_copy(CUDA_MEMCPY3D description, CUstream handle, Waiting waiting);
void submit_memset(CUDA_MEMSET_NODE_PARAMS parameters, CUstream handle, Waiting waiting);
// The checks alone, for graph nodes.
void check_copy(CUDA_MEMCPY3D &description);
void check_memset(CUDA_MEMSET_NODE_PARAMS &parameters);

} // namespace simgpu
